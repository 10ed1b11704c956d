"""How queries reach the cached context [0, N) of their request: one cost function, four ways.

All of the context is visible to all of a request's new queries, so it may be attended in any order, in
parts, by anybody who has keys and queries together. What has to travel for that is a choice:

- `local`: nothing. The cache is replicated, and a rank's own queries attend to all of it.
- `sliced`: queries. The cache is replicated; each PCP rank attends all queries to 1/P of it.
- `query`: queries. The cache is sharded; each DCP rank attends all queries to its shard.
- `kv`: keys. The cache is sharded; the shards are gathered and a rank's own queries attend to all.

The first two are possible with D = 1, the others with D > 1. Under sparse attention `sliced` is not possible;
with `query` the ranks also share the work of finding the keys of a query (attention.sparse_shards).

Where queries travel, each key is read and up-projected once per group and not once per rank, and a request
that is whole on one rank occupies them all; the price is moving queries and results. The choice is made per
request and step, from the partition alone, so it is equal on all ranks.

The unit of cost is one multiplication of the attention kernel in float32: about 1/50 ns on a core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefold.attention.forms import PER_KEY_ELEMENT, form_costs
from prefold.attention.sparse_costs import masked_cost, selected_cost
from prefold.config import DTYPES, DSAConfig, EngineConfig, GQAConfig, MLAConfig
from prefold.kv_spec import row_bytes
from prefold.limits import MOST_QUERIES, QUERY_BLOCK, TRAVEL_TOKENS, VISIT_TOKENS, shared_rows

LOCAL, SLICED, QUERY, KV = WAYS = ("local", "sliced", "query", "kv")

AUTO = "auto"

PER_STORED_ELEMENT = 14
"""Reading it for few queries, which take rows as they are stored (attention.paged): 75 % of memory's rate."""

PER_QUERY_BYTE = 80
"""A byte of a query or result on its way: packed, read from shared memory, put in order, scaled, merged.
Measured: 1.2 us for a head of a query (192 elements there, 129 back)."""

PER_GATHERED_BYTE = 20
"""A byte of a key on its way: packed, read from shared memory, put in order, while the tile before it
is attended."""

PER_COLLECTIVE = 10_000_000
"""A collective in shared memory with busy ranks, and the small operations around it: 0.2 ms."""

PER_TRIP = 90_000_000
"""Queries there and results back: two collectives whose ranks wait for each other, and some twenty small
operations. Measured: 1.9 ms per layer for one token, whatever the context."""

PER_CANDIDATE = 1000
"""One of the candidates of all ranks for a query: gathered, compared, made a position. Measured: 20 ns."""

RESULT_BYTES = 4
"""Results travel in float32."""


