"""From a Hugging Face checkpoint's config.json to a `ModelConfig`. Imports no torch.

config.json is read directly: published checkpoints name model types that transformers does not
know (Kimi-K2) and keys that it drops, and the command line should not wait for transformers. What
a key means, and its value where it is absent, follows transformers 5.24.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from prefold.checkpoint_files import check_checkpoint_files
from prefold.config import (
    DTYPES,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    checkpoint_folder,
)
from prefold.quantization.scheme import read_scheme

SUPPORTED_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")

ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Supported rope types and the keys they cannot do without."""

HIDDEN_ACTS = ("silu", "swish")
"""Supported activation functions: two names of one function."""

_ARCHITECTURE_OF_MODEL_TYPE = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}

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

_DEFAULTS: dict[str, dict[str, Any]] = {
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
}

_ALIASES = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_nextn_predict_layers": ("num_mtp_layers",),
}


def load_model_config(folder: str | Path, dtype: str = "auto") -> ModelConfig:
    """Read a checkpoint's config.json (and generation_config.json for the end-of-sequence tokens).

    `dtype` is that of weights and KV cache: "float32", "bfloat16" or "auto", the checkpoint's own.
    Raises ValueError for what cannot be run as it is meant: an unknown architecture or
    quantisation, an activation, router or rope type that is not supported, float16 under "auto".
    """
    path = checkpoint_folder(str(folder))
    raw = _read_json(path / "config.json")
    architecture = _architecture(raw, path)
    read_scheme(path)  # refuses what cannot be loaded
    get = _Reader(raw, _DEFAULTS[architecture], path / "config.json")
    if get("hidden_act") not in HIDDEN_ACTS:
        raise ValueError(
            f"hidden_act={get('hidden_act')!r} is not supported; supported: {', '.join(HIDDEN_ACTS)}"
        )
    mla = MLAConfig(
        q_lora_rank=None if get("q_lora_rank") is None else get.size("q_lora_rank"),
        kv_lora_rank=get.size("kv_lora_rank"),
        qk_nope_head_dim=get.size("qk_nope_head_dim", minimum=0),
        qk_rope_head_dim=get.size("qk_rope_head_dim", minimum=2),
        v_head_dim=get.size("v_head_dim"),
    )
    rope = _rope(get, architecture, mla.qk_rope_head_dim)
    moe_layers = _moe_layers(get, architecture)
    return ModelConfig(
        path=str(path),
        architecture=architecture,
        vocab_size=get.size("vocab_size"),
        hidden_size=get.size("hidden_size"),
        intermediate_size=get.size("intermediate_size"),
        num_layers=get.size("num_hidden_layers"),
        num_heads=get.size("num_attention_heads"),
        rms_norm_eps=float(get("rms_norm_eps")),
        qk_norm_eps=_QK_NORM_EPS,
        hidden_act="silu",
        tie_word_embeddings=bool(get("tie_word_embeddings")),
        attention_bias=bool(get("attention_bias")),
        # Only DeepSeek-V2's MLP knows a bias.
        mlp_bias=architecture == "DeepseekV2ForCausalLM" and bool(get("mlp_bias")),
        mla=mla,
        rope=rope,
        softmax_scale=_softmax_scale(mla, rope),
        moe=_moe(get, architecture) if any(moe_layers) else None,
        moe_layers=moe_layers,
        dtype=_dtype(raw, dtype, path),
        max_position_embeddings=rope.max_position_embeddings,
        eos_token_ids=_eos_token_ids(raw, path),
        num_nextn_predict_layers=int(get("num_nextn_predict_layers") or 0),
    )


