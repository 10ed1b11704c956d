"""Tiny Llama-type checkpoints, converted: transformers on the original against transformers on the result."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from prefold.cli.main import main
from prefold.convert import convert
from prefold.convert.mla import IdentityNorm, MLAMapping, four_squares
from prefold.convert.source import LlamaSpec

LOGIT_BOUND = 1e-5
"""Largest logit difference allowed, as a fraction of the largest logit: float32 rounding of a few layers."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    # Large enough for sharp attention: with near-uniform weights, a wrong rope would pass.
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES = {
    "gqa 4:2": (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "gqa 6:3 tied": (
        LlamaConfig,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mqa": (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "mha": (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "wide heads": (LlamaConfig, {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32}),
    "theta 500": (
        LlamaConfig,
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama3 rope": (
        LlamaConfig,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": LLAMA3},
    ),
    "linear rope": (
        LlamaConfig,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        },
    ),
    "yarn rope": (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": YARN}),
    "all biases": (
        LlamaConfig,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
    ),
    "mistral": (
        MistralConfig,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None},
    ),
    "qwen2": (Qwen2Config, {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
}

CLASSES = {LlamaConfig: LlamaForCausalLM, MistralConfig: MistralForCausalLM, Qwen2Config: Qwen2ForCausalLM}


def save_tiny(folder, config_class=LlamaConfig, dtype=torch.float32, **overrides):
    """A random checkpoint; norms and biases are random too, so that none can be lost unnoticed."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = CLASSES[config_class](config_class(**{**SIZES, **heads, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
    model.to(dtype).save_pretrained(folder)
    return model


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], info
    return model.eval()


@torch.inference_mode()
def assert_same_model(original, converted, length=90, decode=20):
    prompt = torch.randint(3, original.config.vocab_size, (1, length), generator=torch.manual_seed(1))
    want, got = original(prompt).logits, converted(prompt).logits
    assert (got - want).abs().max() <= LOGIT_BOUND * want.abs().max()
    tokens = [
        model.generate(prompt, max_new_tokens=decode, min_new_tokens=decode, do_sample=False)
        for model in (original, converted)
    ]
    assert tokens[0].shape[1] == length + decode
    assert tokens[0].tolist() == tokens[1].tolist()


@pytest.mark.parametrize("nope", [0, 12])
@pytest.mark.parametrize("case", CASES)
def test_converted_model_is_the_original(tmp_path, case, nope):
    config_class, overrides = CASES[case]
    original = save_tiny(tmp_path / "src", config_class, **overrides)
    convert(tmp_path / "src", tmp_path / "dst", qk_nope_head_dim=nope)
    converted = load(tmp_path / "dst")
    assert converted.config.model_type == "deepseek_v3"
    assert converted.config.tie_word_embeddings == original.config.tie_word_embeddings
    assert_same_model(original, converted)


def test_every_weight_of_a_bfloat16_source_survives_bit_for_bit(tmp_path):
    save_tiny(tmp_path / "src", dtype=torch.bfloat16, attention_bias=True)
    lines = []
    convert(tmp_path / "src", tmp_path / "b", dtype="bfloat16", progress=lines.append)
    convert(tmp_path / "src", tmp_path / "f", dtype="float32")
    assert not [line for line in lines if "warning" in line]
    half, full = (load(tmp_path / name).state_dict() for name in "bf")
    for name, tensor in full.items():
        assert half[name].dtype == torch.bfloat16
        assert torch.equal(half[name].float(), tensor), name


def test_bfloat16_of_a_float32_source_warns_and_stays_near(tmp_path):
    original = save_tiny(tmp_path / "src")
    lines = []
    convert(tmp_path / "src", tmp_path / "dst", dtype="bfloat16", progress=lines.append)
    assert any("rounded to bfloat16" in line for line in lines)
    converted = load(tmp_path / "dst").float()
    with torch.inference_mode():
        want, got = (model(torch.arange(3, 40)[None]).logits for model in (original, converted))
    assert 1e-4 < (got - want).abs().max() / want.abs().max() < 0.2


# --- The parts of the mapping


@given(st.integers(0, 70_000))
def test_four_squares(number):
    squares = four_squares(number)
    assert sum(root * root for root in squares) == number
    assert all(0 <= root <= math.isqrt(number) for root in squares)


@given(st.integers(1, 1500), st.floats(2.0**-60, 2.0**11), st.integers(0, 2**31))
@settings(max_examples=60)
def test_identity_norm_returns_its_values_bit_for_bit(width, size, seed):
    norm = IdentityNorm.of_width(width)
    assert norm.rank % 16 == 0
    assert width + 5 <= norm.rank <= width + 20
    assert sum(a * a for a in norm.constants) == norm.rank
    assert torch.equal(norm.bias().bfloat16().float(), norm.bias())
    layer = DeepseekV3RMSNorm(norm.rank)
    layer.weight.data = norm.weight(unit=True)
    values = torch.randn(3, width, generator=torch.manual_seed(seed))
    values *= size / values.pow(2).mean(-1, keepdim=True).sqrt()
    with torch.inference_mode():
        out = layer(torch.cat([values, norm.bias().expand(3, -1)], dim=-1))
    assert torch.equal(out[:, :width], values)
    assert torch.equal(out[:, width], torch.ones(3))
    assert not out[:, width + 1 :].any()


def tiny_spec(num_heads, num_kv_heads, head_dim):
    return LlamaSpec(
        num_layers=1,
        hidden_size=8,
        intermediate_size=8,
        vocab_size=8,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=8,
        wavelengths=(1.0,) * (head_dim // 2),
        attention_factor=1.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        token_ids={},
    )


def test_half_split_of_the_documented_example():
    rows = MLAMapping(tiny_spec(2, 2, 4), 0).half_split(torch.arange(8))
    assert rows.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 5), st.data())
@settings(max_examples=40)
def test_scores_of_wide_queries_are_the_heads_own_scores(group, kv_heads, pairs, nope, data):
    """Before the rotation: <wide q of head h, wide k> = <q of head h, k of its KV head>."""
    mapping = MLAMapping(tiny_spec(group * kv_heads, kv_heads, 2 * pairs), nope)
    generator = torch.manual_seed(data.draw(st.integers(0, 1000)))
    q = torch.randint(-9, 9, (group * kv_heads * 2 * pairs,), generator=generator)
    k = torch.randint(-9, 9, (kv_heads * 2 * pairs,), generator=generator)
    wide_q = mapping.widen_queries(q).view(group * kv_heads, -1)
    assert not wide_q[:, :nope].any()
    scores = (wide_q[:, nope:] * mapping.half_split(k)).sum(-1)
    own = k.view(kv_heads, -1).repeat_interleave(group, dim=0)
    assert torch.equal(scores, (q.view(group * kv_heads, -1) * own).sum(-1))


# --- What is refused


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "qk-norm"),
        ({"architectures": ["SmolLM3ForCausalLM"]}, "NoPE"),
        ({"architectures": ["BertModel"]}, "BertModel cannot be converted.*LlamaForCausalLM"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
            "window 64",
        ),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ({"num_hidden_layers": 4}, "9 tensors are missing: model.layers.3"),
        ({"num_hidden_layers": 2}, "no Llama-type decoder has.*model.layers.2"),
        ({"intermediate_size": 81}, r"has shape \[.*\], config says"),
    ],
)
def test_what_is_not_exact_is_refused(tmp_path, changes, message):
    save_tiny(tmp_path / "src")
    edit_config(tmp_path / "src", **changes)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "src", tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"], "a failed conversion leaves nothing behind"


def test_qk_norm_weights_are_not_dropped_silently(tmp_path):
    save_tiny(tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(12)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_norm"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_unreadable_sources_say_why(tmp_path):
    with pytest.raises(ValueError, match="neither a GGUF file nor a folder"):
        convert(tmp_path / "nowhere", tmp_path / "dst")
    save_tiny(tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        convert(tmp_path / "src", tmp_path / "dst")
    file.unlink()
    with pytest.raises(ValueError, match="holds no safetensors"):
        convert(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "x.gguf").write_bytes(b"not a GGUF file, whatever its name says")
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        convert(tmp_path / "x.gguf", tmp_path / "dst")


def test_destination_is_protected(tmp_path):
    save_tiny(tmp_path / "src")
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="not empty"):
        convert(tmp_path / "src", dst)
    with pytest.raises(ValueError, match="no checkpoint, so it is not overwritten"):
        convert(tmp_path / "src", dst, overwrite=True)
    assert (dst / "diary.txt").exists()
    for inside in (tmp_path / "src", tmp_path):
        with pytest.raises(ValueError, match="holds the source"):
            convert(tmp_path / "src", inside, overwrite=True)


def test_overwrite_replaces_a_checkpoint_whole(tmp_path):
    save_tiny(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "dst" / "stale.safetensors").write_text("")
    convert(tmp_path / "src", tmp_path / "dst", overwrite=True)
    assert not (tmp_path / "dst" / "stale.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_large_models_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr("prefold.convert.writer.SHARD_BYTES", 40_000)
    original = save_tiny(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    assert len(list((tmp_path / "dst").glob("model-*.safetensors"))) > 3
    assert_same_model(original, load(tmp_path / "dst"), length=9, decode=4)


def test_extras_are_copied(tmp_path):
    save_tiny(tmp_path / "src")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / "src" / name).write_text("{}")
    convert(tmp_path / "src", tmp_path / "dst")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "src" / name).read_bytes()
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)


def test_command(tmp_path, capsys):
    save_tiny(tmp_path / "src")
    arguments = ["convert-mla", str(tmp_path / "src"), str(tmp_path / "dst")]
    assert main(arguments) == 0
    assert "layer 3 of 3" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "is not empty (--overwrite replaces it)" in capsys.readouterr().err
