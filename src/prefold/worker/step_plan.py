"""From the global batch and its partition to what one rank's attention does: the StepPlan.

Whatever steers a collective is computed here from global facts, so that all ranks that take part in it
come to the same: which requests' contexts travel and how, in what pieces, with how many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np
import torch

from prefold.attention.context_ways import (
    KV,
    LOCAL,
    QUERY,
    SLICED,
    ContextWays,
)
from prefold.attention.forms import prefer_absorbed
from prefold.attention.kv_tiles import KVPiece, KVTile
from prefold.attention.plan import DecodeTokens, RequestWork, Rows, StepPlan, TravelPiece, Visit
from prefold.attention.projected import ProjectedTile
from prefold.attention.shared_decode import SharedWork
from prefold.attention.sparse_shards import Visitors
from prefold.attention.walk import Run, Segment, others_segments, own_segments
from prefold.distributed.pcp_layout import Partition, TokenOrder
from prefold.kv_ownership import KVOwnership
from prefold.limits import TRAVEL_TOKENS, VISIT_TOKENS
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.projected_tiles import projected_tiles
from prefold.worker.request_states import RequestStates

TRAVELLING = SLICED, QUERY
"""Ways in which queries do."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank sits among those that split tokens (PCP) and those that split the cache (DCP).

    Attributes:
        pcp, pcp_size: place in the PCP group.
        dcp: place in the DCP group, which orders its ranks by TP place, then PCP place.
    """

    pcp: int
    pcp_size: int
    dcp: int
    ownership: KVOwnership

    @property
    def unit(self) -> int:
        """Consecutive PCP ranks of one DCP group: they compute the same decode tokens."""
        return min(self.ownership.dcp_size, self.pcp_size)

    def dcp_of(self, pcp: int) -> int:
        """Place in its DCP group of a rank of this PCP group."""
        return self.dcp - self.pcp % self.unit + pcp % self.unit

    def part_of_context(self, num_computed: int) -> tuple[int, int]:
        """What travelling queries attend to here, [start, end) of the tokens that this rank holds: its shard,
        or, where every rank holds everything, its slice, which begins with a block."""
        if self.ownership.dcp_size > 1:
            return 0, int(self.ownership.local_lengths(num_computed)[self.dcp])
        block_size, size = self.ownership.block_size, self.pcp_size
        start, end = (
            num_computed * place // size // block_size * block_size for place in (self.pcp, self.pcp + 1)
        )
        return start, end if self.pcp + 1 < size else num_computed


@dataclass(frozen=True, eq=False)
class _Travellers:
    """Travelling tokens of a unit's ranks, ordered by rank, each rank's in the order of its local batch.

    Attributes:
        request, source, position: of each token; `source` is the rank's place in the unit.
        own_tokens: those of this rank, in its local batch.
    """

    request: np.ndarray
    source: np.ndarray
    position: np.ndarray
    own_tokens: np.ndarray

    def pieces(self, size: int) -> Iterator[_Travellers]:
        """The same in pieces, with at most `size` tokens of each rank."""
        turn = np.arange(self.source.size) - np.searchsorted(self.source, self.source)
        for start in range(0, int(turn.max(initial=-1)) + 1, size):
            chosen = (turn >= start) & (turn < start + size)
            own = self.own_tokens[start : start + size]
            yield _Travellers(self.request[chosen], self.source[chosen], self.position[chosen], own)


def _equal_neighbours(*columns: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges [start, end) of rows that are equal in all columns.

    >>> list(_equal_neighbours(np.array([0, 0, 0, 1]), np.array([5, 5, 6, 6])))
    [(0, 2), (2, 3), (3, 4)]
    """
    differs = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), columns[0].size]
    return pairwise(edges)


def build_step_plan(
    batch: GlobalBatch,
    parts: Partition,
    order: TokenOrder,
    states: RequestStates,
    place: RankPlace,
    ways: ContextWays,
    device: torch.device,
) -> StepPlan:
    """The StepPlan of the rank at `place`. `order`: of `parts`."""
    return _Planner(batch, parts, order, states, place, ways, device).plan()