class _Reader:
    """Values of config.json by key, with the architecture's defaults behind them."""

    def __init__(self, raw: dict, defaults: dict, path: Path) -> None:
        self.raw, self._defaults, self._path = raw, defaults, path

    def __call__(self, key: str) -> Any:
        for name in (key, *_ALIASES.get(key, ())):
            if name in self.raw:
                return self.raw[name]
        if key not in self._defaults:
            raise ValueError(f"{self._path} lacks {key!r}")
        return self._defaults[key]

    def size(self, key: str, minimum: int = 1) -> int:
        value = self(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{self._path}: {key}={value!r} must be a whole number of at least {minimum}")
        return value


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def _architecture(raw: dict, path: Path) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return name
    if not names and raw.get("model_type") in _ARCHITECTURE_OF_MODEL_TYPE:
        return _ARCHITECTURE_OF_MODEL_TYPE[raw["model_type"]]
    found = ", ".join(names) or f"none named (model_type {raw.get('model_type')!r})"
    raise ValueError(
        f"{path} has architecture {found}, which is not supported; supported: "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _rope(get: _Reader, architecture: str, dim: int) -> RopeConfig:
    """`rope_parameters`, or the older `rope_scaling` beside `rope_theta`, in one form."""
    raw = get.raw
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    legacy_type = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", legacy_type)
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    absent = [key for key in ROPE_TYPES[rope_type] if parameters.get(key) is None]
    if absent:
        raise ValueError(f"rope type {rope_type!r} needs {', '.join(absent)} in rope_parameters")
    max_positions = get.size("max_position_embeddings")
    if rope_type in ("yarn", "longrope", "llama3"):
        # A top-level value wins, as in transformers; without any, nothing was extended.
        inner = parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = (
            raw.get("original_max_position_embeddings") or inner or max_positions
        )
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None:
        if partial != 1.0 and rope_type != "proportional":
            raise ValueError(f"partial_rotary_factor={partial}: MLA rotates all of qk_rope_head_dim={dim}")
        parameters["partial_rotary_factor"] = partial
    for key in ("short_factor", "long_factor"):
        if rope_type == "longrope" and len(parameters[key]) != dim // 2:
            raise ValueError(
                f"{key} has {len(parameters[key])} entries, qk_rope_head_dim={dim} needs {dim // 2}"
            )
    if dim % 2:
        raise ValueError(f"qk_rope_head_dim={dim} must be even")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        dim=dim,
        max_position_embeddings=max_positions,
        # DeepSeek-V2 always pairs neighbours; it has no such key.
        interleaved=architecture == "DeepseekV2ForCausalLM" or bool(get("rope_interleave")),
        parameters=parameters,
    )


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


def _moe_layers(get: _Reader, architecture: str) -> tuple[bool, ...]:
    num_layers = get.size("num_hidden_layers")
    types = get.raw.get("mlp_layer_types")
    if architecture == "Glm4MoeLiteForCausalLM" and types is not None:
        if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            raise ValueError(
                f"mlp_layer_types must name 'dense' or 'sparse' for each of {num_layers} layers: {types}"
            )
        return tuple(kind == "sparse" for kind in types)
    if get("moe_layer_freq") != 1:
        raise ValueError(f"moe_layer_freq={get('moe_layer_freq')} is not supported, only 1")
    if get("n_routed_experts") is None:
        return (False,) * num_layers
    return tuple(i >= get("first_k_dense_replace") for i in range(num_layers))


def _moe(get: _Reader, architecture: str) -> MoEConfig:
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


def _dtype(raw: dict, dtype: str, path: Path) -> str:
    """The dtype of weights and KV cache."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
        return dtype
    found = raw.get("dtype") or raw.get("torch_dtype")
    if found is None:
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        stored = {entry.dtype for entry in check_checkpoint_files(path).values() if len(entry.shape) > 1}
        stored -= {"F8_E4M3", "U8"}  # of quantised weights, which are expanded
        # A float32 router beside bfloat16 weights is usual, so the narrower one is the model's.
        found = min((names.get(name, name) for name in stored), default="float32")
    found = str(found).removeprefix("torch.")
    if found not in DTYPES:
        raise ValueError(
            f"{path} has dtype {found}, which is not supported as it is; choose --dtype float32 (exact for "
            "float16 weights) or --dtype bfloat16 (rounds them)"
        )
    return found


def _eos_token_ids(raw: dict, path: Path) -> tuple[int, ...]:
    """generation_config.json decides, as in transformers' generate; config.json if it is silent."""
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
