"""config.json to ModelConfig, without torch: the forms that published checkpoints have, and errors."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from prefold.hf_config import load_model_config

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

MOONLIGHT = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "max_position_embeddings": 8192,
}

GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}

GLM_5_2 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "head_dim": 192,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


@pytest.fixture
def load(tmp_path: Path):
    def load(content: dict, dtype: str = "auto", generation: dict | None = None):
        (tmp_path / "config.json").write_text(json.dumps(content))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(tmp_path, dtype)

    return load


def without(content: dict, *keys: str) -> dict:
    return {key: value for key, value in content.items() if key not in keys}


def test_deepseek_v3(load):
    config = load(DEEPSEEK_V3)
    assert config.architecture == "DeepseekV3ForCausalLM"
    assert (config.num_layers, config.num_heads, config.vocab_size) == (61, 128, 129280)
    assert config.moe_layers == (False,) * 3 + (True,) * 58
    assert config.mla.qk_head_dim == 192
    assert config.mla.token_dim == 576
    assert config.rope.rope_type == "yarn"
    assert config.rope.interleaved
    assert config.rope.theta == 10000.0
    assert config.rope.parameters["original_max_position_embeddings"] == 4096
    mscale = 0.1 * math.log(40) + 1
    assert config.softmax_scale == pytest.approx(192**-0.5 * mscale**2)
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (1,)
    assert config.moe is not None
    assert (config.moe.n_group, config.moe.topk_group, config.moe.scoring_func) == (8, 4, "sigmoid")
    assert config.qk_norm_eps == 1e-6


def test_moonlight(load):
    config = load(MOONLIGHT)
    assert config.mla.q_lora_rank is None
    assert config.rope.rope_type == "default"
    assert config.rope.theta == 50000.0
    assert config.softmax_scale == 192**-0.5


def test_kimi_k2_by_architecture_and_by_model_type(load):
    kimi = DEEPSEEK_V3 | {"model_type": "kimi_k2", "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
    assert load(kimi) == load(without(kimi, "architectures"))


def test_glm_flash(load):
    config = load(GLM_FLASH)
    assert config.rope.dim == 64, "head_dim is not the rope's size"
    assert config.moe_layers == (False,) + (True,) * 46
    assert config.qk_norm_eps == 1e-6
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert config.num_nextn_predict_layers == 1


def test_generation_config_decides_on_the_end_of_sequence(load):
    assert load(DEEPSEEK_V3, generation={"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert load(DEEPSEEK_V3, generation={"temperature": 0.6}).eos_token_ids == (1,)
    assert load(without(DEEPSEEK_V3, "eos_token_id"), generation={}).eos_token_ids == ()


def test_glm_5_2(load):
    config = load(GLM_5_2)
    assert config.rope.theta == 8e6
    assert config.rope.dim == 64  # not head_dim
    assert config.softmax_scale == 256**-0.5
    assert config.moe_layers == (False,) * 3 + (True,) * 75
    dsa = config.dsa
    assert dsa is not None
    full = [layer for layer, is_full in enumerate(dsa.full_layers) if is_full]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert (dsa.index_topk, dsa.num_heads, dsa.head_dim) == (2048, 32, 128)
    assert config.mla.cache_dim(tp=1) == 576 + 128
    assert [config.mla.new_dim(layer, tp=1) for layer in (2, 3)] == [704, 576]
    assert load(without(DEEPSEEK_V3, "rope_theta")).dsa is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": 0}, "index_topk=0"),
        ({"q_lora_rank": None}, "needs q_lora_rank"),
        ({"index_head_dim": 32}, "index_head_dim=32 is below qk_rope_head_dim=64"),
        ({"index_topk_pattern": "FS"}, "each of 78 layers"),
        ({"index_topk_pattern": "S" + 77 * "F"}, "the first of them 'full'"),
        ({"indexer_types": ["full"] * 77 + ["half"]}, "'full' or 'shared'"),
    ],
)
def test_indexers_that_cannot_be(load, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load(GLM_5_2 | change)


def test_both_spellings_of_rope_mean_the_same(load):
    scaling = dict(DEEPSEEK_V3["rope_scaling"])
    scaling["rope_type"] = scaling.pop("type")
    new = without(DEEPSEEK_V3, "rope_scaling", "rope_theta") | {
        "rope_parameters": {"rope_theta": 10000, **scaling}
    }
    assert load(new) == load(DEEPSEEK_V3)


def test_top_level_original_length_wins(load):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    base = DEEPSEEK_V3 | {"rope_scaling": rope}
    assert load(base).rope.parameters["original_max_position_embeddings"] == 163840
    rope["original_max_position_embeddings"] = 4096
    assert load(base).rope.parameters["original_max_position_embeddings"] == 4096
    top = base | {"original_max_position_embeddings": 2048}
    assert load(top).rope.parameters["original_max_position_embeddings"] == 2048


def test_every_layer_dense(load):
    for change in ({"first_k_dense_replace": 61}, {"n_routed_experts": None}):
        config = load(DEEPSEEK_V3 | change)
        assert config.moe is None
        assert not any(config.moe_layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*DeepseekV2ForCausalLM, DeepseekV3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'.*supported: fp8"),
        ({"hidden_act": "relu"}, "hidden_act='relu'.*silu"),
        ({"torch_dtype": "float16"}, "float16.*--dtype float32"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "'su'.*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "linear.*factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, "needs 32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"n_group": 7}, "256 is not divisible by n_group=7"),
        ({"topk_group": 9}, "topk_group=9 is above n_group=8"),
        ({"n_group": 256, "topk_group": 8}, "a group needs two experts"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok=200 is above the 128"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_attention_heads": "many"}, "num_attention_heads='many'"),
        ({"qk_rope_head_dim": 63, "rope_scaling": None}, "qk_rope_head_dim=63 must be even"),
    ],
)
def test_refusals(load, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load(DEEPSEEK_V3 | change)


def test_a_key_without_default_is_named(load):
    with pytest.raises(ValueError, match="lacks 'hidden_size'"):
        load(without(DEEPSEEK_V3, "hidden_size"))


def test_no_folder_and_no_json(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        load_model_config(tmp_path)


def test_an_explicit_dtype_wins(load):
    assert load(DEEPSEEK_V3 | {"torch_dtype": "float16"}, dtype="float32").dtype == "float32"
    assert load(DEEPSEEK_V3 | {"torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"'int8'.*float32, bfloat16"):
        load(DEEPSEEK_V3, dtype="int8")


def test_reading_a_config_imports_neither_torch_nor_transformers():
    code = (
        "import sys, prefold.hf_config, prefold.checkpoint_files; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