class _Planner:
    """One step's inputs, and what several parts of the plan need of them."""

    def __init__(
        self,
        batch: GlobalBatch,
        parts: Partition,
        order: TokenOrder,
        states: RequestStates,
        place: RankPlace,
        ways: ContextWays,
        device: torch.device,
    ) -> None:
        self._batch, self._parts, self._order = batch, parts, order
        self._place, self._ways, self._device = place, ways, device
        num_blocks = -(-int(parts.row_end.max(initial=0)) // states.block_size)
        self._block_ids = self._tensor(states.block_ids[batch.rows, :num_blocks])
        # A row of decode tokens is computed by a whole unit if the cache is sharded.
        self._shares_decode = place.ownership.dcp_size > 1
        self._has_prefill = bool(batch.is_prefill.any())
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._nowhere = Rows(nothing, nothing)
        self._way = self._choose_ways()
        self._ways_taken = set(self._way)
        self._is_projected = self._new = self._new_row = np.zeros(0, np.int64)
        if self._has_prefill:
            shared = ways.share_projections(self._num_queries(), batch.num_computed)
            self._is_projected = batch.is_prefill & shared
            is_new = np.repeat(batch.is_prefill, batch.num_scheduled)
            self._new, self._new_row = np.flatnonzero(is_new), np.cumsum(is_new) - 1

    def plan(self) -> StepPlan:
        batch, parts, place, order = self._batch, self._parts, self._place, self._order
        works, work_of = self._works()
        decode = self._decode()
        write_new, new_rows = self._nowhere, (self._nowhere.rows,) * place.pcp_size
        if self._has_prefill:
            write_new = self._kept(batch.slot_mapping[self._new])
            own_new = (self._new_row[order.prefill(pcp)] for pcp in range(place.pcp_size))
            new_rows = tuple(map(self._tensor, own_new))
        sent_decode, sent_decode_slots = self._sent()
        return StepPlan(
            num_tokens=int(parts.num_tokens[place.pcp]),
            num_prefill_tokens=int(parts.num_prefill_tokens[place.pcp]),
            works=works,
            own_decode=None if self._shares_decode else decode,
            gather_tokens=int(parts.num_prefill_tokens.max()),
            new_rows=new_rows,
            write_new=write_new,
            write_decode=self._kept(batch.slot_mapping[order.decode(place.pcp)]),
            shared_decode=decode if self._shares_decode else None,
            travel=self._travel(),
            visits=self._visits(),
            kv_tiles=self._kv_tiles(work_of),
            projected=self._projected(work_of, works),
            sent_decode=sent_decode,
            sent_decode_slots=sent_decode_slots,
            ways=self._count_ways(),
        )

    def _num_queries(self) -> np.ndarray:
        """[R, P] new tokens of each request on each PCP rank."""
        parts, num_requests = self._parts, len(self._batch.rows)
        place = parts.row_request * parts.size + parts.row_rank
        counts = np.bincount(place, parts.row_num_tokens, num_requests * parts.size)
        return counts.astype(np.int64).reshape(num_requests, parts.size)

    def _choose_ways(self) -> list[str]:
        """[R] ways of attending to the context; LOCAL where there is none, or only this rank's part of it
        concerns its queries."""
        batch = self._batch
        way = [LOCAL] * len(batch.rows)
        if self._ways.legal == (LOCAL,) or (self._shares_decode and not self._has_prefill):
            return way
        has_choice = batch.num_computed > 0
        if self._shares_decode:
            has_choice &= batch.is_prefill
        requests = np.flatnonzero(has_choice)
        chosen = self._ways.choose(self._num_queries()[requests], batch.num_computed[requests])
        for request, name in zip(requests.tolist(), chosen.tolist()):
            way[request] = name
        return way

    def _takes(self, *ways: str) -> np.ndarray:
        """[R] whether a request takes one of these ways."""
        return np.array([way in ways for way in self._way], np.bool_)

    def _count_ways(self) -> dict[str, int]:
        """See StepPlan."""
        batch, names = self._batch, self._way
        if self._shares_decode:
            names = [way if new else "shared" for way, new in zip(names, batch.is_prefill.tolist())]
        return dict(Counter(compress(names, batch.num_computed.tolist())))

    def _works(self) -> tuple[tuple[RequestWork, ...], dict[int, int]]:
        """The rank's rows joined to requests, but for what `_decode` has, and where each request is. Rows of
        a request are neighbours."""
        parts = self._parts
        works: list[RequestWork] = []
        work_of: dict[int, int] = {}
        if not self._has_prefill and not self._travels:
            return (), work_of
        runs: list[Run] = []
        offset = 0
        rows = parts.rows_of(self._place.pcp)
        requests = parts.row_request[rows].tolist()
        bounds = zip(parts.row_start[rows].tolist(), parts.row_end[rows].tolist())
        for request, following, (start, end) in zip(requests, [*requests[1:], -1], bounds):
            runs.append(Run(start, end, offset))
            offset += end - start
            if following == request:
                continue
            if self._batch.is_prefill[request] or self._way[request] in TRAVELLING:
                work_of[request] = len(works)
                works.append(self._work(request, tuple(runs)))
            runs = []
        return tuple(works), work_of

    @property
    def _travels(self) -> bool:
        """Whether queries of any request do."""
        return not self._ways_taken.isdisjoint(TRAVELLING)

    def _work(self, request: int, runs: tuple[Run, ...]) -> RequestWork:
        way, block_ids = self._way[request], self._block_ids[request]
        travels = way in TRAVELLING
        if not self._batch.is_prefill[request]:  # absorbed in any case, as all decode tokens are
            return RequestWork(runs, block_ids, (), own_segments(runs), (), 0, absorbed=True, travels=True)
        num_computed = int(self._batch.num_computed[request])
        num_queries = sum(run.end - run.start for run in runs)
        num_keys = runs[-1].end - (num_computed if travels else 0)
        is_projected = bool(self._is_projected[request])
        absorbed = not is_projected and prefer_absorbed(self._ways.attention, num_queries, num_keys)
        return RequestWork(
            runs=runs,
            block_ids=block_ids,
            cached=(Segment(0, num_computed, 0),) if way == LOCAL and num_computed > 0 else (),
            own=() if is_projected else own_segments(runs),
            others=() if is_projected else others_segments(runs, num_computed),
            first_new_row=int(self._new_row[self._batch.query_start_loc[request]]) - num_computed,
            absorbed=absorbed,
            travels=travels,
        )

    def _decode(self) -> DecodeTokens | None:
        """This rank's decode tokens whose queries do not travel."""
        parts, place, ownership = self._parts, self._place, self._place.ownership
        own = parts.rows_of(place.pcp)
        requests = parts.row_request[own]
        if self._has_prefill:
            requests = requests[~parts.row_is_prefill[own]]
        global_tokens = self._order.decode(place.pcp)
        if len(global_tokens) > len(requests):
            requests = np.repeat(requests, self._batch.num_scheduled[requests])
        end = int(parts.num_tokens[place.pcp])
        tokens, positions = np.arange(end - len(requests), end), self._batch.positions[global_tokens]
        if self._travels:
            stays = ~self._takes(*TRAVELLING)[requests]
            tokens, positions, requests = tokens[stays], positions[stays], requests[stays]
        if not len(tokens):
            return None
        lengths = positions + 1
        if self._shares_decode:
            lengths = np.ascontiguousarray(ownership.local_lengths(lengths)[:, place.dcp])
        return DecodeTokens(tokens, positions, lengths, requests, self._block_ids)

    def _travel(self) -> tuple[TravelPiece, ...]:
        """Travelling queries of this rank's group in pieces, each rank's in the order of its local batch."""
        if self._ways.dsa is not None:
            return ()
        pieces = self._traveller_pieces(max(1, TRAVEL_TOKENS // self._ways.group_size))
        return tuple(self._travel_piece(t.request, t.source, t.own_tokens) for t in pieces)

    def _visits(self) -> tuple[Visitors, ...]:
        """The same with sparse attention."""
        if self._ways.dsa is None:
            return ()
        pieces = self._traveller_pieces(max(1, VISIT_TOKENS // self._ways.unit))
        return tuple(
            Visitors(
                own_tokens=self._tensor(t.own_tokens),
                counts=tuple(np.bincount(t.source, minlength=self._ways.unit).tolist()),
                works=tuple(
                    SharedWork(
                        slice(int(start), int(end)),
                        self._tensor(t.position[start:end]),
                        self._block_ids[t.request[start]],
                        segments=(),
                    )
                    for start, end in _equal_neighbours(t.source, t.request)
                ),
            )
            for t in pieces
        )

    def _traveller_pieces(self, size: int) -> Iterator[_Travellers]:
        """The tokens of this rank's unit whose queries travel, at most `size` of each rank in a piece."""
        parts, place, ways = self._parts, self._place, self._ways
        if not self._travels:
            return
        row_travels = self._takes(*TRAVELLING)[parts.row_request]
        in_unit = parts.row_rank // ways.unit == place.pcp // ways.unit
        rows = np.flatnonzero(in_unit & row_travels)
        counts = parts.row_num_tokens[rows]
        ends = np.cumsum(counts)
        own_rows = parts.rows_of(place.pcp)
        travellers = _Travellers(
            request=np.repeat(parts.row_request[rows], counts),
            source=np.repeat(parts.row_rank[rows] % ways.unit, counts),
            position=np.repeat(parts.row_end[rows] - ends, counts) + np.arange(counts.sum()),
            own_tokens=np.flatnonzero(np.repeat(row_travels[own_rows], parts.row_num_tokens[own_rows])),
        )
        yield from travellers.pieces(size)

    def _travel_piece(self, request: np.ndarray, source: np.ndarray, own_tokens: np.ndarray) -> TravelPiece:
        """Tokens by (request, PCP place in the unit), ordered by place. Other heads of the group's are more
        places with the same tokens."""
        ways = self._ways
        num_parts = ways.group_size // ways.unit
        source = np.concatenate([source + part * ways.unit for part in range(num_parts)])
        request = np.tile(request, num_parts)
        order = np.argsort(request, kind="stable")
        row = np.empty_like(order)
        row[order] = np.arange(order.size)
        requests, starts = np.unique(request[order], return_index=True)
        visits = []
        for i, start, end in zip(requests.tolist(), starts, [*starts[1:], order.size]):
            keys = self._place.part_of_context(int(self._batch.num_computed[i]))
            visits.append(Visit(slice(int(start), int(end)), self._block_ids[i], *keys))
        return TravelPiece(
            own_tokens=self._tensor(own_tokens),
            counts=tuple(np.bincount(source, minlength=ways.group_size).tolist()),
            rows=tuple(self._tensor(row[source == i]) for i in range(ways.group_size)),
            visits=tuple(visits),
        )

    def _kv_tiles(self, work_of: dict[int, int]) -> tuple[KVTile, ...]:
        """Contexts of which any rank of this DCP group has queries, packed into tiles."""
        if KV not in self._ways_taken:
            return ()
        is_gathered = self._takes(KV)
        parts, place, ownership = self._parts, self._place, self._place.ownership
        in_unit = parts.row_rank // place.unit == place.pcp // place.unit
        requests = np.unique(parts.row_request[in_unit & is_gathered[parts.row_request]])
        lengths = ownership.local_lengths(self._batch.num_computed[requests])
        tile_rows = max(1, self._ways.tile_tokens // ownership.dcp_size)
        tiles: list[KVTile] = []
        pieces: list[KVPiece] = []
        filled = 0
        for request, length in zip(requests.tolist(), lengths):
            start, longest = 0, int(length.max())
            while start < longest:
                count = min(longest - start, tile_rows - filled)
                counts = tuple(np.clip(length - start, 0, count).tolist())
                block_ids = self._block_ids[request]
                pieces.append(KVPiece(work_of.get(request), block_ids, filled, start, counts))
                start, filled = start + count, filled + count
                if filled == tile_rows:
                    tiles.append(KVTile(filled, tuple(pieces)))
                    pieces, filled = [], 0
        if pieces:
            tiles.append(KVTile(filled, tuple(pieces)))
        return tuple(tiles)

    def _sent(self) -> tuple[np.ndarray, tuple[torch.Tensor, ...]]:
        """See StepPlan.sent_decode and sent_decode_slots."""
        batch, place, pcp_size = self._batch, self._place, self._place.pcp_size
        if place.unit == pcp_size:  # there are no other units
            return np.zeros(pcp_size, np.int64), (self._nowhere.slots,) * pcp_size
        counts, slots = [], []
        for pcp in range(pcp_size):
            tokens = self._order.decode(pcp)
            tokens = tokens[place.ownership.owner(batch.positions[tokens]) == place.dcp_of(pcp)]
            held = batch.slot_mapping[tokens]
            counts.append(len(tokens))
            slots.append(self._tensor(held[held >= 0]))
        return np.array(counts), tuple(slots)

    def _projected(
        self, work_of: dict[int, int], works: tuple[RequestWork, ...]
    ) -> tuple[ProjectedTile, ...]:
        if not self._is_projected.any():
            return ()
        return projected_tiles(
            self._parts, self._place.pcp, self._is_projected, work_of, works, self._ways.shared_rows
        )

    def _kept(self, slots: np.ndarray) -> Rows:
        """Of tokens with these slots, those that this rank holds."""
        rows = np.flatnonzero(slots >= 0)
        return Rows(self._tensor(rows), self._tensor(slots[rows]))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
