"""Where weights come from: named tensors, each stored plain or quantised, in whatever kind of file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from prefold.kernels.quantized import QuantizedMatrix
from prefold.quantization.catalog import StoredTensor

Read = Callable[[tuple[slice, ...], torch.Tensor], None]
"""read(slices, out): that part of a tensor into `out`, converted to its dtype."""

Keep = Callable[[tuple[slice, ...], torch.dtype], QuantizedMatrix | None]
"""keep(slices, dtype): that part as it is stored, with values of `dtype`; None where it must be read."""


@dataclass(frozen=True)
class OpenTensor:
    """A tensor that can be read now.

    Attributes:
        read: any part of it as floats.
        keep: any part of it in quantised form; None if it is stored plain.
    """

    read: Read
    keep: Keep | None = None


class WeightSource(Protocol):
    """A checkpoint. Tensors have the names of Hugging Face checkpoints, whatever the file's."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def open(self, names: Iterable[str]) -> Iterator[tuple[str, OpenTensor]]:
        """Each of `names` in the order in which they are best read, readable until the next is asked for."""
        ...
