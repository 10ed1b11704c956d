"""DeepSeek Sparse Attention of a step: select keys, attend to them.

A query that sees no more keys than it may attend to is attended densely, exactly as without sparse
attention; so the first `index_topk` tokens of every request are. The others select: the indexer's queries
are scored against the index keys of all tokens before them, which lie in the same rows as the latents and
travel and are stored with them. So how a query reaches its keys depends on who holds them:

- D = 1: a rank has them all in its cache once the step's new tokens have been gathered and written. Nothing
  else travels for sparse attention.
- D > 1, prefill, the way `kv` (attention.context_ways): the new tokens have been gathered. Cached context is,
  too, one request and layer at a time and tile by tile (attention.kv_tiles), to every rank that has queries
  of the request. Per layer a rank receives (D - 1) / D of the context's rows, and has room for one request's.
- D > 1, prefill, the way `query`, and decode: all ranks of the DCP group attend to the token, each to its
  shard (attention.sparse_shards).

Queries attend in absorbed form to the rows that they have selected; but the first ones of a prompt, which
have selected much of what they see, densely with a mask (attention.masked): that is quicker for them.

A selection is made by the layers that have an indexer and used by those after it, up to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from prefold.attention.backend import HeadRows, LatentRows
from prefold.attention.context_parallel import AttentionSetup, ContextParallelAttention
from prefold.attention.forms import KVForms, prefer_absorbed
from prefold.attention.kv_tiles import KVTiles
from prefold.attention.masked import MaskedAttention, MaskedQueries
from prefold.attention.plan import RequestWork, StepPlan
from prefold.attention.row_format import PlainFormat
from prefold.attention.selected import attend_selected
from prefold.attention.selection import AllTokens, KeySelector, PagedTokens
from prefold.attention.sparse_costs import num_masked
from prefold.attention.sparse_layer import PagedKeys, RequestKeys, SparseLayer
from prefold.attention.sparse_shards import SparseShards
from prefold.attention.walk import CacheReader, Run, Segment, rows_of
from prefold.config import MLAConfig
from prefold.kernels import library
from prefold.kernels.recording import again
from prefold.limits import QUERY_BLOCK


@dataclass(frozen=True, eq=False)
class SparseRun:
    """Consecutive queries with a selection.

    Attributes:
        run: the queries.
        rows: of the rank's selections.
    """

    run: Run
    rows: slice


@dataclass(frozen=True, eq=False)
class SparseRequest:
    """A request's queries with a selection.

    Attributes:
        masked: the first of them, which are attended with a mask (attention.masked).
        runs: the others, which are attended to the rows that they have selected.
        num_gathered: tokens of its context that come from other ranks.
    """

    work: RequestWork
    masked: tuple[Run, ...]
    runs: tuple[SparseRun, ...]
    num_gathered: int

    @property
    def end(self) -> int:
        """Position after the last of the queries."""
        return self.runs[-1].run.end if self.runs else self.masked[-1].end


class SparseAttention(ContextParallelAttention):
    """The AttentionContext of a rank for models with an indexer. The base class does what comes before: it
    publishes and stores the new rows, and attends the queries without a choice."""

    def __init__(self, setup: AttentionSetup) -> None:
        super().__init__(setup)
        attention = setup.attention
        assert isinstance(attention, MLAConfig)
        assert attention.dsa is not None
        self._mla, self._num_heads = attention, setup.num_heads
        attended, self._index_format = setup.formats
        self._topk = attention.dsa.index_topk
        self._selector = KeySelector(self._topk, setup.tile_tokens, setup.workspace)
        self._ownership = setup.ownership
        device = setup.kv_cache.device
        ranks = range(setup.ownership.dcp_size)
        self._held_by = [PagedTokens(setup.ownership, rank, device) for rank in ranks]
        held = self._held_by[setup.groups["dcp"].rank]
        self._paged = PagedKeys((attended, self._index_format), held, setup.workspace)
        self._shards = SparseShards(
            setup.groups,
            setup.ownership,
            self._selector,
            self._topk,
            self._paged,
            setup.scale,
            setup.workspace,
        )
        self._all = AllTokens()
        self._masked = MaskedAttention(self._selector, setup.backend, setup.tile_tokens, setup.scale)
        self._can_mask = device.type == "cpu" and library.is_available()
        self._sparse_plan: StepPlan | None = None
        self._requests: dict[int, SparseRequest] = {}
        self._selected = torch.empty(0)
        self._masks: dict[int, MaskedQueries] = {}

    def begin_step(self, plan: StepPlan) -> None:
        """See ContextParallelAttention.begin_step."""
        gathered: dict[int, int] = {}
        for piece in (piece for tile in plan.kv_tiles for piece in tile.pieces):
            if piece.work is not None:
                gathered[piece.work] = gathered.get(piece.work, 0) + sum(piece.counts)
        decode = plan.own_decode.works() if plan.own_decode is not None else ()
        shared = plan.shared_decode.shared_works() if plan.shared_decode is not None else ()
        own = [work for i, work in enumerate(plan.works) if i not in gathered and not work.travels]
        dense = [dense_part(work, self._topk, self._mla) for work in (*own, *decode)]
        works = tuple(work for work in dense if work is not None)
        super().begin_step(replace(plan, works=works, own_decode=None, kv_tiles=(), shared_decode=None))
        self._sparse_plan = plan
        tokens = slice(plan.num_prefill_tokens, plan.num_tokens)
        self._shards.begin_step(plan.visits, shared, tokens)
        self._requests = sparse_requests((*plan.works, *decode), gathered, self._topk, self._num_masked)
        num_queries = sum(
            part.rows.stop - part.rows.start for r in self._requests.values() for part in r.runs
        )
        self._selected = self._workspace.get("sparse.selected", (num_queries, self._topk), torch.int32)
        masked = {i: request.masked for i, request in self._requests.items() if request.masked}
        shapes = [MaskedQueries.shape(runs) for runs in masked.values()]
        bits = self._workspace.carve("sparse.bits", shapes, torch.int64)
        self._masks = {i: MaskedQueries(runs, own) for (i, runs), own in zip(masked.items(), bits)}

    def _num_masked(self, runs: Sequence[Run]) -> int:
        """Of queries with a selection, see `sparse_costs.num_masked`."""
        bounds = [(run.start, run.end) for run in runs]
        return num_masked(self._mla, self._num_heads, bounds) if self._can_mask else 0

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        return again(self._attend_sparsely, layer_idx, q, kv, rows)

    def _attend_sparsely(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> torch.Tensor:
        plan = self._sparse_plan
        assert plan is not None
        assert isinstance(rows, LatentRows)
        out, new_rows = self._attend(layer_idx, q, kv, rows)
        forms = KVForms.of(rows, self._compute_dtype, self._backend, self._workspace)
        cache = self._kv_cache[layer_idx][..., : new_rows.shape[1]]
        layer = SparseLayer(q, rows.index, forms, cache, new_rows, out)
        for i, request in self._requests.items():
            if not request.num_gathered:
                self._attend_request(layer, i, self._keys(layer, request.work))
        self._attend_gathered(layer, plan)
        self._shards.attend(layer)
        return out.flatten(1)

    def _keys(self, layer: SparseLayer, work: RequestWork) -> RequestKeys:
        """Of a request without context on other ranks."""
        if self._ownership.dcp_size == 1:
            return self._paged.of(layer, work.block_ids)
        return self._row_keys(layer.new_rows[work.first_new_row :], work)

    def _row_keys(self, rows: torch.Tensor, work: RequestWork) -> RequestKeys:
        """Rows by position."""
        width = self._format.width
        index_keys = rows_of(rows[:, width:], 0, self._index_format)
        latents = rows_of(rows[:, :width], 0, self._format)
        return RequestKeys(rows[:, :width], latents, index_keys, self._all, work.block_ids)

    def _attend_request(self, layer: SparseLayer, number: int, keys: RequestKeys) -> None:
        """Select for a request's queries, and attend. Where selected keys lie is the same in all layers."""
        request = self._requests[number]
        if number in self._masks:
            self._masked.attend(layer, self._masks[number], keys)
        table = keys.held.table(request.end, keys.block_ids)
        for part in request.runs:
            for start in range(part.run.start, part.run.end, QUERY_BLOCK):
                end = min(start + QUERY_BLOCK, part.run.end)
                first = start - part.run.start
                tokens = slice(part.run.offset + first, part.run.offset + first + end - start)
                selected = self._selected[part.rows][first : first + end - start]
                if layer.index is not None:
                    index = layer.index.of_tokens(tokens)
                    limits = torch.arange(start + 1, end + 1, device=selected.device)
                    self._selector.select_slots(index, limits, keys.index_keys, table, selected)
                self._attend_block(layer, tokens, selected, keys.rows)

    def _attend_block(
        self, layer: SparseLayer, tokens: slice, slots: torch.Tensor, rows: torch.Tensor
    ) -> None:
        mla, workspace = self._mla, self._workspace
        q = layer.q[tokens]
        shape = q.shape[:2]
        latent_q = workspace.get("sparse.latent_q", (*shape, mla.token_dim), torch.float32)
        layer.forms.absorbed.queries(q, latent_q)
        latent_out = workspace.get("sparse.latent_out", (*shape, mla.kv_lora_rank), torch.float32)
        lse = workspace.get("sparse.lse", shape, torch.float32)
        attend_selected(latent_q, slots, rows, self._format, self._scale, latent_out, lse, workspace)
        layer.forms.absorbed.results(latent_out, layer.out[tokens])

    def _attend_gathered(self, layer: SparseLayer, plan: StepPlan) -> None:
        """The requests whose context is spread over ranks: each when the last of it has come."""
        whole = PlainFormat(layer.cache.shape[2], layer.cache.dtype)  # rows travel as they are stored
        reader = CacheReader(layer.cache, whole, self._workspace)
        tiles = KVTiles(plan.kv_tiles, self._groups["dcp"], reader, self._backend, self._workspace)
        context, received = layer.new_rows, 0
        for piece, rows in tiles.pieces():
            if piece.work is None:
                continue
            request = self._requests[piece.work]
            work, num_gathered = request.work, request.num_gathered
            if not received:
                shape = (work.runs[-1].end, rows.shape[1])
                context = self._workspace.get("sparse.context", shape, rows.dtype)
                first, last = work.first_new_row + num_gathered, work.first_new_row + len(context)
                context[num_gathered:].copy_(layer.new_rows[first:last])
            for held, part in zip(self._held_by, rows.split(piece.counts), strict=True):
                tokens = torch.arange(piece.first_token, piece.first_token + len(part), device=part.device)
                context.index_copy_(0, held.positions(tokens), part)
            received += len(rows)
            if received == num_gathered:
                self._attend_request(layer, piece.work, self._row_keys(context, work))
                received = 0


