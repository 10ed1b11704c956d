"""Keys of the architectures with grouped-query attention: Llama, Mistral, Qwen2, Qwen3, SmolLM3."""

from __future__ import annotations

from typing import Any

from prefold.config import GQAConfig, MoEConfig
from prefold.hf_config.reader import Reader
from prefold.hf_config.rope import read_rope

_LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
}
_QWEN = _LLAMA | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN | {"head_dim": 128},
    "Qwen3MoeForCausalLM": _QWEN
    | {
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "SmolLM3ForCausalLM": _QWEN
    | {
        "num_key_value_heads": 4,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
}

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_gqa(get: Reader, architecture: str) -> dict[str, Any]:
    """Fields of ModelConfig in which these architectures differ from others."""
    heads, is_qwen2 = get.size("num_attention_heads"), architecture == "Qwen2ForCausalLM"
    bias = is_qwen2 or (architecture != "MistralForCausalLM" and bool(get("attention_bias")))
    rope_layers = _rope_layers(get, architecture)
    gqa = GQAConfig(
        num_kv_heads=heads if get("num_key_value_heads") is None else get.size("num_key_value_heads"),
        head_dim=_head_dim(get, heads),
        qk_norm=architecture.startswith("Qwen3"),
        output_bias=bias and not is_qwen2,
        rope_layers=rope_layers,
        windows=_windows(get, architecture, rope_layers),
    )
    if heads % gqa.num_kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} is not divisible by num_key_value_heads={gqa.num_kv_heads}"
        )
    moe_layers = _moe_layers(get, architecture)
    return {
        "mla": None,
        "gqa": gqa,
        "attention_bias": bias,
        "qk_norm_eps": float(get("rms_norm_eps")),
        # The others' MLPs know no bias.
        "mlp_bias": architecture in ("LlamaForCausalLM", "SmolLM3ForCausalLM") and bool(get("mlp_bias")),
        "rope": read_rope(
            get,
            gqa.head_dim,
            "head_dim",
            interleaved=False,
            theta=2_000_000.0 if architecture == "SmolLM3ForCausalLM" else 10_000.0,
        ),
        "softmax_scale": gqa.head_dim**-0.5,
        "moe": _moe(get) if any(moe_layers) else None,
        "moe_layers": moe_layers,
    }


def _head_dim(get: Reader, heads: int) -> int:
    if get("head_dim") is not None:
        return get.size("head_dim", minimum=2)
    hidden = get.size("hidden_size")
    if hidden % heads:
        raise ValueError(
            f"without head_dim, hidden_size={hidden} must be divisible by num_attention_heads={heads}"
        )
    return hidden // heads


def _rope_layers(get: Reader, architecture: str) -> tuple[bool, ...]:
    """SmolLM3 leaves some layers without rotary embedding."""
    num_layers = get.size("num_hidden_layers")
    if architecture != "SmolLM3ForCausalLM":
        return (True,) * num_layers
    flags = get("no_rope_layers")  # 1: the layer rotates, whatever the name says
    if flags is None:
        interval = get.size("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(flags) < num_layers:
        raise ValueError(f"no_rope_layers has {len(flags)} entries for {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _windows(get: Reader, architecture: str, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Each layer's sliding window, as transformers applies it."""
    num_layers = len(rope_layers)
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    is_mistral = architecture == "MistralForCausalLM"
    if get("sliding_window") is None or not (is_mistral or get("use_sliding_window")):
        return (None,) * num_layers
    window = get.size("sliding_window")
    types = None if is_mistral else get("layer_types")
    if is_mistral or architecture == "Qwen3MoeForCausalLM":
        if get.raw.get("layer_types") is not None:
            raise ValueError(f"{architecture} with layer_types is not supported: all its layers slide alike")
        slides = [True] * num_layers
    elif types is None:
        if architecture == "SmolLM3ForCausalLM":
            slides = [not rotates for rotates in rope_layers]
        else:
            slides = [layer >= get.size("max_window_layers", 0) for layer in range(num_layers)]
    else:
        if len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}:
            raise ValueError(
                f"layer_types must name {_FULL!r} or {_SLIDING!r} for each of {num_layers} layers: {types}"
            )
        slides = [kind == _SLIDING for kind in types]
    # A window that no sequence fills is none.
    limits = window < get.size("max_position_embeddings")
    return tuple(window if one and limits else None for one in slides)


def _moe_layers(get: Reader, architecture: str) -> tuple[bool, ...]:
    layers = range(get.size("num_hidden_layers"))
    if architecture != "Qwen3MoeForCausalLM" or not get("num_experts"):
        return (False,) * len(layers)
    step, dense = get.size("decoder_sparse_step"), get("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def _moe(get: Reader) -> MoEConfig:
    moe = MoEConfig(
        num_experts=get.size("num_experts"),
        top_k=get.size("num_experts_per_tok"),
        intermediate_size=get.size("moe_intermediate_size"),
        num_shared_experts=0,
        n_group=1,
        topk_group=1,
        scoring_func="softmax",
        topk_method="greedy",
        norm_topk_prob=bool(get("norm_topk_prob")),
        routed_scaling_factor=1.0,
    )
    if moe.top_k > moe.num_experts:
        raise ValueError(f"num_experts_per_tok={moe.top_k} is above num_experts={moe.num_experts}")
    return moe
