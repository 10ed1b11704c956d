"""Keys of the architectures with latent attention: DeepSeek-V2, V3 (Kimi-K2), V3.2, GLM-4.7-Flash, GLM-5,
MiniCPM3."""

from __future__ import annotations

import math
from typing import Any

from prefold.config import MLAConfig, MoEConfig, RopeConfig
from prefold.hf_config import dsa
from prefold.hf_config.reader import Reader
from prefold.hf_config.rope import read_rope

_QK_NORM_EPS = 1e-6
# transformers builds q_a_layernorm and kv_a_layernorm without passing rms_norm_eps on.

_COMMON_DEFAULTS = {
    "num_experts_per_tok": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: _COMMON_DEFAULTS | defaults for name, defaults in dsa.DEFAULTS.items()},
    "DeepseekV2ForCausalLM": _COMMON_DEFAULTS
    | {
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "max_position_embeddings": 2048,
        "num_nextn_predict_layers": 0,
    },
    "DeepseekV3ForCausalLM": _COMMON_DEFAULTS
    | {
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
    },
    "Glm4MoeLiteForCausalLM": _COMMON_DEFAULTS
    | {
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    "MiniCPM3ForCausalLM": _COMMON_DEFAULTS
    | {
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
        "n_routed_experts": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 32768,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
}


def read_mla(get: Reader, architecture: str) -> dict[str, Any]:
    """Fields of ModelConfig in which these architectures differ from others."""
    is_sparse = architecture in dsa.DEFAULTS
    mla = MLAConfig(
        q_lora_rank=None if get("q_lora_rank") is None else get.size("q_lora_rank"),
        kv_lora_rank=get.size("kv_lora_rank"),
        qk_nope_head_dim=get.size("qk_nope_head_dim", minimum=0),
        qk_rope_head_dim=get.size("qk_rope_head_dim", minimum=2),
        v_head_dim=_v_head_dim(get),
        dsa=dsa.read_dsa(get, architecture) if is_sparse else None,
    )
    is_v2, is_minicpm3 = architecture == "DeepseekV2ForCausalLM", architecture == "MiniCPM3ForCausalLM"
    # V2 and sparse models always pair neighbours, MiniCPM3 never does; they have no such key.
    interleaved = is_v2 or is_sparse or (not is_minicpm3 and bool(get("rope_interleave")))
    rope = read_rope(get, mla.qk_rope_head_dim, "qk_rope_head_dim", interleaved)
    moe_layers = _moe_layers(get, architecture)
    return {
        "mla": mla,
        "attention_bias": bool(get("attention_bias")),
        "qk_norm_eps": _QK_NORM_EPS,
        # The MLPs of the others know no bias.
        "mlp_bias": (is_v2 or is_minicpm3) and bool(get("mlp_bias")),
        "rope": rope,
        "softmax_scale": _softmax_scale(mla, rope),
        "moe": _moe(get, architecture) if any(moe_layers) else None,
        "moe_layers": moe_layers,
        "num_nextn_predict_layers": int(get("num_nextn_predict_layers") or 0),
        **(_minicpm3_scales(get) if is_minicpm3 else {}),
    }


def _v_head_dim(get: Reader) -> int:
    """As the key says, or (MiniCPM3) the hidden size over the heads."""
    if get("v_head_dim") is None:
        return get.size("hidden_size") // get.size("num_attention_heads")
    return get.size("v_head_dim")


def _minicpm3_scales(get: Reader) -> dict[str, float]:
    """Factors of the residual stream, from MiniCPM's keys; null is "as if there were none"."""
    num_layers, hidden_size = get.size("num_hidden_layers"), get.size("hidden_size")
    depth, base = get("scale_depth"), get("dim_model_base")
    return {
        "embedding_scale": float(get("scale_emb")),
        "residual_scale": 1.0 if depth is None else depth / math.sqrt(num_layers),
        "logits_scale": 1.0 if base is None else base / hidden_size,
    }


def _softmax_scale(mla: MLAConfig, rope: RopeConfig) -> float:
    """1/sqrt(qk_head_dim), times YaRN's mscale squared where `mscale_all_dim` asks for it."""
    scale = mla.qk_head_dim**-0.5
    mscale_all_dim = rope.parameters.get("mscale_all_dim")
    if rope.rope_type == "default" or not mscale_all_dim:
        return scale
    factor = rope.parameters.get("factor")
    if factor is None:
        factor = rope.max_position_embeddings / rope.parameters["original_max_position_embeddings"]
    mscale = 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0
    return scale * mscale * mscale


def _moe_layers(get: Reader, architecture: str) -> tuple[bool, ...]:
    num_layers = get.size("num_hidden_layers")
    types = get.raw.get("mlp_layer_types")
    if (architecture == "Glm4MoeLiteForCausalLM" or architecture in dsa.DEFAULTS) and types is not None:
        if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            raise ValueError(
                f"mlp_layer_types must name 'dense' or 'sparse' for each of {num_layers} layers: {types}"
            )
        return tuple(kind == "sparse" for kind in types)
    if get("moe_layer_freq") != 1:
        raise ValueError(f"moe_layer_freq={get('moe_layer_freq')} is not supported, only 1")
    if get("n_routed_experts") is None or architecture == "MiniCPM3ForCausalLM":
        return (False,) * num_layers
    return tuple(i >= get("first_k_dense_replace") for i in range(num_layers))


def _moe(get: Reader, architecture: str) -> MoEConfig:
    is_v2 = architecture == "DeepseekV2ForCausalLM"
    moe = MoEConfig(
        num_experts=get.size("n_routed_experts"),
        top_k=get.size("num_experts_per_tok"),
        intermediate_size=get.size("moe_intermediate_size"),
        num_shared_experts=int(get("n_shared_experts") or 0),
        n_group=get("n_group") or 1,
        topk_group=get("topk_group") or 1,
        scoring_func=get("scoring_func"),
        topk_method=get("topk_method"),
        # transformers' V2 router never normalises, whatever the key says; published V2 models say false.
        norm_topk_prob=not is_v2 and bool(get("norm_topk_prob")),
        routed_scaling_factor=float(get("routed_scaling_factor")),
    )
    legal = ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)
    scoring = "softmax" if is_v2 else "sigmoid"
    if moe.topk_method not in legal or moe.scoring_func != scoring:
        raise ValueError(
            f"{architecture} routes by scoring_func={scoring!r} and topk_method in {legal}; the config says "
            f"scoring_func={moe.scoring_func!r}, topk_method={moe.topk_method!r}"
        )
    _check_groups(moe)
    return moe


def _check_groups(moe: MoEConfig) -> None:
    """A token must find top_k experts in the groups it may use."""
    grouped = moe.topk_method != "greedy"
    if grouped and moe.num_experts % moe.n_group:
        raise ValueError(f"n_routed_experts={moe.num_experts} is not divisible by n_group={moe.n_group}")
    group_size = moe.num_experts // moe.n_group
    if moe.topk_method == "noaux_tc" and group_size < 2:
        raise ValueError(
            f"n_routed_experts={moe.num_experts} in n_group={moe.n_group} groups: a group needs two experts"
        )
    if grouped and moe.topk_group > moe.n_group:
        raise ValueError(f"topk_group={moe.topk_group} is above n_group={moe.n_group}")
    reachable = moe.topk_group * group_size if grouped else moe.num_experts
    if moe.top_k > reachable:
        raise ValueError(
            f"num_experts_per_tok={moe.top_k} is above the {reachable} experts a token may reach"
        )
