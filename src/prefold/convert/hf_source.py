"""Reading a Hugging Face checkpoint folder of Llama type."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from prefold.convert.source import LlamaSpec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")

REFUSED = {
    "Qwen3ForCausalLM": "it normalises query and key heads (qk-norm); MLA's shared k_pe cannot",
    "SmolLM3ForCausalLM": "some layers have no rotary embedding (NoPE), and MLA has one rope for all layers",
    "Phi3ForCausalLM": "its rotary frequencies depend on the length of the prompt",
    "MixtralForCausalLM": "its MLP is a mixture of experts",
}
"""Why a near relative of Llama is refused."""

EXTRAS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that say nothing of the weights and are copied as they are."""


class HFSource:
    """A folder with config.json and safetensors."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.folder = folder
        self.spec = read_spec(folder)
        self._shard_of = _locate_tensors(folder)
        self._open = cache(_open_shard)

    def tensor_names(self) -> set[str]:
        return set(self._shard_of)

    def tensor(self, name: str) -> torch.Tensor:
        return self._open(self._shard_of[name]).get_tensor(name)

    def save_extras(self, folder: Path) -> None:
        for name in EXTRAS:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        templates = self.folder / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, folder / templates.name)


def _open_shard(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def _locate_tensors(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: folder / shard for name, shard in weight_map.items()}
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        kinds = "PyTorch .bin files are not read; " if list(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} holds no safetensors ({kinds}save the model with save_pretrained first)")
    return {name: shard for shard in shards for name in _open_shard(shard).keys()}  # noqa: SIM118


def read_spec(folder: Path) -> LlamaSpec:
    """The decoder that config.json describes. ValueError with the reason if it cannot be converted."""
    from transformers import AutoConfig

    raw = json.loads((folder / "config.json").read_text())
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        reason = REFUSED.get(architecture, "it is not of Llama type")
        raise ValueError(
            f"{architecture} cannot be converted: {reason} (convertible: {', '.join(ARCHITECTURES)})"
        )
    config = AutoConfig.from_pretrained(folder)
    _refuse_inexact(config, raw)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wavelengths, attention_factor = _rope(config, head_dim)
    bias = bool(getattr(config, "attention_bias", False))
    return LlamaSpec(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        wavelengths=wavelengths,
        attention_factor=attention_factor,
        hidden_act=config.hidden_act,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        o_bias=bias and architecture == "LlamaForCausalLM",
        token_ids={key: raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _refuse_inexact(config, raw: dict) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"sliding-window attention (window {window} < max_position_embeddings "
            f"{config.max_position_embeddings}) cannot be expressed in an MLA checkpoint"
        )
    no_rope = getattr(config, "no_rope_layers", None)
    if no_rope and not all(no_rope):
        raise ValueError(
            f"{no_rope.count(0)} layers have no rotary embedding, and MLA has one rope for all layers"
        )
    if getattr(config, "mlp_bias", False):
        raise ValueError("mlp_bias is true, and the MLP of a DeepSeek-V3 checkpoint has no bias")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "?")
        raise ValueError(f"the checkpoint is quantised ({method}): dequantise it first")


def _rope(config, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Wavelengths [head_dim / 2] and attention factor, as transformers computes them in float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported (1 is)"
        )
    if rope_type == "default":
        return default_wavelengths(parameters["rope_theta"], head_dim), 1.0
    if rope_type not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"rope type {rope_type!r} cannot be expressed: its frequencies change with the prompt's length "
            "(convertible: default, linear, llama3, yarn)"
        )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config)
    return tuple((1.0 / inv_freq.double()).tolist()), float(attention_factor)


def default_wavelengths(theta: float, head_dim: int) -> tuple[float, ...]:
    """theta ** (2j / head_dim), rounded to float32 as transformers rounds it before it takes the inverse."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return tuple((theta**exponents).tolist())
