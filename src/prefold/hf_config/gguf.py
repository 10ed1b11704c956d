"""A GGUF file's metadata in the words of a config.json, for the architectures of the Llama family."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefold.gguf_file import GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""GGUF's name -> that of the Hugging Face class. Mistral is "llama" too."""

_MUST_BE: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}
"""Keys that change what a model computes, and values that do not: others are refused."""

_EOS = ("eos", "eot", "eom")
"""Tokens that end an answer, as tokenizer.ggml.*_token_id."""


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """What the model's config.json would say; `dtype` is bfloat16 for quantised weights.

    ValueError naming the key or tensor for what is not supported or not there.
    """
    name = file.path.name
    if file.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} has GGUF architecture {file.architecture!r}, which is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    for key, neutral in _MUST_BE.items():
        value = file.model_field(key, neutral[0])
        if value not in neutral:
            raise ValueError(f"{name}: {file.architecture}.{key}={value} is not supported")
    hidden, heads = (
        file.model_field(key, required=True) for key in ("embedding_length", "attention.head_count")
    )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{name} lacks the tensor token_embd.weight")
    config = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.model_field("feed_forward_length", required=True),
        "num_hidden_layers": file.model_field("block_count", required=True),
        "num_attention_heads": heads,
        "num_key_value_heads": file.model_field("attention.head_count_kv", heads),
        "max_position_embeddings": file.model_field("context_length", required=True),
        # GGUF keeps float32: print it in float32's shortest form to get back 1e-05, not 9.99999974e-06.
        "rms_norm_eps": float(
            str(np.float32(file.model_field("attention.layer_norm_rms_epsilon", required=True)))
        ),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "dtype": _dtype(file),
        "eos_token_id": [
            token for kind in _EOS if (token := file.field(f"tokenizer.ggml.{kind}_token_id")) is not None
        ],
    }
    config["head_dim"] = _head_dim(file, hidden, heads)
    config["rope_parameters"] = _rope(file, config["head_dim"])
    return config | _window(file, config["max_position_embeddings"])


def _head_dim(file: GGUFFile, hidden: Any, heads: Any) -> int:
    """Size of keys and values alike, all of which is rotated."""
    sizes = {key: file.model_field(key) for key in ("attention.key_length", "attention.value_length")}
    sizes["rope.dimension_count"] = file.model_field("rope.dimension_count")
    if not isinstance(heads, int) or not heads or not isinstance(hidden, int):
        raise ValueError(f"{file.path.name}: heads or sizes that differ by layer are not supported")
    head_dim = sizes["attention.key_length"] or hidden // heads
    differing = {key: size for key, size in sizes.items() if size not in (None, head_dim)}
    if differing:
        raise ValueError(
            f"{file.path.name}: heads have {head_dim} elements, but {differing}: supported are keys and "
            "values of one size that are rotated as a whole"
        )
    return head_dim


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """`rope_parameters`. Llama 3's scaling comes as the tensor rope_freqs, which multiplies wavelengths."""
    rope: dict[str, Any] = {"rope_theta": file.model_field("rope.freq_base", 10_000.0)}
    kind = file.model_field("rope.scaling.type", "none")
    factors = file.tensors.get("rope_freqs.weight")
    if kind == "none" and factors is None:
        return rope | {"rope_type": "default"}
    if kind == "linear" and factors is None:
        return rope | {
            "rope_type": "linear",
            "factor": file.model_field("rope.scaling.factor", required=True),
        }
    if kind == "yarn" and factors is None:
        return rope | _yarn(file)
    if (
        kind != "none"
        or factors is None
        or factors.shape != (head_dim // 2,)
        or factors.data.dtype != np.float32
    ):
        with_factors = f" with the tensor rope_freqs {list(factors.shape)}" if factors is not None else ""
        raise ValueError(
            f"{file.path.name}: rope scaling {kind!r}{with_factors} is not supported; supported: none, "
            f"linear, yarn, or rope_freqs [{head_dim // 2}] in F32"
        )
    stretch = factors.data.tolist()
    return rope | {
        "rope_type": "longrope",
        "short_factor": stretch,
        "long_factor": stretch,
        "attention_factor": 1.0,
    }


def _yarn(file: GGUFFile) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        value = file.model_field(f"rope.scaling.{key}", 1.0)
        if value != 1.0:
            raise ValueError(
                f"{file.path.name}: {file.architecture}.rope.scaling.{key}={value} is not supported"
            )
    return {
        "rope_type": "yarn",
        "factor": file.model_field("rope.scaling.factor", required=True),
        "original_max_position_embeddings": file.model_field(
            "rope.scaling.original_context_length", required=True
        ),
        "beta_fast": file.model_field("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.model_field("rope.scaling.yarn_beta_slow", 1.0),
    }


def _window(file: GGUFFile, context: int) -> dict[str, Any]:
    """Llama with a sliding window in all layers is Mistral; in others the file does not say which slide."""
    window = file.model_field("attention.sliding_window", 0)
    if window == 0 or (isinstance(window, int) and window >= context):
        return {}
    if file.architecture == "llama" and isinstance(window, int):
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    raise ValueError(
        f"{file.path.name}: {file.architecture}.attention.sliding_window={window} is not supported: the file "
        "does not say in which layers"
    )


def _dtype(file: GGUFFile) -> str:
    """That of matrices; quantised ones are expanded to bfloat16."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"
