"""`convert`: read a Llama-type checkpoint, write the equal MLA checkpoint, layer by layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from prefold.config import DTYPES
from prefold.convert.gguf_source import GGUFSource
from prefold.convert.hf_source import HFSource
from prefold.convert.mla import MLAMapping
from prefold.convert.source import LlamaSpec, Source, check_names, expected_shapes
from prefold.convert.writer import ShardWriter

RECORD = "conversion.json"
"""Says what a converted checkpoint was made from."""


def convert(
    src: str | Path,
    dst: str | Path,
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda line: None,
    overwrite: bool = False,
    qk_nope_head_dim: int = 0,
) -> None:
    """Rewrite the Llama-type checkpoint `src` as an equal MLA checkpoint (DeepseekV3ForCausalLM) at `dst`.

    The result appears complete or not at all. `prefold.convert.mla` explains the mapping and its error.

    Args:
        src: a Hugging Face folder with safetensors, or a GGUF file.
        dst: a folder that does not exist or is empty; with `overwrite`, a checkpoint folder to replace.
        dtype: "float32" (exact) or "bfloat16" (exact only if the source is bfloat16; else `progress` warns).
        progress: is given one line of text at a time.
        qk_nope_head_dim: size of the key part without position, which is zero: 0 leaves it out, more is for
            readers that need one to exist.

    Raises:
        ValueError: the source cannot be read or has no exact MLA form, or `dst` is in the way.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported ({', '.join(DTYPES)})")
    if qk_nope_head_dim < 0:
        raise ValueError(f"qk_nope_head_dim is {qk_nope_head_dim}, must be >= 0")
    src, dst = Path(src).expanduser().resolve(), Path(dst).expanduser().resolve()
    _check_destination(src, dst, overwrite)
    source = open_source(src)
    expected = expected_shapes(source.spec)
    check_names(source, expected)

    partial = dst.with_name(f".{dst.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        mapping = MLAMapping(source.spec, qk_nope_head_dim)
        rounded = _write_tensors(source, mapping, expected, partial, getattr(torch, dtype), progress)
        if rounded:
            progress(
                f"warning: {rounded} weights were rounded to bfloat16 (relative error up to 2^-9 = 0.2 %): "
                "the result is near the source, not equal to it; float32 is exact"
            )
        _write_json(partial / "config.json", mapping.config(dtype))
        source.save_extras(partial)
        _write_json(partial / RECORD, record(src, dtype, qk_nope_head_dim))
        _move(partial, dst)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"wrote {dst}")


def record(src: Path, dtype: str, qk_nope_head_dim: int = 0) -> dict:
    """What conversion.json holds: enough to tell whether a folder was made from this source in this way."""
    size = src.stat().st_size if src.is_file() else None
    return {
        "source": src.name,
        "source_bytes": size,
        "dtype": dtype,
        "qk_nope_head_dim": qk_nope_head_dim,
        "mapping": 1,
    }


def open_source(src: Path) -> Source:
    """The reader for `src`; ValueError if it is neither a GGUF file nor a checkpoint folder."""
    if src.is_file():
        return GGUFSource(src)
    if (src / "config.json").is_file():
        return HFSource(src)
    raise ValueError(f"{src} is neither a GGUF file nor a folder with a config.json")


def _check_destination(src: Path, dst: Path, overwrite: bool) -> None:
    if dst == src or dst in src.parents:
        raise ValueError(f"{dst} holds the source {src}: choose another folder")
    if not dst.exists():
        return
    if not dst.is_dir():
        raise ValueError(f"{dst} is a file")
    if any(dst.iterdir()):
        if not overwrite:
            raise ValueError(f"{dst} is not empty (--overwrite replaces it)")
        if not (dst / "config.json").is_file():
            raise ValueError(f"{dst} holds no config.json: it is no checkpoint, so it is not overwritten")


def _write_tensors(
    source: Source,
    mapping: MLAMapping,
    expected: dict[str, tuple[int, ...]],
    folder: Path,
    dtype: torch.dtype,
    progress: Callable[[str], None],
) -> int:
    """Write all tensors; the number of elements that `dtype` could not hold exactly."""

    def read(name: str) -> torch.Tensor:
        tensor = source.tensor(name)
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{source.name}: {name} has shape {list(tensor.shape)}, config says {list(expected[name])}"
            )
        if not tensor.is_floating_point() or tensor.element_size() > 4:
            raise ValueError(
                f"{source.name}: {name} has dtype {tensor.dtype}, not a float of at most 32 bits"
            )
        return tensor.float()

    rounded = 0
    with ShardWriter(folder) as writer:
        for name, tensor in _converted(read, mapping, set(expected), source.spec, progress):
            stored = tensor.to(dtype)
            rounded += int((stored.float() != tensor).sum()) if dtype != torch.float32 else 0
            writer.add(name, stored)
    return rounded


def _converted(
    read: Callable[[str], torch.Tensor],
    mapping: MLAMapping,
    names: set[str],
    spec: LlamaSpec,
    progress: Callable[[str], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the converted checkpoint, one layer in memory at a time."""
    for name in sorted(names):
        if not name.startswith("model.layers."):
            yield name, read(name)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        attention = {name for name in own if name.startswith("self_attn.")}
        tensors = {name.removeprefix("self_attn."): read(prefix + name) for name in attention}
        for name, tensor in mapping.attention(tensors).items():
            yield f"{prefix}self_attn.{name}", tensor
        for name in sorted(own - attention):
            yield prefix + name, read(prefix + name)
        progress(f"layer {layer + 1} of {spec.num_layers}")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _move(partial: Path, dst: Path) -> None:
    """Put `partial` at `dst`. A folder already there steps aside first: nobody ever sees a mixture."""
    old = dst.with_name(f".{dst.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if dst.exists():
        dst.rename(old)
    partial.rename(dst)
    shutil.rmtree(old, ignore_errors=True)
