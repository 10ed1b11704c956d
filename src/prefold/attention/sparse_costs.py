"""What attention to selected keys costs, and for which queries a mask over all keys is cheaper. No torch.

The unit of cost is one multiplication of the dense kernel in float32: about 1/60 ns on a core. All is a
function of sizes, so that every run of a prompt takes the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

from prefold.attention.forms import PER_KEY_ELEMENT, PREPARE_KEYS, Count
from prefold.causal import causal_pairs, limited_pairs
from prefold.config import MLAConfig

PER_SELECTED_ELEMENT = 8
"""Fetching an element of a row that lies anywhere, and making it float32, once for all heads of a rank.
Measured: 80 ns for a row of 576 elements, and 17 ns for each head that it meets."""

PER_FETCHED_ELEMENT = 17
"""What an element takes with few heads, whose multiplications hide behind the fetching. Measured: 155 ns for
a row of 576."""


def selected_cost(mla: MLAConfig, num_heads: int, num_queries: Count, num_pairs: Count) -> Count:
    """Queries of so many heads, in absorbed form, at `num_pairs` selected rows in all."""
    fetched = mla.token_dim * PER_SELECTED_ELEMENT + num_heads * sum(mla.absorbed_dims)
    per_pair = max(mla.token_dim * PER_FETCHED_ELEMENT, fetched)
    return num_pairs * per_pair + num_queries * (num_heads * mla.projection_size)


def masked_cost(mla: MLAConfig, num_heads: int, num_keys: Count, num_pairs: Count) -> Count:
    """Queries of so many heads at `num_pairs` keys in all, of `num_keys` that are up-projected."""
    per_key = num_heads * mla.projection_size + mla.token_dim * PER_KEY_ELEMENT
    per_pair = num_heads * (mla.qk_head_dim + mla.v_head_dim)
    return (num_keys + PREPARE_KEYS) * per_key + num_pairs * per_pair


def num_masked(mla: MLAConfig, num_heads: int, runs: Iterable[tuple[int, int]]) -> int:
    """How many of a request's queries, the first ones, are attended densely with a mask: keys cost less where
    neighbours share them, but there are more of them.

    Args:
        runs: positions [start, end) of the queries, ascending.

    >>> from prefold.config import DSAConfig
    >>> dsa = DSAConfig(2048, 32, 128, full_layers=(True,), rope_interleaved=True)
    >>> mla = MLAConfig(None, 512, 192, 64, 256, dsa)
    >>> [num_masked(mla, 8, runs) for runs in ([(2048, 6144)], [(2048, 16384)], [(6144, 8192)])]
    [4096, 4608, 0]
    """
    assert mla.dsa is not None
    topk = mla.dsa.index_topk
    per_pair = num_heads * (mla.qk_head_dim + mla.v_head_dim)
    level = selected_cost(mla, num_heads, 0, topk) // per_pair  # keys beyond which a mask costs more
    count = pairs = selected = 0
    best, most = 0, 0
    for start, end in runs:
        end = min(end, level)
        if start >= end:
            break
        count += end - start
        pairs += causal_pairs(start, end)
        selected += limited_pairs(start, end, topk)
        saved = selected_cost(mla, num_heads, count, selected) - masked_cost(mla, num_heads, end, pairs)
        if saved > most:
            best, most = count, saved
    return best