@dataclass(frozen=True)
class ContextWays:
    """What the choice depends on besides the step; equal on all ranks.

    Attributes:
        num_heads, token_dim, row_bytes: of one rank: query heads, and elements and bytes of a token's row in
            the cache.
        pcp_size, dcp_size: P and D.
        tile_tokens: keys that are read (or gathered) at a time.
        q_itemsize: bytes per element of queries.
        forced: "auto", or a way that is taken wherever it is possible.
        has_windows: queries of some layers see a window only: they attend in place.
        shared_from: new tokens of a request on other ranks from which ranks share their up-projected keys and
            values (attention.projected); infinite: never.
        shared_rows: that a rank projects at a time, then.
    """

    attention: MLAConfig | GQAConfig
    num_heads: int
    token_dim: int
    row_bytes: int
    pcp_size: int
    dcp_size: int
    tile_tokens: int
    q_itemsize: int
    forced: str = AUTO
    has_windows: bool = False
    shared_from: float = math.inf
    shared_rows: int = 1

    def __post_init__(self) -> None:
        if self.forced not in (AUTO, *WAYS):
            raise ValueError(f"context_attention={self.forced!r} is none of {(AUTO, *WAYS)}")

    @classmethod
    def of(cls, config: EngineConfig, shares_memory: bool) -> ContextWays:
        """What a resolved configuration says, for PCP ranks that read each other's memory, or do not."""
        model, parallel, runtime = config.model, config.parallel, config.runtime
        tp = parallel.tensor_parallel_size
        return cls(
            attention=model.attention,
            num_heads=model.num_heads // tp,
            token_dim=model.attention.cache_dim(tp),
            row_bytes=row_bytes(model.attention, tp, config.cache.cache_dtype),
            pcp_size=parallel.prefill_context_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
            tile_tokens=runtime.context_workspace_tokens,
            q_itemsize=DTYPES[runtime.compute_dtype],
            forced=runtime.context_attention,
            has_windows=model.attention.has_windows,
            shared_from=_shared_from(config, shares_memory),
            shared_rows=shared_rows(_projected_bytes(config)),
        )

    @property
    def dsa(self) -> DSAConfig | None:
        """Of models with sparse attention."""
        return self.attention.dsa if isinstance(self.attention, MLAConfig) else None

    @property
    def legal(self) -> tuple[str, ...]:
        """The ways that this layout has: one without travelling queries, then, if there is, one with."""
        if self.dcp_size > 1:
            return KV, QUERY
        others = self.group_size - 1  # Without any, there is no way to weigh against the first.
        return (LOCAL, SLICED) if others and not self.has_windows and not self.dsa else (LOCAL,)

    @property
    def unit(self) -> int:
        """Consecutive PCP ranks between which queries travel."""
        return self.pcp_size if self.dcp_size == 1 else min(self.dcp_size, self.pcp_size)

    @property
    def group_size(self) -> int:
        """Ranks between which queries travel."""
        return max(self.dcp_size, self.unit)

    def choose(self, num_queries: np.ndarray, num_computed: np.ndarray) -> NDArray[np.str_]:
        """[R] the way of each request.

        A request that is split keeps all ranks about equally busy in place. One that is whole on a rank does
        not; but as many of them as there are ranks do. So what a whole request costs in place is its work
        times the share of the time that all whole ones take together: the fullest rank's part of their
        work, between 1/P (spread evenly: nothing is gained by sharing) and 1 (all on one rank).

        Args:
            num_queries: [R, P] new tokens of each request on each PCP rank.
            num_computed: [R] tokens of its context.
        """
        in_place, *travelling = self.legal
        if self.forced in self.legal or not travelling:
            return np.full(len(num_computed), self.forced if self.forced in self.legal else in_place)
        own = num_queries.max(axis=1, initial=0)
        cost_in_place = self._cost_in_place(own, num_computed)
        moved = self._move_keys(num_computed) if in_place == KV else 0
        if (cost_in_place + moved).max(initial=0) <= self._least_trip:
            return np.full(len(num_computed), in_place)
        whole = (num_queries > 0).sum(axis=1) <= 1
        load = ((num_queries > 0) * np.where(whole, cost_in_place, 0)[:, None]).sum(axis=0)
        share = load.max() / max(load.sum(), 1)
        cost_in_place = np.where(whole, share, 1.0) * cost_in_place + moved
        by_unit = num_queries.reshape(-1, self.pcp_size // self.unit, self.unit)
        of_unit = by_unit.sum(axis=2).max(axis=1, initial=0)
        travel = self._travel if self.dsa is None else self._visit
        return np.where(travel(own, of_unit, num_computed) < cost_in_place, travelling[0], in_place)

    def share_projections(self, num_queries: np.ndarray, num_computed: np.ndarray) -> NDArray[np.bool_]:
        """[R] whether the ranks share keys and values of a request's new tokens; see `choose`. Only in
        up-projected form, of which the request's fullest rank decides."""
        own, total = num_queries.max(axis=1, initial=0), num_queries.sum(axis=1)
        plain, absorbed = form_costs(self.attention, own, num_computed + total)
        return (plain <= absorbed) & (total - own >= max(1, self.shared_from))

    def _cost_in_place(self, num_queries: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        """Queries at keys, in the cheaper form, keys read once."""
        if self.dsa is not None:
            selected = self._attend_selected(num_queries, num_keys, self.num_heads)
            masked = masked_cost(self._mla, self.num_heads, num_keys, num_queries * num_keys)
            return self._select(num_queries, num_queries, num_keys) + np.minimum(selected, masked)
        if self.dcp_size > 1:  # the keys come in tiles
            return self._attend_tiles(num_queries, num_keys)
        stored, are_few = self._attend_stored(num_queries, num_keys), num_queries <= MOST_QUERIES
        return (
            stored if are_few.all() else np.where(are_few, stored, self._attend_tiles(num_queries, num_keys))
        )

    def _attend_tiles(
        self, num_queries: np.ndarray, num_keys: np.ndarray, absorbed_only: bool = False
    ) -> np.ndarray:
        """Queries at keys that are read tile by tile, in the cheaper form."""
        plain, absorbed = form_costs(self.attention, num_queries, num_keys)
        cost = absorbed if absorbed_only else np.minimum(plain, absorbed)
        return self.num_heads * cost + num_keys * self.token_dim * PER_KEY_ELEMENT

    def _attend_stored(self, num_queries: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        """Few queries at rows as they are stored: arithmetic or memory, whichever takes longer."""
        _, absorbed = form_costs(self.attention, num_queries, num_keys)
        return np.maximum(self.num_heads * absorbed, num_keys * self.token_dim * PER_STORED_ELEMENT)

    def _move_keys(self, num_keys: np.ndarray) -> np.ndarray:
        """Gathering the shards: every rank reads all keys."""
        tiles = -(-num_keys // self.tile_tokens)
        return num_keys * self.row_bytes * PER_GATHERED_BYTE + tiles * PER_COLLECTIVE

    @property
    def _least_trip(self) -> int:
        """No trip costs less; see `_travel` and `_visit`."""
        return PER_TRIP if self.dsa is None else 2 * PER_COLLECTIVE

    def _travel(self, own: np.ndarray, of_unit: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        """Queries there, all of them at this rank's part of the keys, results back."""
        attention, heads, size = self.attention, self.num_heads, self.group_size
        num_queries = of_unit * (size // self.unit)  # in units of this rank's number of heads
        num_pieces = -(-num_queries // TRAVEL_TOKENS)
        num_own_keys = -(-num_keys // size)
        per_trip = -(-num_queries // np.maximum(num_pieces, 1))
        heads_differ = self.dcp_size > self.pcp_size
        attend = np.where(
            per_trip <= MOST_QUERIES,
            self._attend_stored(per_trip, num_own_keys),
            self._attend_tiles(per_trip, num_own_keys, heads_differ),
        )
        q_dim, out_dim = attention.qk_head_dim, attention.v_head_dim
        if heads_differ:
            q_dim, out_dim = attention.absorbed_dims
        # Absorbed queries are float32.
        q_bytes = q_dim * (4 if heads_differ else self.q_itemsize)
        out_bytes = (out_dim + 1) * RESULT_BYTES
        per_piece = attend + PER_TRIP
        moved = own * size * heads * (q_bytes + out_bytes)
        return num_pieces * per_piece + moved * PER_QUERY_BYTE

    def _select(self, num_queries: np.ndarray, of_rank: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        """Sparse attention: queries score keys, in layers that do. Those of a rank share the reading."""
        dsa, readers = self.dsa, -(-of_rank // QUERY_BLOCK) * (num_queries // np.maximum(of_rank, 1))
        assert dsa is not None
        scored = num_queries * num_keys * dsa.num_heads * (dsa.head_dim + 1)
        return self._share * (scored + readers * num_keys * dsa.head_dim * PER_KEY_ELEMENT)

    def _attend_selected(self, num_queries: np.ndarray, num_keys: np.ndarray, heads: int) -> np.ndarray:
        """Sparse attention: queries of so many heads at those of the keys that are selected."""
        dsa = self.dsa
        assert dsa is not None
        pairs = num_queries * np.minimum(num_keys, dsa.index_topk)
        return selected_cost(self._mla, heads, num_queries, pairs)

    @property
    def _mla(self) -> MLAConfig:
        assert isinstance(self.attention, MLAConfig)
        return self.attention

    @property
    def _share(self) -> float:
        """Of the layers, those with an indexer."""
        dsa = self.dsa
        assert dsa is not None
        return sum(dsa.full_layers) / len(dsa.full_layers)

    def _visit(self, own: np.ndarray, of_unit: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        """The same as `_travel` with sparse attention."""
        dsa, attention, size = self.dsa, self.attention, self.dcp_size
        assert dsa is not None
        num_own_keys, num_parts = -(-num_keys // size), size // self.unit
        cost = self._select(of_unit, own, num_own_keys)
        pairs = of_unit * np.minimum(num_own_keys, dsa.index_topk) // size
        cost += selected_cost(self._mla, num_parts * self.num_heads, 0 * pairs, pairs)
        cost += of_unit * self.num_heads * attention.projection_size  # every rank absorbs all of them
        candidates = size * np.minimum(num_own_keys, dsa.index_topk)
        cost += self._share * of_unit * candidates * PER_CANDIDATE
        index_bytes = self._share * dsa.num_heads * (dsa.head_dim + 1) * 4
        cost += of_unit * (self.num_heads * attention.qk_head_dim * 4 + index_bytes) * PER_QUERY_BYTE
        back = own * self.unit * (attention.v_head_dim + 1)
        between_heads = of_unit * (num_parts - 1) * (sum(attention.absorbed_dims) + 1)
        cost += (back + between_heads) * self.num_heads * RESULT_BYTES * PER_QUERY_BYTE
        num_pieces = -(-own // max(1, VISIT_TOKENS // self.unit))
        return cost + num_pieces * (3 + 2 * (num_parts > 1)) * PER_COLLECTIVE


def _projected_bytes(config: EngineConfig) -> int:
    """Of a token's up-projected keys and values on a rank."""
    mla, heads = config.model.mla, config.model.num_heads // config.parallel.tensor_parallel_size
    return mla.projected_dim(heads) * DTYPES[config.runtime.compute_dtype] if mla is not None else 0


def _shared_from(config: EngineConfig, shares_memory: bool) -> float:
    """See ContextWays.shared_from: as soon as what is not projected outweighs a collective. Over sockets
    projections are too many bytes."""
    mla, choice = config.model.mla, config.runtime.share_projections
    if mla is None or mla.dsa is not None or choice == "off":
        return math.inf
    if choice == "on":
        return 1
    if not shares_memory:
        return math.inf
    heads = config.model.num_heads // config.parallel.tensor_parallel_size
    gain = heads * mla.projection_size - _projected_bytes(config) * PER_GATHERED_BYTE
    return PER_COLLECTIVE / gain if gain > 0 else math.inf
