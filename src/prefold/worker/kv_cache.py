"""The paged cache of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefold.attention.row_format import RowFormat
from prefold.workspace import NAN_BYTE


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    formats: Sequence[RowFormat],
    device: torch.device,
    poison: bool,
) -> torch.Tensor:
    """[num_layers, num_blocks, block_size, width of a row]: a token's `kv_c | k_pe`, with sparse
    attention `| index key`, or `keys | values`, in their formats.

    Not initialised: whatever attention reads was written before, which `poison` (NaN everywhere)
    makes visible if it ever fails to hold.
    """
    width = sum(one.width for one in formats)
    shape = (num_layers, num_blocks, block_size, width)
    cache = torch.empty(shape, dtype=formats[0].dtype, device=device)
    if poison:
        cache.fill_(float("nan") if cache.is_floating_point() else NAN_BYTE)
    return cache
