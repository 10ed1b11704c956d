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
from prefold.kernels import fp8, fused
from prefold.kv_spec import FP8, RowPart, row_parts
from prefold.workspace import Workspace


class RowFormat(Protocol):
    """How one part of a row is stored.

    Attributes:
        dim: elements of the part.
        width: elements of `dtype` that it is stored in.
        dtype: of what is stored.
        fp8_rows: how elements are stored in FP8; None if what is stored are the elements themselves.
    """

    dim: int
    width: int
    dtype: torch.dtype

    @property
    def fp8_rows(self) -> fp8.FP8Rows | None: ...

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """rows [n, dim], any float dtype -> out [n, width] of `dtype`; both may be parts of longer rows."""
        ...

    def store(self, rows: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> None:
        """Encode the `chosen` ones of rows [n, dim] into the rows `slots` of out [num_slots, width]; both
        int64, no slot twice."""
        ...

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """stored [n, width] -> rows [n, dim] in a float dtype; valid until the next call."""
        ...


class PlainFormat:
    """See RowFormat. Elements as they are, in the cache's dtype."""

    fp8_rows = None

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self.dim = self.width = dim
        self.dtype = dtype

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See RowFormat.encode."""
        out.copy_(rows)

    def store(self, rows: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> None:
        """See RowFormat.store."""
        fused.put_rows(rows, out, chosen, slots)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return stored


class FP8Format:
    """See RowFormat. Bytes, as kernels.fp8 describes them; decoded rows are bfloat16, exactly."""

    dtype = torch.uint8

    def __init__(self, part: RowPart, workspace: Workspace) -> None:
        self.fp8_rows = fp8.FP8Rows(part.num_heads, part.head_dim, part.rotary_dim)
        self.dim, self.width = part.dim, part.num_bytes(FP8)
        self._workspace = workspace

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See RowFormat.encode."""
        if fp8.can_serve(rows):
            if rows.dtype != torch.float32:
                wide = self._workspace.get(f"row_format.wide.{self.dim}", rows.shape, torch.float32)
                rows = fused.convert(rows, wide)
            fp8.encode(self.fp8_rows, rows, out)
        else:
            fp8.encode_with_torch(self.fp8_rows, rows, out)

    def store(self, rows: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> None:
        """See RowFormat.store."""
        stored = self._workspace.get(f"row_format.stored.{self.dim}", (len(rows), self.width), self.dtype)
        self.encode(rows, stored)
        # Bytes are copied by fours: rows and their parts are multiples of 16 bytes.
        fused.put_rows(stored.view(torch.float32), out.view(torch.float32), chosen, slots)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """See RowFormat.decode."""
        shape = (len(stored), self.dim)
        rows = self._workspace.get(f"row_format.{self.dim}", shape, torch.bfloat16)
        decode = fp8.decode if fp8.can_serve(stored) else fp8.decode_with_torch
        decode(self.fp8_rows, stored, rows)
        return rows


def row_formats(
    attention: MLAConfig | GQAConfig, tp: int, cache_dtype: str, workspace: Workspace
) -> tuple[RowFormat, ...]:
    """Formats of the parts of a row on one of `tp` ranks, in their order."""
    parts = row_parts(attention, tp)
    if cache_dtype == FP8:
        return tuple(FP8Format(part, workspace) for part in parts)
    return tuple(PlainFormat(part.dim, getattr(torch, cache_dtype)) for part in parts)
