"""Quantised copies of checkpoints, and their values again by numpy alone.

`quantize_checkpoint` writes what published tools write. `dequantized_checkpoint` reads it back as the
published formulas say, without the engine's code, so that the two can be compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from prefold.checkpoint_files import INDEX_FILE, SINGLE_FILE, check_checkpoint_files

Tensors = dict[str, torch.Tensor]

E4M3_MAX, E2M1_MAX, GROUP = 448.0, 6.0, 16

NOT_LINEAR = ("*embed_tokens", "lm_head", "*norm", "*.mlp.gate", "*.rotary_emb")
"""Modules that no published checkpoint quantises."""


@dataclass(frozen=True)
class QuantizedFormat:
    """One way to write a weight: `config` is what config.json says, `pack(weight)` gives tensors by the
    last parts of their names, `unpack` undoes it in float32."""

    config: Callable[[tuple[int, int], list[str]], dict[str, Any]]
    pack: Callable[[torch.Tensor, tuple[int, int]], Tensors]
    unpack: Callable[[dict[str, np.ndarray], tuple[int, int]], np.ndarray]


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    format: str,
    block: tuple[int, int] = (128, 128),
    ignore: tuple[str, ...] = (),
) -> Path:
    """Write the plain checkpoint `src` to the folder `dst` with its linear weights quantised.

    Args:
        format: a key of `quantized_formats()`.
        block: rows and columns per scale, where the format has blocks.
        ignore: patterns (* is any text) of modules that stay plain, beside embedding, head, norms and router.
    """
    src, dst, known = Path(src), Path(dst), quantized_formats()
    if format not in known:
        raise ValueError(f"format {format!r} is unknown; known: {', '.join(known)}")
    entries = check_checkpoint_files(src)
    dst.mkdir(parents=True, exist_ok=True)
    for file in src.iterdir():
        if file.suffix != ".safetensors" and file.name != INDEX_FILE:
            shutil.copy(file, dst / file.name)
    weight_map, plain = {}, []
    for number, path in enumerate(sorted({entry.file for entry in entries.values()})):
        tensors: Tensors = {}
        for name, tensor in load_file(path).items():
            module, _, last = name.rpartition(".")
            patterns = (*NOT_LINEAR, *ignore)
            if last != "weight" or any(fnmatchcase(module, pattern) for pattern in patterns):
                tensors[name] = tensor
                plain += [module] if last == "weight" and tensor.dim() == 2 else []
            else:
                tensors |= {f"{module}.{k}": v for k, v in known[format].pack(tensor.float(), block).items()}
        shard = f"model-{number}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, dst / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    (dst / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((src / "config.json").read_text())
    listed = [*ignore, *(m for m in plain if not any(fnmatchcase(m, p) for p in ignore))]
    extra = known[format].config(block, listed)
    hf_quant_config = extra.pop("hf_quant_config", None)
    if hf_quant_config:
        (dst / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    (dst / "config.json").write_text(json.dumps(config | extra))
    return dst


def dequantized_checkpoint(src: str | Path, dst: str | Path, format: str, block=(128, 128)) -> Path:
    """Write what the quantised checkpoint `src` stands for as a plain float32 checkpoint, by numpy."""
    src, dst, known = Path(src), Path(dst), quantized_formats()[format]
    dst.mkdir(parents=True, exist_ok=True)
    stored: Tensors = {}
    for path in sorted({entry.file for entry in check_checkpoint_files(src).values()}):
        stored |= load_file(path)
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        by_module.setdefault(module, {})[last] = tensor
    plain: Tensors = {}
    for module, tensors in by_module.items():
        if "weight_scale" in tensors or "weight_scale_inv" in tensors:
            arrays = {k: _array(v) for k, v in tensors.items()}
            plain[f"{module}.weight"] = torch.from_numpy(known.unpack(arrays, block))
        else:
            plain |= {f"{module}.{k}": v for k, v in tensors.items()}
    save_file(plain, dst / SINGLE_FILE, metadata={"format": "pt"})
    for file in src.iterdir():
        if file.suffix != ".safetensors" and file.name not in (INDEX_FILE, "hf_quant_config.json"):
            shutil.copy(file, dst / file.name)
    config = json.loads((src / "config.json").read_text())
    config.pop("quantization_config", None)
    (dst / "config.json").write_text(json.dumps(config))
    return dst


def quantized_formats() -> dict[str, QuantizedFormat]:
    """Formats of `quantize_checkpoint` by name."""
    modelopt = {"quant_method": "modelopt"}
    channel, tensor = (1, 0), (0, 0)
    return {
        "fp8": QuantizedFormat(
            lambda block, ignore: _config(quant_method="fp8", fmt="e4m3", weight_block_size=list(block)),
            lambda w, block: _pack_fp8(w, block, "weight_scale_inv"),
            lambda arrays, block: _unpack_fp8(arrays, "weight_scale_inv", block),
        ),
        "modelopt-nvfp4": QuantizedFormat(
            lambda block, ignore: {
                "hf_quant_config": {
                    "producer": {"name": "modelopt"},
                    "quantization": {
                        "quant_algo": "NVFP4",
                        "kv_cache_quant_algo": None,
                        "group_size": GROUP,
                        "exclude_modules": ignore,
                    },
                }
            },
            lambda w, block: _pack_nvfp4(w, "weight", "weight_scale_2", reciprocal=False),
            lambda arrays, block: _unpack_nvfp4(arrays, "weight", "weight_scale_2", reciprocal=False),
        ),
        "modelopt-fp8": QuantizedFormat(
            lambda block, ignore: _config(**modelopt, quant_algo="FP8", ignore=ignore),
            lambda w, block: _pack_fp8(w, tensor, "weight_scale"),
            lambda arrays, block: _unpack_fp8(arrays, "weight_scale", tensor),
        ),
        "compressed-nvfp4": QuantizedFormat(
            lambda block, ignore: _compressed("nvfp4-pack-quantized", "tensor_group", ignore, bits=4),
            lambda w, block: _pack_nvfp4(w, "weight_packed", "weight_global_scale", reciprocal=True),
            lambda arrays, block: _unpack_nvfp4(
                arrays, "weight_packed", "weight_global_scale", reciprocal=True
            ),
        ),
        "compressed-fp8-channel": QuantizedFormat(
            lambda block, ignore: _compressed("float-quantized", "channel", ignore),
            lambda w, block: _pack_fp8(w, channel, "weight_scale", torch.bfloat16),
            lambda arrays, block: _unpack_fp8(arrays, "weight_scale", channel),
        ),
        "compressed-fp8-tensor": QuantizedFormat(
            lambda block, ignore: _compressed("float-quantized", "tensor", ignore),
            lambda w, block: _pack_fp8(w, tensor, "weight_scale", torch.bfloat16),
            lambda arrays, block: _unpack_fp8(arrays, "weight_scale", tensor),
        ),
        "compressed-fp8-block": QuantizedFormat(
            lambda block, ignore: _compressed("naive-quantized", "block", ignore, block=block),
            lambda w, block: _pack_fp8(w, block, "weight_scale"),
            lambda arrays, block: _unpack_fp8(arrays, "weight_scale", block),
        ),
    }


def _config(**content: Any) -> dict[str, Any]:
    return {"quantization_config": content}


def _compressed(
    format: str, strategy: str, ignore: list[str], bits: int = 8, block: tuple[int, int] | None = None
) -> dict[str, Any]:
    """config.json's part as llm-compressor writes it; its patterns are regular expressions."""
    weights = {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "group_size": GROUP if bits == 4 else None,
        "block_structure": list(block) if block else None,
    }
    patterns = ["re:" + p.replace(".", r"\.").replace("*", ".*") + "$" if "*" in p else p for p in ignore]
    return _config(
        quant_method="compressed-tensors",
        format=format,
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=patterns,
        quantization_status="compressed",
    )


