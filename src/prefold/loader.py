"""Weights from a checkpoint into a model, one tensor at a time, only this rank's part of each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from prefold.checkpoint_files import TensorEntry, check_checkpoint_files
from prefold.layers.bands import Band
from prefold.layers.weight import Weight
from prefold.quantization.catalog import StoredTensor, catalog
from prefold.quantization.gguf_tensors import GGUFTensors
from prefold.quantization.scheme import read_scheme
from prefold.quantization.source import OpenTensor, WeightSource
from prefold.quantization.tensors import BlockScaledTensor

SHOWN = 5
"""Tensors that an error names; the rest are counted."""


class Loadable(Protocol):
    """A model that can say what it needs of a checkpoint and what it leaves aside."""

    def weights(self, names: Container[str]) -> Iterable[Weight]: ...

    def ignorable(self, name: str) -> bool: ...


def load_weights(
    model: Loadable,
    source: str | Path | WeightSource,
    progress: Callable[[int, int], None] | None = None,
    weight_memory: str = "expanded",
) -> None:
    """Fill `model`'s parameters from `source`, usually a checkpoint folder.

    Quantised weights are dequantised in tiles of rows: no tensor is ever in memory whole in float32. With
    `weight_memory` "quantized" they go into the model's `Bands` as they are stored, where there are any; what
    a kernel cannot follow is dequantised there (see the `keep` of each source).

    Strict: raises ValueError naming tensors that are missing, unexpected, of another shape or stored in a
    form that is not supported, before the first is read. `progress(done, total)` counts tensors.

    A tensor that a model names without a part for itself is checked and not read.
    """
    opened = open_source(source) if isinstance(source, str | Path) else source
    weights = {weight.name: weight for weight in model.weights(opened.tensors.keys())}
    _check(weights, opened, model)
    needed = [weight.name for weight in weights.values() if weight.parts]
    if weight_memory == "quantized":
        for name in needed:
            if (bands := weights[name].bands) is not None and opened.tensors[name].is_quantized:
                bands.release()
    for done, (name, tensor) in enumerate(opened.open(needed), 1):
        bands = weights[name].bands
        if bands is not None and bands.is_released:
            bands.put(weights[name].band, _band(weights[name], tensor))
        else:
            for slices, destination in weights[name].parts:
                if destination.numel():
                    tensor.read(slices, destination)
        if progress is not None:
            progress(done, len(needed))


def _band(weight: Weight, tensor: OpenTensor) -> Band:
    """What a rank needs of a tensor, in memory of its own."""
    ((slices, destination),) = weight.parts
    kept = None if tensor.keep is None else tensor.keep(slices, destination.dtype)
    if kept is not None:
        return kept
    # The destination may be the parameter itself, which was released.
    shape = [part.stop - part.start for part in slices]
    band = torch.empty(shape, dtype=destination.dtype, device=destination.device)
    if band.numel():
        tensor.read(slices, band)
    return band


def open_source(path: str | Path) -> WeightSource:
    """The weights of a checkpoint folder, or of a GGUF file. ValueError as of the class that reads it."""
    path = Path(path)
    return GGUFTensors(path) if path.is_file() else SafetensorsSource(path)


class SafetensorsSource:
    """A checkpoint folder. ValueError if files are missing or damaged, or its quantisation is unknown."""

    def __init__(self, folder: str | Path) -> None:
        self.name = str(folder)
        self._entries: dict[str, TensorEntry] = check_checkpoint_files(folder)
        self.tensors = catalog(self._entries, read_scheme(folder))

    def open(self, names: Iterable[str]) -> Iterator[tuple[str, OpenTensor]]:
        """See `WeightSource`: file by file. Scales may lie in other files than their weights."""
        by_file: dict[Path, list[StoredTensor]] = {}
        for name in names:
            tensor = self.tensors[name]
            by_file.setdefault(self._entries[tensor.parts[0]].file, []).append(tensor)
        for tensors in by_file.values():
            with ExitStack() as stack:
                files: dict[Path, safe_open] = {}
                for tensor in tensors:
                    for file in {self._entries[part].file for part in tensor.parts} - files.keys():
                        files[file] = stack.enter_context(_opened(file))
                    yield tensor.name, self._open(tensor, files)

    def _open(self, tensor: StoredTensor, files: dict[Path, safe_open]) -> OpenTensor:
        parts = [(files[self._entries[part].file], part) for part in tensor.parts]
        path = self._entries[tensor.parts[0]].file
        with _naming(path):
            file, name = parts[0]
            values = file.get_slice(name)
            if tensor.format is None:
                return OpenTensor(_guarded(path, lambda slices, out: out.copy_(values[slices])))
            file, name = parts[1]
            scales = file.get_slice(name)
            if len(self._entries[name].shape) < 2:
                scales = file.get_tensor(name).reshape(-1, 1)
            global_scale = [file.get_tensor(name) for file, name in parts[2:]]
        quantized = BlockScaledTensor(tensor.format, tensor.shape, values, scales, *global_scale)
        return OpenTensor(
            _guarded(path, lambda slices, out: quantized.dequantize(slices[0], slices[1], out)),
            _guarded(path, lambda slices, dtype: quantized.keep(slices[0], slices[1], dtype)),
        )


def _guarded(path: Path, read: Callable[[tuple[slice, ...], Any], Any]) -> Callable[..., Any]:
    def guarded(slices: tuple[slice, ...], argument: Any) -> Any:
        with _naming(path):
            return read(slices, argument)

    return guarded


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of safetensors do not say which file they are about."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    with _naming(path):
        file = safe_open(path, framework="pt")
    with file:
        yield file


def _check(weights: dict[str, Weight], source: WeightSource, model: Loadable) -> None:
    found = source.tensors
    # A tensor without elements says nothing: transformers writes them for zero shared experts.
    unexpected = [
        name
        for name, tensor in found.items()
        if name not in weights and 0 not in tensor.shape and not model.ignorable(name)
    ]
    present = {name: weight for name, weight in weights.items() if name in found}
    unreadable = [
        f"{problem} (in {found[name].file})" for name in present if (problem := found[name].problem)
    ]
    misshapen = [
        f"{name} is {list(found[name].shape)}, needs {list(weight.shape)} (in {found[name].file})"
        for name, weight in present.items()
        if found[name].shape != weight.shape and found[name].problem is None
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for kind, names in (
            ("missing tensors", [name for name in weights if name not in found]),
            ("unexpected tensors", unexpected),
            ("tensors of another shape", misshapen),
            ("tensors that cannot be read", unreadable),
        )
        if names
    ]
    if problems:
        raise ValueError(f"{source.name} does not fit its config: {'; '.join(problems)}")
