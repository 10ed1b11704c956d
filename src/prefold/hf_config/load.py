"""A checkpoint's config.json, whatever its architecture, or a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path

from prefold.checkpoint_files import check_checkpoint_files, find_checkpoint
from prefold.config import DTYPES, ModelConfig
from prefold.gguf_file import GGUFFile
from prefold.hf_config import dsa, gqa, mla
from prefold.hf_config.gguf import gguf_config
from prefold.hf_config.reader import Reader, read_json
from prefold.quantization.scheme import read_scheme

SPARSE_ARCHITECTURES, GQA_ARCHITECTURES = tuple(dsa.DEFAULTS), tuple(gqa.DEFAULTS)
MLA_ARCHITECTURES = tuple(name for name in mla.DEFAULTS if name not in SPARSE_ARCHITECTURES)
SUPPORTED_ARCHITECTURES = MLA_ARCHITECTURES + SPARSE_ARCHITECTURES + GQA_ARCHITECTURES

HIDDEN_ACTS = ("silu", "swish")
"""Supported activation functions: two names of one function."""

_ARCHITECTURE_OF_MODEL_TYPE = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def load_model_config(model: str | Path, dtype: str = "auto") -> ModelConfig:
    """Read a checkpoint's config.json (and generation_config.json for the end-of-sequence tokens), or the
    metadata of a GGUF file.

    `dtype` is that of weights: "float32", "bfloat16" or "auto", the checkpoint's own; of quantised GGUF files
    that is bfloat16.
    Raises ValueError for what cannot be run as it is meant: an unknown architecture or
    quantisation, an activation, router or rope type that is not supported, float16 under "auto".
    """
    path = find_checkpoint(model)
    raw, where = _read(path)
    architecture = _architecture(raw, path)
    if path.is_dir():
        read_scheme(path)  # refuses what cannot be loaded
    family = mla if architecture in mla.DEFAULTS else gqa
    get = Reader(raw, family.DEFAULTS[architecture], where)
    if get("hidden_act") not in HIDDEN_ACTS:
        raise ValueError(
            f"hidden_act={get('hidden_act')!r} is not supported; supported: {', '.join(HIDDEN_ACTS)}"
        )
    return ModelConfig(
        path=str(path),
        architecture=architecture,
        vocab_size=get.size("vocab_size"),
        hidden_size=get.size("hidden_size"),
        intermediate_size=get.size("intermediate_size"),
        num_layers=get.size("num_hidden_layers"),
        num_heads=get.size("num_attention_heads"),
        rms_norm_eps=float(get("rms_norm_eps")),
        hidden_act="silu",
        tie_word_embeddings=bool(get("tie_word_embeddings")),
        dtype=_dtype(raw, dtype, path),
        max_position_embeddings=get.size("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(raw, path),
        **(mla.read_mla(get, architecture) if family is mla else gqa.read_gqa(get, architecture)),
    )


def _read(path: Path) -> tuple[dict, Path]:
    """config.json, or what it would say, and where that was found."""
    if path.is_file():
        return gguf_config(GGUFFile(path)), path
    return read_json(path / "config.json"), path / "config.json"


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


def _dtype(raw: dict, dtype: str, path: Path) -> str:
    """The dtype of weights."""
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
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