def dense_part(work: RequestWork, topk: int, mla: MLAConfig) -> RequestWork | None:
    """Of a request's work, the queries that see at most `topk` keys; None if there are none."""
    runs = tuple(replace(run, end=min(run.end, topk)) for run in work.runs if run.start < topk)
    if not runs:
        return None
    if runs == work.runs:
        return work
    num_queries = sum(run.end - run.start for run in runs)
    return replace(
        work,
        runs=runs,
        cached=_of_first(work.cached, num_queries),
        own=_of_first(work.own, num_queries),
        others=_of_first(work.others, num_queries),
        absorbed=prefer_absorbed(mla, num_queries, runs[-1].end),
    )


def _of_first(segments: Sequence[Segment], num_queries: int) -> tuple[Segment, ...]:
    """What the first queries of a walk attend to.

    >>> kept = _of_first([Segment(0, 4, 0), Segment(4, 9, 0, causal=True), Segment(9, 12, 5)], 3)
    >>> [(segment.start, segment.end) for segment in kept]
    [(0, 4), (4, 7)]
    """
    kept = []
    for segment in segments:
        if segment.first_query < num_queries:
            last = segment.start + num_queries - segment.first_query
            kept.append(replace(segment, end=min(segment.end, last)) if segment.causal else segment)
    return tuple(kept)


