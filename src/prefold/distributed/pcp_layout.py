"""The PCP partition: which rank computes which tokens of a step (balanced DualChunkSwap).

Every rank derives the same partition from the global batch, without communication. A row is a
range of one request's tokens on one rank: a *virtual request* whose context is all that precedes it.

A request that is split is cut in 2P chunks, and one rank takes chunks j and 2P-1-j (also called
zigzag or head-tail: under a causal mask late tokens cost more, so each rank gets an early and a
late chunk). Chunk lengths of a request differ by at most 1. `L mod P` ranks compute one token more
than the others; over the batch these extra tokens go round-robin over the ranks:

- split requests alone: token sums of any two ranks differ by at most 1;
- requests that stay whole (decode, short prefills): row counts differ by at most 1, costs
  (`row_cost`) by at most the largest row's cost. So 1-token rows alone balance to within 1 token.
  With a `decode_unit` above 1 that holds for decode rows among units and for short prefills among
  ranks, each by itself;
- both together: token sums differ by at most max(1, what the whole rows differ by), because the
  round-robin starts on the ranks where whole rows left the fewest tokens;
- causal work of split requests: no rank exceeds the mean by more than one token of average cost per
  request. For one prompt (N = 0) that is max/mean <= 1 + P/L, and equality of all ranks where
  2P divides L. It cannot be better for every L: with L/P odd each rank has one token without a
  counterpart at the other end of the prompt, and max/mean is at least 1 + (P-1)/(L+1).

Pure numpy, closed form: no Python loop over ranks or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefold.causal import IntOrArray, causal_pairs

IntArray = NDArray[np.int64]

PAIRS_PER_TOKEN = 4096
"""Causal pairs that cost as much as the rest of one token's work (see `row_cost`)."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows of all ranks, ordered by (rank, prefill before decode, request, start). No row is empty.

    A rank without rows is normal. Positions are absolute: a row covers positions
    `[row_start, row_end)` of its request, and its context is `[0, row_start)`. R requests, P ranks.
    Each token is computed by exactly one rank, or, a decode token, by all ranks of a unit on purpose.

    Attributes:
        size: P.
        decode_unit: consecutive ranks that compute the same decode rows.
        num_computed: [R] tokens of each request in the cache before this step.
        num_scheduled: [R] tokens of each request computed in this step.
        row_rank, row_request, row_start, row_end: [rows] int64.
        row_is_prefill: [rows] bool, state handed in by the caller, never derived from a length.
        row_offsets: [P + 1] rows of rank r are `row_offsets[r]:row_offsets[r + 1]`.
        rank_tokens: [P, 2] prefill and decode tokens per rank.
        causal_pairs: [P] (query, key) pairs per rank; the token at position p has p + 1.
    """

    size: int
    decode_unit: int
    num_computed: IntArray
    num_scheduled: IntArray
    row_rank: IntArray
    row_request: IntArray
    row_start: IntArray
    row_end: IntArray
    row_is_prefill: NDArray[np.bool_]
    row_offsets: IntArray
    rank_tokens: IntArray
    causal_pairs: IntArray

    @property
    def num_prefill_tokens(self) -> IntArray:
        """[P] tokens per rank."""
        return self.rank_tokens[:, 0]

    @property
    def num_decode_tokens(self) -> IntArray:
        """[P] tokens per rank."""
        return self.rank_tokens[:, 1]

    @property
    def num_tokens(self) -> IntArray:
        """[P] tokens per rank, prefill and decode."""
        return self.rank_tokens.sum(axis=1)

    @property
    def row_num_tokens(self) -> IntArray:
        """[rows] tokens per row."""
        return self.row_end - self.row_start

    @property
    def token_offsets(self) -> IntArray:
        """[P + 1] exclusive sums of `num_tokens`: where each rank begins in the rank-major order."""
        return _offsets(self.num_tokens)

    def rows_of(self, rank: int) -> slice:
        """The rows of `rank`, to slice any `row_*` array with."""
        return slice(int(self.row_offsets[rank]), int(self.row_offsets[rank + 1]))


def row_cost(
    num_tokens: IntOrArray, num_causal_pairs: IntOrArray, pairs_per_token: int = PAIRS_PER_TOKEN
) -> IntOrArray:
    """Work of a row in units of one causal pair: `num_tokens * pairs_per_token + num_causal_pairs`.

    The one cost function for placing rows: the partition uses it to choose a rank for a request that
    stays whole, and whoever predicts a step's time or its imbalance must use it too.

    Arguments are integers or integer arrays of one shape; the result is exact (int64), so that
    every rank reaches the same order.

    `pairs_per_token` is how many (query, key) pairs of all heads and layers cost as much as everything
    else that is done for a token (projections, experts): about `2 * active parameters` over
    `2 * layers * heads * (qk_head_dim + v_head_dim)` FLOPs. It is 2,000 for an MLA model of 150M
    parameters and 15,000 for one of 671B (37B active). Only ratios of costs matter, and only
    for rows that stay whole, so the default serves every model.

    >>> row_cost(1, 100_001)  # a decode token after 100,000 others
    104097
    >>> row_cost(25, causal_pairs(0, 25))  # about as much as a prefill of 25 tokens
    102725
    """
    return num_tokens * pairs_per_token + num_causal_pairs


def partition(
    num_computed: IntArray,
    num_scheduled: IntArray,
    is_prefill: NDArray[np.bool_],
    size: int,
    min_split_tokens: int = 0,
    pairs_per_token: int = PAIRS_PER_TOKEN,
    decode_unit: int = 1,
) -> Partition:
    """Partition a global batch of R requests over `size` PCP ranks. All ranks must pass equal arguments.

    Args:
        num_computed: [R] tokens already in the cache (N).
        num_scheduled: [R] tokens of this step (L), at least 1.
        is_prefill: [R] the request's class, from its state.
        size: PCP size (P).
        min_split_tokens: a prefill with fewer tokens, or with fewer than 2P, goes whole to one rank.
            Decode requests always do.
        pairs_per_token: see `row_cost`.
        decode_unit: decode requests are dealt over P / decode_unit units of consecutive ranks, and every
            rank of a unit computes its requests (each attends to its own share of the KV cache).

    At P = 1 the rows are the requests themselves. Ten tokens over four ranks; chunk lengths
    are 2, 2, 1, 1, 1, 1, 1, 1, and rank 3's chunks are neighbours and form one row:

    >>> p = partition(np.array([0]), np.array([10]), np.array([True]), size=4)
    >>> [(int(r), int(s), int(e)) for r, s, e in zip(p.row_rank, p.row_start, p.row_end)]
    [(0, 0, 2), (0, 9, 10), (1, 2, 4), (1, 8, 9), (2, 4, 5), (2, 7, 8), (3, 5, 7)]
    >>> p.num_tokens.tolist(), p.causal_pairs.tolist()
    ([3, 3, 2, 2], [13, 16, 13, 13])
    """
    num_computed, num_scheduled = (np.asarray(a, dtype=np.int64) for a in (num_computed, num_scheduled))
    is_prefill = np.asarray(is_prefill, dtype=np.bool_)
    assert num_computed.shape == num_scheduled.shape == is_prefill.shape == (num_computed.size,)
    assert size >= 1
    assert size % decode_unit == 0, (size, decode_unit)
    if num_scheduled.size and int(num_scheduled.min()) < 1:
        raise ValueError(f"num_scheduled={num_scheduled.tolist()}: every request needs at least 1 token")
    end = num_computed + num_scheduled
    if size == 1:
        rank, request = np.zeros(end.size, np.int64), np.arange(end.size)
        rows = rank, request, num_computed, end
        return _sorted_rows(size, decode_unit, num_computed, num_scheduled, is_prefill, *rows)
    is_split = is_prefill & (num_scheduled >= max(2 * size, min_split_tokens))
    is_shared = ~is_prefill & (decode_unit > 1)  # whole, on all ranks of a unit
    split, shared, whole = (a.nonzero()[0] for a in (is_split, is_shared, ~(is_split | is_shared)))
    cost = row_cost(num_scheduled, causal_pairs(num_computed, end), pairs_per_token)

    # Most steps hold one kind of rows: only that is worked out.
    rank = request = np.zeros(0, np.int64)
    if shared.size:
        unit = _deal(cost[shared], size // decode_unit)
        rank = (unit[:, None] * decode_unit + np.arange(decode_unit)).ravel()
        request = np.repeat(shared, decode_unit)
    if whole.size:
        dealt = _deal(cost[whole], size)
        if shared.size:
            dealt = _least_loaded(rank, num_scheduled[request], cost[request], size)[dealt]
        rank, request = np.concatenate([rank, dealt]), np.concatenate([request, whole])
    start, row_end = num_computed[request], end[request]
    if split.size:
        rank_order = _least_loaded(rank, num_scheduled[request], cost[request], size)
        bounds = _chunk_bounds(num_scheduled[split], size) + num_computed[split][:, None]
        rank = np.concatenate([rank, _piece_ranks(num_scheduled[split], rank_order, size).ravel()])
        request = np.concatenate([request, np.repeat(split, bounds.shape[1] - 1)])
        start = np.concatenate([start, bounds[:, :-1].ravel()])
        row_end = np.concatenate([row_end, bounds[:, 1:].ravel()])
    return _sorted_rows(
        size, decode_unit, num_computed, num_scheduled, is_prefill, rank, request, start, row_end
    )


def _least_loaded(rank: IntArray, num_tokens: IntArray, cost: IntArray, size: int) -> IntArray:
    """[P] ranks, the least loaded first. Tokens count before cost, for the bound on token sums."""
    return np.lexsort((_sum_by(rank, cost, size), _sum_by(rank, num_tokens, size)))


def _deal(cost: IntArray, size: int) -> IntArray:
    """Ranks for whole rows: costliest first, in rounds over the ranks and back (snake order).

    A round gives every rank one row, so counts differ by at most 1; the rows of two ranks in a
    round cost at least as much as any of the next round, so the differences add up to at
    most the largest cost.

    >>> _deal(np.array([9, 1, 8, 5, 4]), size=2).tolist()
    [0, 0, 1, 1, 0]
    """
    place = np.arange(cost.size) % (2 * size)
    ranks = np.empty(cost.size, dtype=np.int64)
    ranks[np.argsort(-cost, kind="stable")] = np.minimum(place, 2 * size - 1 - place)
    return ranks


def _chunk_bounds(num_tokens: IntArray, size: int) -> IntArray:
    """[S] lengths -> [S, 2P] bounds of 2P-1 pieces, relative to the first token.

    Of 2P chunks the two in the middle belong to one rank and are one piece. The `L mod 2P` longer
    chunks are first the early chunks 0, 1, 2, ..., because an extra token costs least there,
    then the late ones 2P-1, 2P-2, ...: so the ranks with one token more are those of the
    chunk pairs j < L mod P.

    >>> _chunk_bounds(np.array([10, 16, 22]), size=4).tolist()
    [[0, 2, 4, 5, 7, 8, 9, 10], [0, 2, 4, 6, 10, 12, 14, 16], [0, 3, 6, 9, 14, 16, 19, 22]]
    """
    base, longer = np.divmod(num_tokens[:, None], 2 * size)
    edge = np.arange(size)
    early = edge * base + np.minimum(edge, longer)
    late = num_tokens[:, None] - edge * base - np.minimum(edge, np.maximum(longer - size, 0))
    return np.concatenate([early, late[:, ::-1]], axis=1)


def _piece_ranks(num_tokens: IntArray, rank_order: IntArray, size: int) -> IntArray:
    """[S] lengths -> [S, 2P-1] ranks of the pieces.

    Request i has `L mod P` extra tokens: they go to the next ranks of a round-robin that runs
    through the whole batch in `rank_order`. Which of the other ranks gets which chunk pair is free:
    that rotates by i, so that causal work evens out over the batch as well.

    >>> _piece_ranks(np.array([10, 10]), np.arange(4), size=4).tolist()
    [[0, 1, 2, 3, 2, 1, 0], [2, 3, 1, 0, 1, 3, 2]]
    """
    extra = num_tokens[:, None] % size
    first = np.cumsum(extra, axis=0) - extra
    pair, turn = np.arange(size), np.arange(num_tokens.size)[:, None]
    place = np.where(pair < extra, pair, extra + (pair - extra + turn) % (size - extra))
    pair_ranks = rank_order[(first + place) % size]
    return np.concatenate([pair_ranks, pair_ranks[:, -2::-1]], axis=1)


def _sorted_rows(
    size: int,
    decode_unit: int,
    num_computed: IntArray,
    num_scheduled: IntArray,
    is_prefill: NDArray[np.bool_],
    rank: IntArray,
    request: IntArray,
    start: IntArray,
    end: IntArray,
) -> Partition:
    """Put rows into their final order and count per rank."""
    num_requests = max(num_computed.size, 1)
    group = 2 * rank + ~is_prefill[request]
    # One integer key per row; a rank has at most two rows of a request, and they arrive in order.
    key = group * num_requests + request
    # numpy sorts keys of 16 bits without comparing them.
    short = 2 * size * num_requests <= 1 << 16
    order = np.argsort(key.astype(np.uint16) if short else key, kind="stable")
    group, request, start, end = group[order], request[order], start[order], end[order]
    row_rank = group >> 1
    return Partition(
        size=size,
        decode_unit=decode_unit,
        num_computed=num_computed,
        num_scheduled=num_scheduled,
        row_rank=row_rank,
        row_request=request,
        row_start=start,
        row_end=end,
        row_is_prefill=(group & 1) == 0,
        row_offsets=row_rank.searchsorted(np.arange(size + 1)),
        rank_tokens=_sum_by(group, end - start, 2 * size).reshape(size, 2),
        causal_pairs=_sum_by(row_rank, causal_pairs(start, end), size),
    )


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Where the tokens of all ranks sit in the global batch, in which the tokens of request i begin at
    `query_start_loc[i]` [R + 1].

    >>> p = partition(np.array([0, 7]), np.array([10, 1]), np.array([True, False]), size=4)
    >>> order = TokenOrder.of(p, np.array([0, 10, 11]))
    >>> [order.of_rank(rank).tolist() for rank in range(4)]
    [[5, 6, 10], [0, 1, 9], [2, 3, 8], [4, 7]]
    >>> [order.prefill(rank).tolist() for rank in range(4)], order.decode(0).tolist()
    ([[5, 6], [0, 1, 9], [2, 3, 8], [4, 7]], [10])

    Attributes:
        indices: global indices, rank after rank, each rank's in the order of its rows.
        bounds: [2P + 1] where each rank's prefill and then its decode tokens begin.
        num_tokens: of the global batch.
    """

    indices: IntArray
    bounds: IntArray
    num_tokens: int

    @classmethod
    def of(cls, partition: Partition, query_start_loc: IntArray) -> TokenOrder:
        request = partition.row_request
        starts = partition.row_start + (query_start_loc[:-1] - partition.num_computed)[request]
        indices = _ranges(starts, partition.row_num_tokens)
        return cls(indices, _offsets(partition.rank_tokens.ravel()), int(query_start_loc[-1]))

    def of_rank(self, rank: int) -> IntArray:
        """[num_tokens[rank]] prefill tokens first, as it computes them."""
        return self.indices[self.bounds[2 * rank] : self.bounds[2 * rank + 2]]

    def prefill(self, rank: int) -> IntArray:
        """[num_prefill_tokens[rank]]"""
        return self.indices[self.bounds[2 * rank] : self.bounds[2 * rank + 1]]

    def decode(self, rank: int) -> IntArray:
        """[num_decode_tokens[rank]]"""
        return self.indices[self.bounds[2 * rank + 1] : self.bounds[2 * rank + 2]]

    def locate(self, token_indices: IntArray) -> tuple[IntArray, IntArray]:
        """The inverse: (rank, local index) of tokens of the global batch, any shape. Of a token that all
        ranks of a unit compute, the first of them.

        >>> p = partition(np.array([0, 7]), np.array([10, 1]), np.array([True, False]), size=4)
        >>> rank, local_index = TokenOrder.of(p, np.array([0, 10, 11])).locate(np.array([0, 7, 10]))
        >>> rank.tolist(), local_index.tolist()
        ([1, 3, 0], [0, 1, 2])
        """
        place = np.zeros(self.num_tokens, np.int64)
        place[self.indices[::-1]] = np.arange(self.indices.size - 1, -1, -1)  # the first one stays
        at, starts = place[token_indices], self.bounds[::2]
        rank = starts.searchsorted(at, side="right") - 1
        return rank, at - starts[rank]


def _offsets(counts: IntArray) -> IntArray:
    """[n] counts -> [n + 1] exclusive sums."""
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenation of `start, start + 1, ...` (count of them, at least one) over all (start, count).

    >>> _ranges(np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    offsets = _offsets(counts)
    if offsets[-1] == counts.size:
        return starts  # one of each: decode tokens
    return np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])


def _sum_by(group: IntArray, values: IntArray, size: int) -> IntArray:
    """[size] sums of `values` by group; exact below 2 ** 53, which no step's causal pairs reach."""
    return np.bincount(group, values, size).astype(np.int64)
