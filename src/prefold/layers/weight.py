"""How a module says which checkpoint tensors it wants, and which part of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from prefold.layers.bands import Bands


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint and where its parts go.

    Attributes:
        name: the checkpoint's name of it.
        shape: its whole shape there; the loader refuses another.
        parts: pairs of (slices into the checkpoint's tensor, destination). A destination is a view
            of a parameter and has the slice's shape; values are converted to its dtype.
        bands, band: where the only part can go in quantised form instead, see `Bands`.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[slice, ...], torch.Tensor], ...]
    bands: Bands | None = None
    band: int = 0


def whole(name: str, dest: torch.Tensor, bands: Bands | None = None, band: int = 0) -> Weight:
    """A tensor that every rank holds whole."""
    slices = tuple(slice(0, n) for n in dest.shape)
    return Weight(name, tuple(dest.shape), ((slices, dest),), bands, band)


def shard(
    name: str,
    dest: torch.Tensor,
    dim: int,
    rank: int,
    size: int,
    bands: Bands | None = None,
    band: int = 0,
) -> Weight:
    """A tensor cut in `size` equal parts along `dim`; `dest` takes part `rank`."""
    length = dest.shape[dim]
    slices = tuple(
        slice(rank * length, (rank + 1) * length) if d == dim else slice(0, n)
        for d, n in enumerate(dest.shape)
    )
    shape = tuple(n * size if d == dim else n for d, n in enumerate(dest.shape))
    return Weight(name, shape, ((slices, dest),), bands, band)


def parameter(*shape: int, dtype: torch.dtype, device: str | torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
