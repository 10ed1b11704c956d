"""How rows of the cache are stored: encoded once, before they travel and are written, and decoded wherever
keys are read. Caches, gathers and copies move stored rows and do not care what they are.

All ranks and all readers see decoded rows, a rank's own new tokens included, so that it makes no difference
who computed a token and who attends to it.

A row has one part, or two with sparse attention: `kv_c | k_pe` and the index key. Each part is stored by
itself, because they are read apart.
"""

from __future__ import annotations

from typing import Protocol

import torch

from prefold.config import GQAConfig, MLAConfig
from prefold.kv_spec import row_parts


class RowFormat(Protocol):
    """How one part of a row is stored.

    Attributes:
        dim: elements of the part.
        width: elements of `dtype` that it is stored in.
        dtype: of what is stored.
        is_plain: what is stored are the elements themselves: they may be read without `decode`.
    """

    dim: int
    width: int
    dtype: torch.dtype
    is_plain: bool

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """rows [n, dim], any float dtype -> out [n, width] of `dtype`; both may be parts of longer rows."""
        ...

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """stored [n, width] -> rows [n, dim] in a float dtype; valid until the next call."""
        ...


class PlainFormat:
    """See RowFormat. Elements as they are, in the cache's dtype."""

    is_plain = True

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self.dim = self.width = dim
        self.dtype = dtype

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See RowFormat.encode."""
        out.copy_(rows)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return stored


def row_formats(attention: MLAConfig | GQAConfig, tp: int, cache_dtype: str) -> tuple[RowFormat, ...]:
    """Formats of the parts of a row on one of `tp` ranks, in their order."""
    dtype = getattr(torch, cache_dtype)
    return tuple(PlainFormat(part.dim, dtype) for part in row_parts(attention, tp))
