"""A tiny checkpoint rewritten as GGUF, by llama.cpp's conventions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from prefold.gguf_file import TENSOR_NAMES

PERMUTED = ("llama", "smollm3")


def write_gguf(
    folder: Path,
    path: Path,
    arch: str,
    kind: Kind = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
    pre: str = "gpt-2",
    num_files: int = 1,
) -> Path:
    """Write checkpoint `folder` to `path` (with more files: to that name's parts); the first file's path.

    `kind` is the type of matrices whose rows fill its blocks, F16 or F32 that of others. `metadata` is
    put beside or over the usual keys, by their names after the architecture's; None leaves a key out.
    """
    config = json.loads((folder / "config.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    per_file = 0 if num_files == 1 else -(-len(tensors) // num_files)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=per_file)
    for key, value in (_metadata(config) | dict(metadata or {})).items():
        if value is not None:
            _add(writer, f"{arch}.{key}", value)
    _add_tokenizer(writer, folder, pre)
    for name, tensor in tensors.items():
        stored, value = gguf_name(name), tensor.float()
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(stored.split(".")[-2])
        if arch in PERMUTED and heads:
            value = value.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).reshape(value.shape)
        _add_tensor(writer, stored, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if num_files == 1 else path.with_name(f"{path.stem}-00001-of-{num_files:05}.gguf")


def gguf_name(name: str) -> str:
    """
    >>> gguf_name("model.layers.3.mlp.up_proj.weight")
    'blk.3.ffn_up.weight'
    """
    module, _, last = name.rpartition(".")
    parts = module.split(".")
    short = {long: short for short, long in TENSOR_NAMES.items()}
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{short['.'.join(parts[3:])]}.{last}"
    return f"{short[module]}.{last}"


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add[type(value)](key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """That of `make_checkpoint`: byte-level BPE."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _add_tensor(writer: gguf.GGUFWriter, name: str, value: torch.Tensor, kind: Kind) -> None:
    array = np.ascontiguousarray(value.numpy())
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.F32 or array.ndim == 1:
        writer.add_tensor(name, array)
    elif array.shape[-1] % block:
        writer.add_tensor(name, array.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
