"""What attention is told of a step: who attends to what, and what travels. Built by worker/step_plan.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from prefold.attention.kv_tiles import KVTile
from prefold.attention.projected import ProjectedTile
from prefold.attention.shared_decode import SharedWork
from prefold.attention.sparse_shards import Visitors
from prefold.attention.walk import Run, Segment, Window, prefix_segments
from prefold.limits import ABSORBED_TOKENS


@dataclass(frozen=True, eq=False)
class RequestWork:
    """What one request's queries on this rank attend to without others' help, and in what form.

    Attributes:
        runs: the queries: one or two runs, ascending, consecutive in the local batch.
        block_ids: int64, at least the blocks of the request's tokens up to the step's last.
        cached: read from the cache, as this rank numbers the tokens that it holds.
        own: new tokens of this rank, by position: a segment per run, or none if they are read from
            the cache too, or if ranks share their keys and values (StepPlan.projected).
        others: new tokens of other ranks, by position; none if they are shared.
        first_new_row: row of position 0 among the step's new prefill tokens, if it had one: new token p
            is in row first_new_row + p.
        absorbed: the form of attention, if the layer has two (attention.forms).
        travels: its queries visit other ranks besides.
    """

    runs: tuple[Run, ...]
    block_ids: torch.Tensor
    cached: tuple[Segment, ...]
    own: tuple[Segment, ...]
    others: tuple[Segment, ...]
    first_new_row: int
    absorbed: bool
    travels: bool

    @property
    def tokens(self) -> slice:
        """Of the local batch."""
        start = self.runs[0].offset
        return slice(start, start + sum(run.end - run.start for run in self.runs))

    def window(self, size: int | None) -> Window | None:
        """How far its queries see in a layer with a window."""
        if size is None:
            return None
        return Window(np.concatenate([np.arange(run.start, run.end) for run in self.runs]), size)


def within_buffers(works: Sequence[RequestWork], num_prefill_tokens: int) -> tuple[RequestWork, ...]:
    """The works of a rank, of whose prefill tokens at most ABSORBED_TOKENS take the absorbed form."""
    if num_prefill_tokens <= ABSORBED_TOKENS:
        return tuple(works)
    room, chosen = ABSORBED_TOKENS, []
    for work in works:
        if work.absorbed and work.tokens.start < num_prefill_tokens:
            num_queries = work.tokens.stop - work.tokens.start
            if num_queries <= room:
                room -= num_queries
            else:
                work = replace(work, absorbed=False)
        chosen.append(work)
    return tuple(chosen)


@dataclass(frozen=True, eq=False)
class DecodeTokens:
    """Decode tokens whose queries stay where they are, and what this rank holds of what they see: all, or its
    shard. The tokens of a request are neighbours.

    Attributes:
        tokens: [n] of the local batch, ascending.
        positions: [n] int64.
        lengths: [n] int64: each sees the first so many of the keys that this rank holds of its request.
        requests: [n] int64, rows of `blocks`.
        blocks: [requests, most blocks] int64, at least the blocks up to the step's last token.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    requests: np.ndarray
    blocks: torch.Tensor

    def works(self) -> tuple[RequestWork, ...]:
        """One per request, in absorbed form; of a rank that holds all."""
        return tuple(
            RequestWork(
                runs=(Run(int(self.positions[i]), int(self.positions[end - 1]) + 1, int(self.tokens[i])),),
                block_ids=self.blocks[self.requests[i]],
                cached=prefix_segments(self.lengths[i:end].tolist()),
                own=(),
                others=(),
                first_new_row=0,
                absorbed=True,
                travels=False,
            )
            for i, end in self._bounds()
        )

    def shared_works(self) -> tuple[SharedWork, ...]:
        """One per request; of a rank that holds a shard."""
        return tuple(
            SharedWork(
                slice(i, end),
                torch.from_numpy(self.positions[i:end]).to(self.blocks.device),
                self.blocks[self.requests[i]],
                prefix_segments(self.lengths[i:end].tolist()),
            )
            for i, end in self._bounds()
        )

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """[start, end) of each request's tokens."""
        return pairwise([0, *(np.flatnonzero(np.diff(self.requests)) + 1).tolist(), len(self.requests)])


