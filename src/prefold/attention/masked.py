"""Attention to selected keys, densely with a mask: for queries that have selected much of what they see.

Neighbouring queries share keys then, which are up-projected once for all, as without sparse attention, and
what a query has not selected is masked. For which queries that is cheaper, `sparse_costs` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefold.attention.backend import AttentionBackend, IndexQueries, Queries
from prefold.attention.selection import KeySelector
from prefold.attention.sparse_layer import RequestKeys, SparseLayer
from prefold.attention.walk import Run
from prefold.kernels.dense import WORD_KEYS


@dataclass(frozen=True, eq=False)
class MaskedQueries:
    """A request's queries that are attended with a mask, and what they have selected in the last layer with
    an indexer.

    Attributes:
        runs: the queries, consecutive in the local batch.
        selected: [queries, words] int64: bit j % 64 of word j // 64 tells whether a query has selected key j.
    """

    runs: tuple[Run, ...]
    selected: torch.Tensor

    @staticmethod
    def shape(runs: Sequence[Run]) -> tuple[int, int]:
        """Of `selected`."""
        return sum(run.end - run.start for run in runs), -(-runs[-1].end // WORD_KEYS)


class MaskedAttention:
    """One per rank, for all steps.

    Args:
        tile_tokens: keys that are read and projected at a time, rounded down to whole words of masks, but at
            least one.
        scale: of scores.
    """

    def __init__(
        self, selector: KeySelector, backend: AttentionBackend, tile_tokens: int, scale: float
    ) -> None:
        self._selector, self._backend, self._scale = selector, backend, scale
        self._tile_tokens = max(tile_tokens // WORD_KEYS, 1) * WORD_KEYS

    def attend(self, layer: SparseLayer, queries: MaskedQueries, keys: RequestKeys) -> None:
        """Select, if the layer has an indexer, and write the results to `layer.out`. All tokens are held:
        they are numbered by position."""
        if layer.index is not None:
            self._select(layer.index, queries, keys)
        runs, form, selected = queries.runs, layer.forms.plain, queries.selected
        num_queries, end = len(selected), runs[-1].end
        tokens = slice(runs[0].offset, runs[0].offset + num_queries)
        own = Queries(layer.q[tokens], form.num_kv_heads, form.out_dim)
        (state,) = self._backend.start([own], self._scale, "masked")
        positions = np.concatenate([np.arange(run.start, run.end) for run in runs])
        for start in range(0, end, self._tile_tokens):
            k, v = form.keys_values(keys.latents(start, min(start + self._tile_tokens, end)))
            first = int(np.searchsorted(positions, start))  # those before see none of these keys
            words = selected[first:, start // WORD_KEYS :]
            self._backend.attend_(state, slice(first, num_queries), k, v, causal=False, selected=words)
        self._backend.finish(state, layer.out[tokens])

    def _select(self, index: IndexQueries, queries: MaskedQueries, keys: RequestKeys) -> None:
        rest = queries.selected
        for run in queries.runs:
            count = run.end - run.start
            own = index.of_tokens(slice(run.offset, run.offset + count))
            limits = torch.arange(run.start + 1, run.end + 1)
            self._selector.select_bits(own, limits, keys.index_keys, rest[:count])
            rest = rest[count:]
