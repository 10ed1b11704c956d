"""Grouped-query attention in configuration: config.json as published, layouts, FLOPs, windows. No torch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prefold.config import DTYPES, GQAConfig, ModelConfig, ParallelConfig
from prefold.distributed.layouts import (
    check_layout,
    describe_layout,
    fullest_kv_spec,
    kv_head_repetition,
    legal_dcp_sizes,
    legal_tensor_parallel_sizes,
)
from prefold.flops import prefill_flops
from prefold.hf_config import load_model_config

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_V1 = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN2 = MISTRAL_V1 | {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "max_window_layers": 28,
}
SMOLLM3 = MISTRAL_V1 | {
    "architectures": ["SmolLM3ForCausalLM"],
    "num_hidden_layers": 8,
    "sliding_window": None,
}

Load = Callable[[dict], ModelConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_raw(raw: dict) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return load_model_config(tmp_path)

    return load_raw


def gqa_of(model: ModelConfig) -> GQAConfig:
    assert model.gqa is not None
    assert model.attention is model.gqa
    return model.gqa


def test_llama(load: Load):
    model = load(LLAMA_3_8B)
    gqa = gqa_of(model)
    assert (gqa.num_kv_heads, gqa.head_dim, gqa.qk_norm, gqa.has_windows) == (8, 128, False, False)
    assert (model.rope.theta, model.rope.dim, model.rope.interleaved) == (5e5, 128, False)
    assert model.rope.rope_type == "llama3"
    assert model.softmax_scale == 128**-0.5
    assert model.moe is None


def test_qwen3_moe(load: Load):
    model = load(QWEN3_MOE)
    gqa, moe = gqa_of(model), model.moe
    assert moe is not None
    assert (gqa.qk_norm, gqa.has_windows, model.attention_bias) == (True, False, False)
    assert (moe.num_experts, moe.top_k, moe.num_shared_experts, moe.norm_topk_prob) == (128, 8, 0, True)
    assert all(model.moe_layers)
    sparse = load(QWEN3_MOE | {"mlp_only_layers": [3], "decoder_sparse_step": 2}).moe_layers
    assert [i for i, routed in enumerate(sparse) if routed] == [i for i in range(48) if i % 2 and i != 3]


def test_windows_are_those_that_transformers_applies(load: Load):
    assert gqa_of(load(MISTRAL_V1)).windows == (4096,) * 32
    assert gqa_of(load(MISTRAL_V1 | {"sliding_window": None})).windows == (None,) * 32
    assert gqa_of(load(QWEN2)).windows == (None,) * 28 + (4096,) * 4
    assert not gqa_of(load(QWEN2 | {"use_sliding_window": False})).has_windows
    assert not gqa_of(load(QWEN2 | {"sliding_window": 32768})).has_windows, "no sequence is longer"
    types = ["sliding_attention", *["full_attention"] * 31]
    assert gqa_of(load(QWEN2 | {"layer_types": types})).windows == (4096, *[None] * 31)


def test_layers_without_rotary_embedding(load: Load):
    assert gqa_of(load(SMOLLM3)).rope_layers == (True, True, True, False) * 2
    flags = [0, 1] * 4
    assert gqa_of(load(SMOLLM3 | {"no_rope_layers": flags})).rope_layers == (False, True) * 4
    assert load({k: v for k, v in SMOLLM3.items() if k != "rope_theta"}).rope.theta == 2e6


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (LLAMA_3_8B | {"num_key_value_heads": 7}, "32 is not divisible by num_key_value_heads=7"),
        (LLAMA_3_8B | {"head_dim": 63}, "head_dim=63 must be even"),
        (LLAMA_3_8B | {"hidden_size": 4098}, "hidden_size=4098 must be divisible by num_attention_heads=32"),
        (LLAMA_3_8B | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA_3_8B | {"partial_rotary_factor": 0.5}, "all of head_dim=128 is rotated"),
        (MISTRAL_V1 | {"layer_types": ["full_attention"] * 32}, "layer_types is not supported"),
        (MISTRAL_V1 | {"sliding_window": 0}, "sliding_window=0"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 32}, "layer_types must name"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "for each of 32 layers"),
        (SMOLLM3 | {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 8 layers"),
        (QWEN3_MOE | {"num_experts_per_tok": 200}, "num_experts_per_tok=200 is above num_experts=128"),
    ],
)
def test_refusals(load: Load, raw: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load(raw)


def test_ranks_are_told_of_it(load: Load):
    for raw in (LLAMA_3_8B, QWEN3_MOE, QWEN2, SMOLLM3):
        model = load(raw)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ModelConfig) == model


def test_kv_heads_bound_layouts(load: Load):
    model = load(LLAMA_3_8B)
    assert legal_tensor_parallel_sizes(model) == [1, 2, 4, 8, 16, 32]
    assert [kv_head_repetition(model, tp) for tp in (1, 2, 8, 16, 32)] == [1, 1, 1, 2, 4]
    assert legal_dcp_sizes(model, pcp=2, tp=4) == [1, 2]
    assert legal_dcp_sizes(model, pcp=2, tp=32) == [1, 2, 4, 8]
    with pytest.raises(ValueError, match=r"divisor of 2 .*; legal: 1, 2$"):
        check_layout(model, ParallelConfig(tensor_parallel_size=16, decode_context_parallel_size=4), 32)
    odd = replace(model, num_heads=36, gqa=replace(gqa_of(model), num_kv_heads=6))
    odd = replace(odd, intermediate_size=36)
    assert legal_tensor_parallel_sizes(odd) == [1, 2, 3, 6, 12, 18, 36]
    with pytest.raises(ValueError, match=r"num_key_value_heads=6 is neither divisible by .*=4 nor a divisor"):
        check_layout(odd, ParallelConfig(tensor_parallel_size=4), 32)


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_what_a_rank_holds(load: Load, tp: int, kv_heads: int):
    model = load(LLAMA_3_8B)
    spec = fullest_kv_spec(model, ParallelConfig(tensor_parallel_size=tp), 32)
    assert spec.row_bytes == 2 * kv_heads * 128 * DTYPES[model.dtype]
    layout = describe_layout(model, ParallelConfig(tensor_parallel_size=tp))
    assert layout.kv_copies == max(1, tp // 8)
    table = 128256 * 4096 // tp
    kv = 2 * 4096 * kv_heads * 128
    split = (2 * 4096 * 4096 + 3 * 4096 * 14336) // tp
    assert layout.weight_bytes == 2 * (2 * table + 32 * (split + kv))


def test_a_model_with_windows_keeps_its_cache_whole(load: Load):
    model = load(MISTRAL_V1)
    assert legal_dcp_sizes(model, pcp=4, tp=16) == [1]
    with pytest.raises(ValueError, match="sliding window, whose KV cannot be spread over ranks; legal: 1"):
        check_layout(model, ParallelConfig(1, 2, 2), 32)
    check_layout(model, ParallelConfig(16, 4), 32)


def test_flops_by_hand(load: Load):
    raw = {
        "hidden_size": 8,
        "head_dim": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 10,
        "vocab_size": 100,
        "num_hidden_layers": 2,
    }
    model = load(QWEN2 | raw | {"max_window_layers": 1, "sliding_window": 2})
    # q 8x24, k and v 8x12 each, o 24x8, MLP 3 of 8x10
    per_layer = 192 + 2 * 96 + 192 + 240
    flops = prefill_flops(model, num_tokens=4)
    assert flops.matmul == 2 * 4 * 2 * per_layer + 2 * 8 * 100
    # 10 pairs in the first layer; 1 + 2 + 2 + 2 in the one with a window
    assert flops.attention == 2 * 6 * (4 + 4) * (10 + 7)
    first, second = prefill_flops(model, 1), prefill_flops(model, 3, num_computed=1)
    assert first.attention + second.attention == flops.attention