@dataclass(frozen=True, eq=False)
class Rows:
    """A copy of rows of a tensor to slots of the cache: rows [n], ascending, and slots [n], both int64."""

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, eq=False)
class Visit:
    """The queries of one request at this rank's part of its context.

    Attributes:
        queries: rows of the piece, all ranks' together.
        block_ids: of the request.
        start, end: the tokens that they attend to, as this rank numbers those that it holds.
    """

    queries: slice
    block_ids: torch.Tensor
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class TravelPiece:
    """Queries that travel together, few enough for the buffers. Equal on all ranks but for the tensors.

    Attributes:
        own_tokens: [n] int64, this rank's queries, in its local batch.
        counts: queries of each place of the group.
        rows: per place, where its queries go when the piece is ordered by request, [count] int64.
        visits: the requests, covering the piece's rows.
    """

    own_tokens: torch.Tensor
    counts: tuple[int, ...]
    rows: tuple[torch.Tensor, ...]
    visits: tuple[Visit, ...]

    @property
    def num_queries(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of one rank. What steers collectives is equal on all ranks that take part in them.

    Per layer, in this order, each only if it has anything to move:

    1. all-gather of the new prefill tokens' rows of the cache, started, over pcp (`gather_tokens`)
    2. all-gather of the first piece's queries, started, over the travel group (`travel`)
    3. all-gather of the decode queries, started, over dcp_tp (`shared_decode`)
    4. an all-gather per tile of context over dcp (`kv_tiles`), after 2 has been released
    5. all-to-all over dcp_tp, then all-gather over dcp_pcp, of decode results
    6. an all-gather of the first tile of keys and values that are shared, started, over pcp (`projected`);
       after 1 has been released if there is 2
    7. all-to-all of the first piece's results, started, over the travel group, after 1 has been released
    8. an all-gather for each further tile of 6
    9. an all-gather and an all-to-all for each further piece of 2

    With sparse attention the order is 1, 4; then for each piece of `visits` an all-gather of queries over
    dcp_pcp, one of candidates over dcp in layers with an indexer, 3, the all-to-all of 5, and one of results
    over dcp_pcp; then for decode tokens the candidates, 3 and 5.

    So no group has more than two in flight. The travel group is the DCP group if the cache is sharded,
    else the PCP group.

    Attributes:
        num_tokens, num_prefill_tokens: this rank's. Prefill tokens come first in the local batch.
        works: this rank's requests, prefill before decode; without those of the next two.
        own_decode: decode tokens that no other rank computes or attends; None: there are none.
        gather_tokens: prefill tokens of the fullest rank: the length every rank sends.
        new_rows: per PCP rank, the rows of its prefill tokens among all new ones, which are in the global
            batch's order, [num_prefill_tokens of that rank] int64.
        write_new: of all new prefill tokens, those that this rank holds.
        write_decode: of this rank's decode tokens, those that it holds.
        shared_decode: decode tokens that a whole unit computes.
        travel, kv_tiles: contexts that are not attended in place.
        projected: new tokens whose keys and values each rank projects for all.
        visits: the same as `travel`, with sparse attention.
        sent_decode: [P] decode tokens whose KV each PCP rank sends to the other units, after the step.
        sent_decode_slots: per PCP rank, where this rank holds them, int64; empty if it does not.
        ways: requests of all ranks that have cached context, by how it is attended (attention.context_ways,
            or "shared": decode requests that a whole unit computes). For statistics.
    """

    num_tokens: int
    num_prefill_tokens: int
    works: tuple[RequestWork, ...]
    own_decode: DecodeTokens | None
    gather_tokens: int
    new_rows: tuple[torch.Tensor, ...]
    write_new: Rows
    write_decode: Rows
    shared_decode: DecodeTokens | None
    travel: tuple[TravelPiece, ...]
    kv_tiles: tuple[KVTile, ...]
    projected: tuple[ProjectedTile, ...]
    visits: tuple[Visitors, ...]
    sent_decode: np.ndarray
    sent_decode_slots: tuple[torch.Tensor, ...]
    ways: dict[str, int]

    @property
    def num_new_tokens(self) -> int:
        """Prefill tokens of the step, on all ranks."""
        return sum(len(rows) for rows in self.new_rows)
