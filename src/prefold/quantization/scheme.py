"""Which modules of a checkpoint are quantised, and how: config.json and hf_quant_config.json, checked.

Imports no torch, so that an unknown format is refused before anything starts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from prefold.quantization.formats import (
    NVFP4_GROUP,
    Format,
    compressed_nvfp4,
    fp8_blocks,
    modelopt_nvfp4,
)

SUPPORTED = (
    "fp8 (e4m3, per block or per tensor)",
    "modelopt (quant_algo NVFP4 or FP8)",
    "compressed-tensors (nvfp4-pack-quantized; float-quantized or naive-quantized in 8 bits, per tensor, "
    "channel or block)",
)

ACTIVATION_SCALES = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
)
"""Last parts of names of tensors that quantise activations or the KV cache, which is not done here."""


@dataclass(frozen=True)
class Group:
    """Modules that share a format.

    Attributes:
        targets: "Linear" is every module with a weight; "re:..." a regular expression that the start of
            the module's name must match; else a module's name.
    """

    targets: tuple[str, ...]
    format: Format


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint's quantisation config says.

    Attributes:
        ignored: patterns of modules that are not quantised.
        style: how to read them. "glob": * is any text; "re": as `Group.targets`; "path": a module's name,
            that of a module around it, or the end of its name.
    """

    method: str
    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    style: Literal["glob", "re", "path"]

    def format_of(self, module: str) -> Format | None:
        """The format of a module's weight if it is quantised; a name wins over a regular expression, and
        that over "Linear"."""
        for matches in (str.__eq__, _matches_regex, lambda module, target: target == "Linear"):
            for group in self.groups:
                if any(matches(module, target) for target in group.targets):
                    return group.format
        return None

    def ignored_by(self, module: str) -> str | None:
        """The first pattern that says that `module` is not quantised."""
        return next((p for p, compiled in self._compiled if compiled.fullmatch(module)), None)

    @cached_property
    def _compiled(self) -> list[tuple[str, re.Pattern[str]]]:
        """Published checkpoints list hundreds of patterns and hold tens of thousands of modules."""
        expression = {"glob": translate, "re": _expression, "path": _path_expression}[self.style]
        return [(pattern, re.compile(expression(pattern))) for pattern in self.ignored]


def read_scheme(folder: str | Path) -> Scheme | None:
    """The scheme of a checkpoint folder; None if it is not quantised.

    config.json's `quantization_config` (or `compression_config`) counts, else hf_quant_config.json.
    ValueError naming what is not supported and what is.
    """
    folder = Path(folder)
    raw, where = _read(folder / "config.json"), folder / "config.json"
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        where = folder / "hf_quant_config.json"
        inner = _read(where).get("quantization") if where.is_file() else None
        if not inner:
            return None
        found = {"quant_method": "modelopt"} | inner
    parse = _PARSERS.get(str(found.get("quant_method")))
    if parse is None:
        raise ValueError(
            f"{where}: weights quantised with quant_method {found.get('quant_method')!r} are not supported; "
            f"supported: {'; '.join(SUPPORTED)}"
        )
    try:
        scheme = parse(found)
        # Bad patterns show now: these go through all of them.
        scheme.format_of("")
        scheme.ignored_by("")
        return scheme
    except (ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        reason = error if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: {reason}; supported: {'; '.join(SUPPORTED)}") from None


def _fp8(raw: dict[str, Any]) -> Scheme:
    fmt = raw.get("fmt", "e4m3")
    if fmt != "e4m3":
        raise ValueError(f"fmt {fmt!r} of quant_method fp8 is not supported")
    size = raw.get("weight_block_size")
    block = (None, None) if size is None else _block(size, "weight_block_size")
    ignored = tuple(raw.get("modules_to_not_convert") or ())
    return Scheme("fp8", (Group(("Linear",), fp8_blocks(block)),), ignored, "path")


def _modelopt(raw: dict[str, Any]) -> Scheme:
    algo = str(raw.get("quant_algo")).upper()
    formats = {"NVFP4": modelopt_nvfp4(), "FP8": fp8_blocks((None, None), "weight_scale")}
    if algo not in formats:
        raise ValueError(f"quant_algo {raw.get('quant_algo')!r} of quant_method modelopt is not supported")
    group_size = raw.get("group_size")
    if algo == "NVFP4" and group_size not in (None, NVFP4_GROUP):
        raise ValueError(f"NVFP4 with group_size {group_size} is not supported, only {NVFP4_GROUP}")
    ignored = tuple(raw.get("exclude_modules") or raw.get("ignore") or ())
    return Scheme(f"modelopt {algo}", (Group(("Linear",), formats[algo]),), ignored, "glob")


def _compressed_tensors(raw: dict[str, Any]) -> Scheme:
    sparsity = (raw.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"sparsity {sparsity!r} of compressed-tensors is not supported")
    if raw.get("transform_config"):
        raise ValueError("transform_config (rotated weights) of compressed-tensors is not supported")
    groups = tuple(
        Group(tuple(group["targets"]), _compressed_format(name, group, raw))
        for name, group in raw["config_groups"].items()
        if group.get("weights")
    )
    return Scheme("compressed-tensors", groups, tuple(raw.get("ignore") or ()), "re")


def _compressed_format(name: str, group: dict[str, Any], raw: dict[str, Any]) -> Format:
    fmt, weights = group.get("format") or raw.get("format"), group["weights"]
    bits, kind, strategy = weights["num_bits"], weights["type"], weights.get("strategy")
    symmetric = weights.get("symmetric", True)
    if fmt == "nvfp4-pack-quantized" and (bits, kind, symmetric) == (4, "float", True):
        if weights.get("group_size") == NVFP4_GROUP:
            return compressed_nvfp4()
    elif fmt in ("float-quantized", "naive-quantized") and (bits, kind, symmetric) == (8, "float", True):
        if strategy == "block":
            return fp8_blocks(_block(weights["block_structure"], "block_structure"), "weight_scale")
        blocks = {"tensor": (None, None), "channel": (1, None), None: (None, None)}
        if strategy in blocks:
            return fp8_blocks(blocks[strategy], "weight_scale")
    raise ValueError(
        f"format {fmt!r} of compressed-tensors, {name} ({bits}-bit {kind}, strategy {strategy!r}, group_size "
        f"{weights.get('group_size')}, symmetric {symmetric}) is not supported"
    )


_PARSERS = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors,
}


def _block(size: Any, key: str) -> tuple[int, int]:
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(type(n) is int and n > 0 for n in size)
    ):
        raise ValueError(f"{key} {size!r} must be two positive whole numbers")
    return size[0], size[1]


def _matches_regex(module: str, target: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _expression(pattern: str) -> str:
    return f"(?:{pattern[3:]}).*" if pattern.startswith("re:") else re.escape(pattern)


def _path_expression(pattern: str) -> str:
    name = re.escape(pattern)
    return rf"{name}(\..*)?|.*\.{name}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
