"""Which keys a query attends to under sparse attention: those that the indexer scores highest.

A score and its key's position are one int64 number, so that a plain top-k has one possible answer: of
equal scores, which relu makes common, the one with the lowest position wins. This is the rule on every
layout, whatever the tiles in which keys come, and whoever holds them: the best of each rank's keys, put
together, hold the best of all. The native kernel has the same rule, and makes a score of the same bits in any
tile; torch's products may differ in the last bit where tiles do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from prefold.attention.backend import IndexQueries
from prefold.attention.walk import Latents
from prefold.distributed.group import Group
from prefold.kernels import dense, indexer
from prefold.kv_ownership import KVOwnership
from prefold.limits import QUERY_BLOCK
from prefold.workspace import Workspace

SCORE_ELEMENTS = 512 * 1024
"""Scores per head that are computed together: 2 MiB, about a core's second-level cache."""

LAST_POSITION = 0xFFFFFFFF

NO_KEY = -(1 << 63)
"""Ranks below every key."""

FIRST_VISIBLE = (int(np.float32(-np.inf).view(np.int32)) ^ 0x7FFFFFFF) + 1 << 32
"""Ranks of keys with a score above -inf start here."""


class HeldTokens(Protocol):
    """Which tokens of a request are within reach, numbered from 0 by position, and where."""

    def counts(self, ends: torch.Tensor) -> torch.Tensor:
        """How many of the positions [0, end) are held, for each of `ends` [n] int64: [n] int64."""
        ...

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Positions of held tokens, any shape, int64; they ascend with the tokens' numbers."""
        ...

    def slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Rows in which tokens lie, -1 for what is not held and for position -1; any shape, int64.

        Args:
            block_ids: [>= number of blocks] int64, of the request.
        """
        ...

    def table(self, count: int, block_ids: torch.Tensor) -> torch.Tensor:
        """[1 + count] int32: -1, and the rows in which the first `count` held tokens lie."""
        ...


class PagedTokens:
    """See HeldTokens: of a sequence whose blocks are spread by `ownership`, those that `rank` holds.

    >>> held = PagedTokens(KVOwnership(block_size=4, dcp_size=2, interleave=2), 1, torch.device("cpu"))
    >>> held.counts(torch.tensor([2, 7])).tolist(), held.positions(torch.arange(1, 6)).tolist()
    ([0, 3], [3, 6, 7, 10, 11])
    >>> held.table(6, block_ids=torch.tensor([3, 7])).tolist()
    [-1, 12, 13, 14, 15, 28, 29]
    >>> held.slots(torch.tensor([3, 4, 10, -1]), block_ids=torch.tensor([3, 7])).tolist()
    [13, -1, 28, -1]
    """

    def __init__(self, ownership: KVOwnership, rank: int, device: torch.device) -> None:
        self._ownership, self._rank = ownership, rank
        size = ownership.virtual_block_size
        offsets = ownership.slots(np.arange(size), np.zeros(size, np.int64), rank)
        self._offsets = torch.from_numpy(offsets).to(device)
        self._places = torch.from_numpy(np.flatnonzero(offsets >= 0)).to(device)

    def counts(self, ends: torch.Tensor) -> torch.Tensor:
        counts = self._ownership.local_lengths(ends.cpu().numpy())[:, self._rank]
        return torch.from_numpy(np.ascontiguousarray(counts)).to(ends.device)

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        block_size = self._ownership.block_size
        return tokens // block_size * self._ownership.virtual_block_size + self._places[tokens % block_size]

    def slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        size = self._ownership.virtual_block_size
        known = positions.clamp(min=0).long()
        offsets = self._offsets[known % size].masked_fill_(positions < 0, -1)
        slots = block_ids[known // size].mul_(self._ownership.block_size).add_(offsets)
        return slots.masked_fill_(offsets < 0, -1)

    def table(self, count: int, block_ids: torch.Tensor) -> torch.Tensor:
        size = self._ownership.block_size
        first = block_ids[: -(-count // size)].to(torch.int32) * size
        slots = first[:, None] + torch.arange(size, dtype=torch.int32, device=first.device)
        return F.pad(slots.flatten()[:count], (1, 0), value=-1)


class AllTokens:
    """See HeldTokens: all of them, in rows that are numbered by position."""

    def counts(self, ends: torch.Tensor) -> torch.Tensor:
        return ends

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return positions.long()

    def table(self, count: int, block_ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(-1, count, dtype=torch.int32, device=block_ids.device)


def ranked(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scores float32 [n, keys] of keys at `positions` [keys] int64 -> int64 of the same shape, all different
    in a row, whose order is that of (score, -position). The scores are lost.

    >>> scores, positions = torch.tensor([[0.5, -1.0, 0.5, -0.0, 0.0, -torch.inf]]), torch.arange(7, 13)
    >>> order = ranked(scores.clone(), positions).argsort(descending=True)
    >>> order.tolist(), positions_of(ranked(scores, positions)).tolist()
    ([[0, 2, 3, 4, 1, 5]], [[7, 8, 9, 10, 11, -1]])
    """
    scores.add_(0.0)  # -0.0 becomes 0.0
    bits = scores.view(torch.int32).to(torch.int64)
    # The bits of negative floats grow as the float falls.
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return numbered(bits, positions)


