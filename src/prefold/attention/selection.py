"""Which keys a query attends to under sparse attention: those that the indexer scores highest.

A score and its key's position are one int64 number, so that a plain top-k has one possible answer: of
equal scores, which relu makes common, the one with the lowest position wins. This is the rule on every
layout, whatever the tiles in which keys come. The native kernel has the same rule, and makes a score of the
same bits in any tile; torch's products may differ in the last bit where tiles do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from prefold.attention.backend import IndexQueries
from prefold.attention.walk import Latents, Run
from prefold.kernels import indexer
from prefold.workspace import Workspace

QUERY_BLOCK = 128
"""Queries that share the reading of a tile of keys, and whose candidates are kept at a time."""

SCORE_ELEMENTS = 512 * 1024
"""Scores per head that are computed together: 2 MiB, about a core's second-level cache."""

LAST_POSITION = 0xFFFFFFFF


def ranked(scores: torch.Tensor, first_position: int) -> torch.Tensor:
    """Scores float32 [n, keys] of keys from `first_position` on -> int64 of the same shape, all different in
    a row, whose order is that of (score, -position). The scores are lost.

    >>> scores = torch.tensor([[0.5, -1.0, 0.5, -0.0, 0.0]])
    >>> order = ranked(scores, first_position=7).argsort(descending=True)
    >>> order.tolist(), positions_of(ranked(scores, 7)).tolist()
    ([[0, 2, 3, 4, 1]], [[7, 8, 9, 10, 11]])
    """
    scores.add_(0.0)  # -0.0 becomes 0.0
    bits = scores.view(torch.int32).to(torch.int64)
    # The bits of negative floats grow as the float falls.
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = LAST_POSITION - first_position
    return (bits << 32).add_(torch.arange(last, last - scores.shape[1], -1, device=scores.device))


def positions_of(ranks: torch.Tensor) -> torch.Tensor:
    """The keys' positions, from what `ranked` returns."""
    return LAST_POSITION - (ranks & LAST_POSITION)


class KeySelector:
    """Selects keys for the queries of a rank.

    Args:
        topk: keys per query.
        tile_tokens: keys that are read at a time; never fewer than topk, since candidates are compared
            with each tile.
    """

    def __init__(self, topk: int, tile_tokens: int, workspace: Workspace) -> None:
        self._topk = topk
        self._tile_tokens = max(tile_tokens, topk)
        self._workspace = workspace

    def select(self, index: IndexQueries, run: Run, index_keys: Latents, out: torch.Tensor) -> None:
        """Write the positions of the `topk` best of each query's keys [0, own position].

        Args:
            run: the queries, at positions from `topk` on: each has more keys than it may attend to.
            index_keys: [end - start, index_head_dim] of a request's keys [start, end).
            out: [tokens of the run, topk] int32, in no order.
        """
        assert run.start >= self._topk
        for start in range(run.start, run.end, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, run.end)
            tokens = slice(run.offset + start - run.start, run.offset + end - run.start)
            block = IndexQueries(index.q[tokens], index.weights[tokens])
            if indexer.can_select(block.q, index_keys(0, 1).dtype):
                self._select_natively(block, start, end, index_keys, out[start - run.start : end - run.start])
                continue
            best = torch.empty((end - start, 0), dtype=torch.int64, device=out.device)
            for first in range(0, end, self._tile_tokens):
                last = min(first + self._tile_tokens, end)
                scores = self._scores(block, index_keys(first, last))
                if last > start + 1:
                    self._hide_future(scores, first, start)
                candidates = torch.cat((best, ranked(scores, first)), dim=1)
                best = candidates.topk(min(self._topk, candidates.shape[1]), dim=1, sorted=False).values
            out[start - run.start : end - run.start].copy_(positions_of(best))

    def _select_natively(
        self, index: IndexQueries, start: int, end: int, index_keys: Latents, out: torch.Tensor
    ) -> None:
        """The same for the queries at positions [start, end)."""
        limits = torch.arange(start + 1, end + 1)
        shape = (2, end - start, indexer.capacity(self._topk))
        candidates = self._workspace.get("selection.candidates", shape, torch.int32)
        best = indexer.TopKeys(index.q, index.weights, limits, self._topk, candidates)
        for first in range(0, end, self._tile_tokens):
            best.add(index_keys(first, min(first + self._tile_tokens, end)), first)
        _, positions = best.finish()
        out.copy_(positions)

    def _scores(self, index: IndexQueries, keys: torch.Tensor) -> torch.Tensor:
        """[queries, keys] float32, in a buffer."""
        workspace, (num_queries, num_heads, dim) = self._workspace, index.q.shape
        num_keys = len(keys)
        scores = workspace.get("selection.scores", (num_queries, num_keys), torch.float32)
        k = workspace.get("selection.keys", keys.shape, torch.float32).copy_(keys)
        q = workspace.get("selection.q", index.q.shape, torch.float32).copy_(index.q)
        for rows in _blocks(num_queries, SCORE_ELEMENTS // (num_heads * num_keys)):
            count = rows.stop - rows.start
            by_head = workspace.get("selection.by_head", (count, num_heads, num_keys), torch.float32)
            torch.mm(q[rows].view(-1, dim), k.t(), out=by_head.view(-1, num_keys))
            weights = index.weights[rows].unsqueeze(1)
            torch.bmm(weights, by_head.relu_(), out=scores[rows].unsqueeze(1))
        return scores

    @staticmethod
    def _hide_future(scores: torch.Tensor, first_key: int, first_query: int) -> None:
        """-inf for keys after their query; rows and columns are consecutive positions. Never selected: a
        query has enough others."""
        num_queries, num_keys = scores.shape
        device = scores.device
        keys = torch.arange(first_key, first_key + num_keys, device=device)
        queries = torch.arange(first_query, first_query + num_queries, device=device)
        scores.masked_fill_(keys > queries[:, None], float("-inf"))


def _blocks(count: int, size: int) -> Iterator[slice]:
    """
    >>> list(_blocks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(size, 1)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