def sparse_requests(
    works: Sequence[RequestWork],
    gathered: dict[int, int],
    topk: int,
    num_masked: Callable[[Sequence[Run]], int],
) -> dict[int, SparseRequest]:
    """By place in `works`, the queries with a selection, and where their selections go: those that see more
    than `topk` keys, and all of a request whose context is gathered. Those that travel are not among them.

    Args:
        num_masked: of a request's queries, how many, the first ones, are attended with a mask.
    """
    found: dict[int, SparseRequest] = {}
    end = 0
    for i, work in enumerate(works):
        if work.travels:
            continue
        _, queries = _cut_at(work.runs, topk if i not in gathered else 0)
        if not queries:
            continue
        level = _position_of(queries, num_masked(queries))
        masked, others = _cut_at(queries, level)
        runs = []
        for run in others:
            start, end = end, end + run.end - run.start
            runs.append(SparseRun(run, slice(start, end)))
        found[i] = SparseRequest(work, masked, tuple(runs), gathered.get(i, 0))
    return found


def _cut_at(runs: Sequence[Run], position: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Runs of queries before a position, and of those from there on.

    >>> _cut_at([Run(0, 4, 0), Run(6, 9, 4)], 7)
    ((Run(start=0, end=4, offset=0), Run(start=6, end=7, offset=4)), (Run(start=7, end=9, offset=5),))
    """
    before, after = [], []
    for run in runs:
        cut = min(max(position, run.start), run.end)
        if run.start < cut:
            before.append(Run(run.start, cut, run.offset))
        if cut < run.end:
            after.append(Run(cut, run.end, run.offset + cut - run.start))
    return tuple(before), tuple(after)


def _position_of(runs: Sequence[Run], query: int) -> int:
    """Of the query with this number; of the end, if there are no more.

    >>> [_position_of([Run(0, 2, 0), Run(6, 8, 2)], query) for query in range(5)]
    [0, 1, 6, 7, 8]
    """
    for run in runs:
        if query < run.end - run.start:
            return run.start + query
        query -= run.end - run.start
    return runs[-1].end