def numbered(orders: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What `ranked` returns: `orders` int64 compare as the scores do."""
    return (orders << 32).add_(LAST_POSITION - positions)


def positions_of(ranks: torch.Tensor) -> torch.Tensor:
    """The keys' positions, from what `ranked` returns; -1 for a score of -inf and for NO_KEY."""
    return (LAST_POSITION - (ranks & LAST_POSITION)).masked_fill_(ranks < FIRST_VISIBLE, -1)


def join_ranked(group: Group, ranks: torch.Tensor, topk: int) -> torch.Tensor:
    """The best `topk` of all ranks' keys [n, width] int64, the same on all of them: [n, <= topk]."""
    gather = group.start_all_gather(ranks)
    every = torch.cat(gather.wait(), dim=1)
    gather.release()
    return every.topk(min(topk, every.shape[1]), dim=1, sorted=False).values


class KeySelector:
    """Selects keys for the queries of a rank.

    Args:
        topk: most keys per query.
        tile_tokens: keys that are read at a time; never fewer than topk, since candidates are compared
            with each tile.
    """

    def __init__(self, topk: int, tile_tokens: int, workspace: Workspace) -> None:
        self._topk, self._tile_tokens = topk, max(tile_tokens, topk)
        self._workspace = workspace

    def select(
        self,
        index: IndexQueries,
        positions: torch.Tensor,
        index_keys: Latents,
        held: HeldTokens,
        out: torch.Tensor,
    ) -> None:
        """Write the best of the held keys at [0, own position], for each query of one request.

        Args:
            positions: [n] int64, of the queries.
            index_keys: [end - start, index_head_dim] of the held keys [start, end).
            out: [n, width] int64, width <= topk: the `width` best as `ranked` numbers them, in no order. If a
                query sees fewer, the others are such that `positions_of` is -1.
        """
        for rows, orders, tokens in self._best(index, held.counts(positions + 1), index_keys, out.shape[1]):
            best = numbered(orders.long(), held.positions(tokens.clamp(min=0).long()))
            out[rows, : tokens.shape[1]] = best.masked_fill_(tokens < 0, NO_KEY)
            out[rows, tokens.shape[1] :] = NO_KEY

    def select_slots(
        self,
        index: IndexQueries,
        limits: torch.Tensor,
        index_keys: Latents,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """The same for queries all of whose keys are held: where the keys lie. That is quicker.

        Args:
            limits: [n] int64, keys that each query sees.
            table: see `HeldTokens.table`.
            out: [n, topk] int32; -1 where a query sees fewer.
        """
        for rows, _, tokens in self._best(index, limits, index_keys, out.shape[1]):
            found = torch.index_select(table, 0, (tokens + 1).flatten())
            out[rows, : tokens.shape[1]] = found.view(tokens.shape)
            out[rows, tokens.shape[1] :] = -1

    def select_bits(
        self, index: IndexQueries, limits: torch.Tensor, index_keys: Latents, out: torch.Tensor
    ) -> None:
        """The same as bits: see `kernels.dense.select_`.

        Args:
            out: [n, words] int64: bit j % 64 of word j // 64 for held token j.
        """
        for rows, _, tokens in self._best(index, limits, index_keys, self._topk):
            dense.select_(tokens, 0, out[rows])

    def _best(
        self, index: IndexQueries, limits: torch.Tensor, index_keys: Latents, width: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Some queries at a time, and what `_find` returns for them; valid until the next."""
        for rows in _blocks(len(limits), QUERY_BLOCK):
            block = self._in_float32(index, rows)
            is_native = indexer.can_select(block.q, index_keys(0, 1).dtype)
            find = self._find_natively if is_native else self._find
            yield rows, *find(block, limits[rows], index_keys, width)

    def _in_float32(self, index: IndexQueries, rows: slice) -> IndexQueries:
        """Some of the queries. Scores are float32 whatever the queries are computed in."""
        q = index.q[rows]
        if q.dtype != torch.float32:
            q = self._workspace.get("selection.q", q.shape, torch.float32).copy_(q)
        return IndexQueries(q, index.weights[rows])

    def _find(
        self, index: IndexQueries, limits: torch.Tensor, index_keys: Latents, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(orders, held tokens) [n, <= width] integers of the best among each query's first limits[i] keys;
        the token is -1 where there are fewer."""
        num_keys = int(limits.max())
        best = torch.empty((len(limits), 0), dtype=torch.int64, device=limits.device)
        for first in range(0, num_keys, self._tile_tokens):
            tokens = torch.arange(first, min(first + self._tile_tokens, num_keys), device=limits.device)
            scores = self._scores(index, index_keys(first, first + len(tokens)))
            scores.masked_fill_(tokens >= limits[:, None], -torch.inf)
            candidates = torch.cat((best, ranked(scores, tokens)), dim=1)
            best = candidates.topk(min(width, candidates.shape[1]), dim=1, sorted=False).values
        return best >> 32, positions_of(best)

    def _find_natively(
        self, index: IndexQueries, limits: torch.Tensor, index_keys: Latents, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_find`."""
        num_keys = int(limits.max())
        shape = (2, len(limits), indexer.capacity(width))
        candidates = self._workspace.get("selection.candidates", shape, torch.int32)
        best = indexer.TopKeys(index.q, index.weights, limits, width, candidates)
        for first in range(0, num_keys, self._tile_tokens):
            best.add(index_keys(first, min(first + self._tile_tokens, num_keys)), first)
        return best.finish()

    def _scores(self, index: IndexQueries, keys: torch.Tensor) -> torch.Tensor:
        """[queries, keys] float32, in a buffer."""
        workspace, (num_queries, num_heads, dim) = self._workspace, index.q.shape
        num_keys = len(keys)
        scores = workspace.get("selection.scores", (num_queries, num_keys), torch.float32)
        k = workspace.get("selection.keys", keys.shape, torch.float32).copy_(keys)
        for rows in _blocks(num_queries, SCORE_ELEMENTS // (num_heads * num_keys)):
            count = rows.stop - rows.start
            by_head = workspace.get("selection.by_head", (count, num_heads, num_keys), torch.float32)
            torch.mm(index.q[rows].reshape(-1, dim), k.t(), out=by_head.view(-1, num_keys))
            weights = index.weights[rows].unsqueeze(1)
            torch.bmm(weights, by_head.relu_(), out=scores[rows].unsqueeze(1))
        return scores


def _blocks(count: int, size: int) -> Iterator[slice]:
    """
    >>> list(_blocks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(size, 1)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
