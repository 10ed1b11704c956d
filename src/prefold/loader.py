"""Weights from safetensors into a model, one tensor at a time, only this rank's part of each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open

from prefold.checkpoint_files import TensorEntry, check_checkpoint_files
from prefold.layers.weight import Weight

SHOWN = 5
"""Tensors that an error names; the rest are counted."""

STORED_DTYPES = ("F32", "BF16", "F16")
"""What a checkpoint's tensors may be stored as; values are converted to the parameter's dtype."""


class Loadable(Protocol):
    """A model that can say what it needs of a checkpoint and what it leaves aside."""

    def weights(self, names: Container[str]) -> Iterable[Weight]: ...

    def ignorable(self, name: str) -> bool: ...


def load_weights(
    model: Loadable, folder: str | Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Fill `model`'s parameters from the checkpoint in `folder`.

    Strict: raises ValueError naming tensors that are missing, unexpected, of another shape or of a
    dtype that is no plain float, before the first is read. `progress(done, total)` counts tensors.

    A tensor that a model names without a part for itself is checked and not read.
    """
    entries = check_checkpoint_files(folder)
    weights = {weight.name: weight for weight in model.weights(entries.keys())}
    _check(weights, entries, model, Path(folder))
    by_file: dict[Path, list[Weight]] = {}
    needed = [weight for weight in weights.values() if weight.parts]
    for weight in needed:
        by_file.setdefault(entries[weight.name].file, []).append(weight)
    done = 0
    for file, file_weights in by_file.items():
        try:
            with safe_open(file, framework="pt") as tensors:
                for weight in file_weights:
                    _copy(weight, tensors)
                    done += 1
                    if progress is not None:
                        progress(done, len(needed))
        except SafetensorError as error:
            raise ValueError(f"{file} is corrupt: {error}") from None


def _copy(weight: Weight, tensors: safe_open) -> None:
    source = tensors.get_slice(weight.name)
    for slices, destination in weight.parts:
        if destination.numel():
            destination.copy_(source[slices])


def _check(
    weights: dict[str, Weight], entries: dict[str, TensorEntry], model: Loadable, folder: Path
) -> None:
    missing = [name for name in weights if name not in entries]
    # A tensor without elements says nothing: transformers writes them for zero shared experts.
    unexpected = [
        name
        for name, entry in entries.items()
        if name not in weights and 0 not in entry.shape and not model.ignorable(name)
    ]
    misshapen = [
        f"{name} is {list(entries[name].shape)}, needs {list(weight.shape)}"
        for name, weight in weights.items()
        if name in entries and entries[name].shape != weight.shape
    ]
    foreign = [
        f"{name} is {entries[name].dtype}"
        for name in weights
        if name in entries and entries[name].dtype not in STORED_DTYPES
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for kind, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors of another shape", misshapen),
            (f"tensors stored as none of {', '.join(STORED_DTYPES)}", foreign),
        )
        if names
    ]
    if problems:
        raise ValueError(f"{folder} does not fit its config.json: {'; '.join(problems)}")
