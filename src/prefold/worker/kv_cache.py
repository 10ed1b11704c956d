"""The paged cache of a rank."""

from __future__ import annotations

import torch


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    token_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    poison: bool,
) -> torch.Tensor:
    """[num_layers, num_blocks, block_size, token_dim]: a token's `kv_c | k_pe`, with sparse
    attention `| index key`, or `keys | values`.

    Not initialised: whatever attention reads was written before, which `poison` (NaN everywhere)
    makes visible if it ever fails to hold.
    """
    cache = torch.empty((num_layers, num_blocks, block_size, token_dim), dtype=dtype, device=device)
    if poison:
        cache.fill_(float("nan"))
    return cache
