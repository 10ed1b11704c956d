"""Random checkpoints: equal for equal arguments, readable by transformers, and worth testing with."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from prefold.checkpoint_files import check_checkpoint_files
from prefold.config import ParallelConfig
from prefold.distributed.layouts import check_layout, describe_layout
from prefold.hf_config import GQA_ARCHITECTURES, MLA_ARCHITECTURES, SPARSE_ARCHITECTURES, load_model_config
from prefold.testing.checkpoints import (
    BENCHMARK,
    GQA_BENCHMARK,
    make_benchmark_checkpoint,
    make_checkpoint,
    make_dsa_benchmark_checkpoint,
    make_gqa_benchmark_checkpoint,
)

torch.set_num_threads(1)

V2, V3, GLM, _ = MLA_ARCHITECTURES


@pytest.fixture(scope="module", params=MLA_ARCHITECTURES + SPARSE_ARCHITECTURES)
def checkpoint(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_equal_arguments_give_equal_files(checkpoint: Path, tmp_path: Path):
    architecture = load_model_config(checkpoint).architecture
    assert contents(make_checkpoint(architecture, tmp_path / "same")) == contents(checkpoint)
    other = contents(make_checkpoint(architecture, tmp_path / "other", seed=1))
    assert other["config.json"] == contents(checkpoint)["config.json"]
    shard = next(name for name in other if name.startswith("model-00001"))
    assert other[shard] != contents(checkpoint)[shard]


def test_tiny_checkpoints_are_sharded_and_legal_for_tp_8(checkpoint: Path):
    entries = check_checkpoint_files(checkpoint)
    assert len({entry.file for entry in entries.values()}) > 2
    config = load_model_config(checkpoint)
    check_layout(config, ParallelConfig(tensor_parallel_size=8), block_size=32)
    assert config.mla.v_head_dim != config.mla.qk_head_dim
    raw = json.loads((checkpoint / "config.json").read_text())
    assert raw.get("topk_method") == (config.moe.topk_method if config.moe is not None else None)


def test_the_weights_are_those_that_layouts_count(checkpoint: Path):
    """All matrices of the checkpoint: what one rank would hold of them."""
    shapes = [entry.shape for entry in check_checkpoint_files(checkpoint).values()]
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    config = load_model_config(checkpoint)
    assert describe_layout(config, ParallelConfig()).weight_bytes == 4 * matrices


@pytest.mark.parametrize("architecture", GQA_ARCHITECTURES)
def test_the_weights_of_gqa_checkpoints_are_those_that_layouts_count(architecture: str, tmp_path: Path):
    folder = make_checkpoint(architecture, tmp_path)
    shapes = [entry.shape for entry in check_checkpoint_files(folder).values()]
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) >= 2)
    assert describe_layout(load_model_config(folder), ParallelConfig()).weight_bytes == 4 * matrices


def test_the_tokenizer_fits_the_vocabulary(checkpoint: Path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert len(tokenizer) == 320
    text = "The thing and the other: naïve, 東京, \n\t two  spaces"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()), "no merge was used"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s>user: hi\nassistant: "
    assert tokenizer.eos_token_id in load_model_config(checkpoint).eos_token_ids


@pytest.mark.parametrize("vocab_size", [9, 100, 259, 265, 1000])
def test_any_vocabulary_size(tmp_path: Path, vocab_size: int):
    folder = make_checkpoint(V3, tmp_path, vocab_size=vocab_size, num_hidden_layers=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == vocab_size
    assert max(tokenizer.encode("the and <s> zzz")) < vocab_size


def test_experts_are_used_unevenly_but_all(checkpoint: Path):
    config = load_model_config(checkpoint)
    model = getattr(transformers, config.architecture).from_pretrained(checkpoint, dtype=torch.float32)
    counts = []
    for module in model.modules():
        if type(module).__name__.endswith("TopkRouter"):
            module.register_forward_hook(
                lambda _m, _i, out: counts.append(out[2].flatten().bincount(minlength=8))
            )
    with torch.no_grad():
        model(torch.arange(320)[None])
    assert len(counts) == sum(config.moe_layers)
    for count in counts:
        assert count.min() > 0
        assert count.max() > 1.5 * count.min()


def test_bfloat16_checkpoints_keep_the_routing_bias_in_float32(tmp_path: Path):
    entries = check_checkpoint_files(make_checkpoint(V3, tmp_path, dtype="bfloat16"))
    for name, entry in entries.items():
        assert entry.dtype == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name


def test_unknown_architecture(tmp_path: Path):
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not supported; supported: DeepseekV2"):
        make_checkpoint("GPT2LMHeadModel", tmp_path)


def test_benchmark_checkpoint(tmp_path: Path):
    """Its size is that of the published measurements; a narrow one stands in for it here."""
    narrow = {"hidden_size": 64, "vocab_size": 400, "kv_lora_rank": 32, "q_lora_rank": 32}
    folder = make_benchmark_checkpoint(tmp_path, **narrow)
    config = load_model_config(folder)
    assert (config.dtype, config.num_layers, config.num_heads) == ("bfloat16", 8, 16)
    assert config.max_position_embeddings >= 131072
    assert 150e6 < num_parameters(BENCHMARK) < 171e6


def test_gqa_benchmark_checkpoint(tmp_path: Path):
    folder = make_gqa_benchmark_checkpoint(tmp_path, hidden_size=64, vocab_size=400)
    config = load_model_config(folder)
    assert (config.dtype, config.num_layers, config.num_heads) == ("bfloat16", 8, 16)
    assert config.attention.cache_dim(1) == 2 * 4 * 64
    c, hidden = GQA_BENCHMARK, GQA_BENCHMARK["hidden_size"]
    attention = 2 * hidden * (c["num_attention_heads"] + c["num_key_value_heads"]) * c["head_dim"]
    layers = c["num_hidden_layers"] * (attention + 3 * hidden * c["intermediate_size"])
    assert 99e6 < layers + c["vocab_size"] * hidden < 100e6


def test_dsa_benchmark_checkpoint(tmp_path: Path):
    narrow = {"hidden_size": 64, "vocab_size": 400, "kv_lora_rank": 32, "q_lora_rank": 32}
    config = load_model_config(make_dsa_benchmark_checkpoint(tmp_path, **narrow))
    assert (config.dtype, config.num_layers, config.num_heads) == ("bfloat16", 4, 8)
    assert config.dsa is not None
    assert (config.dsa.num_heads, config.dsa.head_dim, config.dsa.index_topk) == (32, 128, 2048)
    assert config.dsa.full_layers == (True, False, True, False)


def num_parameters(c: dict) -> float:
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    attention = (
        hidden * (c["q_lora_rank"] + c["kv_lora_rank"] + c["qk_rope_head_dim"])
        + c["q_lora_rank"] * heads * qk
        + c["kv_lora_rank"] * heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        + heads * c["v_head_dim"] * hidden
    )
    experts = (c["n_routed_experts"] + 1) * 3 * hidden * c["moe_intermediate_size"]
    layers = c["num_hidden_layers"]
    dense = 3 * hidden * c["intermediate_size"]
    return layers * attention + (layers - 1) * experts + dense + 2 * c["vocab_size"] * hidden