# Numpy from here on: torch only as a container of dtypes that numpy lacks.


def e4m3_table() -> np.ndarray:
    """[256] float32 by code: 1 bit of sign, 4 of exponent with offset 7, 3 of mantissa; no infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


def e2m1_table() -> np.ndarray:
    """[16] float32 by code: 1 bit of sign, 2 of exponent with offset 1, 1 of mantissa."""
    codes = np.arange(16)
    exponent, mantissa = (codes >> 1) & 3, (codes & 1) / 2
    values = np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1.0))
    return np.where(codes < 8, values, -values).astype(np.float32)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """As numpy: float8 as its float32 values, the rest as it is or in float32."""
    if tensor.dtype == torch.float8_e4m3fn:
        return e4m3_table()[tensor.view(torch.uint8).numpy()]
    return tensor.numpy() if tensor.dtype == torch.uint8 else tensor.float().numpy()


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest finite entries of `table`, whose second half is the first with other signs."""
    half = len(table) // 2
    positive = table[:half][np.isfinite(table[:half])]
    codes = np.abs(np.abs(values)[..., None] - positive).argmin(-1)
    return (codes + np.where(np.signbit(values), half, 0)).astype(np.uint8)


def _spread(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Scales of blocks as a matrix of `shape`; 0 in `block` is the whole dim."""
    scales = scales.reshape(scales.shape if scales.ndim == 2 else (-1, 1))
    height, width = (b or n for b, n in zip(block, shape))
    return scales.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]]


def _pack_fp8(
    weight: torch.Tensor, block: tuple[int, int], name: str, scale_dtype: torch.dtype = torch.float32
) -> Tensors:
    w = weight.numpy()
    height, width = (b or n for b, n in zip(block, w.shape))
    rows, columns = -(-w.shape[0] // height), -(-w.shape[1] // width)
    padded = np.zeros((rows * height, columns * width), np.float32)
    padded[: w.shape[0], : w.shape[1]] = np.abs(w)
    largest = padded.reshape(rows, height, columns, width).max((1, 3))
    scales = torch.from_numpy(np.where(largest > 0, largest / E4M3_MAX, 1).astype(np.float32)).to(scale_dtype)
    codes = np.empty(w.shape, np.uint8)
    ratio = w / _spread(scales.float().numpy(), w.shape, block)
    for row in range(len(w)):  # a row at a time: every value is compared with 127 others
        codes[row] = _nearest(ratio[row], e4m3_table())
    stored = scales.reshape(()) if block == (0, 0) and scale_dtype == torch.float32 else scales
    stored = stored.reshape(1) if block == (0, 0) and scale_dtype != torch.float32 else stored
    return {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), name: stored}


def _unpack_fp8(arrays: dict[str, np.ndarray], name: str, block: tuple[int, int]) -> np.ndarray:
    weight = arrays["weight"]
    return weight * _spread(arrays[name], weight.shape, block)


def _pack_nvfp4(weight: torch.Tensor, values: str, global_name: str, reciprocal: bool) -> Tensors:
    w = weight.numpy()
    groups = w.reshape(len(w), -1, GROUP)
    scale_2 = np.float32(np.abs(w).max() / (E2M1_MAX * E4M3_MAX)) or np.float32(1)
    scales = _nearest(np.abs(groups).max(-1) / (E2M1_MAX * scale_2), e4m3_table())
    divisor = e4m3_table()[scales] * scale_2
    codes = _nearest(groups / np.where(divisor == 0, 1, divisor)[..., None], e2m1_table())
    codes = codes.reshape(len(w), -1)
    stored = np.float32(1) / scale_2 if reciprocal else scale_2
    return {
        values: torch.from_numpy(codes[:, 0::2] | (codes[:, 1::2] << 4)),
        "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        global_name: torch.tensor([stored]) if reciprocal else torch.tensor(stored),
        **({} if reciprocal else {"input_scale": torch.tensor(1.0)}),
    }


def _unpack_nvfp4(
    arrays: dict[str, np.ndarray], values: str, global_name: str, reciprocal: bool
) -> np.ndarray:
    packed, scale_2 = arrays[values], arrays[global_name].reshape(())
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)
    scales = arrays["weight_scale"] / scale_2 if reciprocal else arrays["weight_scale"] * scale_2
    return e2m1_table()[codes] * scales.repeat(GROUP, 1)[:, : codes.shape[1]]
