"""Attention of a step under context parallelism: publish new KV, attend, collect, attend to the rest.

Per layer, the new KV of prefill tokens is published to the PCP group as soon as it exists. While it
travels, each rank attends to what it has: its own new tokens and cached context. When it has arrived it
lies in one buffer in the order of the global batch: from there a rank writes what it holds to its cache,
and attends to the other ranks' new tokens, whoever holds them.

What the cache holds for a rank depends on the layout (everything, or a shard), and so does how
context is attended (attention.context_ways); here are only the order of events and the two decode forms:
tokens that one rank computes, whose KV reaches other replicas once per step (worker/pcp_manager.py), and
tokens that all ranks of a DCP group compute (attention.shared_decode).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from prefold.attention.backend import AttentionBackend, HeadRows, LatentRows
from prefold.attention.forms import KVForms
from prefold.attention.kv_tiles import KVTiles
from prefold.attention.mla import UpProjectedForm
from prefold.attention.paged import PagedCache, PagedQueries, attend_own, can_attend_paged, is_paged
from prefold.attention.plan import RequestWork, Rows, StepPlan, within_buffers
from prefold.attention.projected import ProjectedTiles
from prefold.attention.queries import LayerQueries
from prefold.attention.row_format import RowFormat
from prefold.attention.shared_decode import AttendShard, ShardWalks, SharedDecode
from prefold.attention.travel import TravelTools, Trip
from prefold.attention.walk import CacheReader, Latents, Walk, Walker, Window, rows_of
from prefold.config import GQAConfig, MLAConfig
from prefold.distributed.group import Gather, Group
from prefold.kernels.recording import again
from prefold.kv_ownership import KVOwnership
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class AttentionSetup:
    """What a rank's attention is made of.

    Attributes:
        num_heads: query heads of this rank.
        kv_cache: [num_layers, num_blocks, block_size, width of a row], stored rows.
        formats: of the parts of a row.
        groups: this rank's; used are pcp, dcp, dcp_pcp and dcp_tp.
        ownership: which rank of the DCP group holds which token.
        tile_tokens: keys that are read and projected at a time.
        compute_dtype: dtype of projections and of the result.
    """

    attention: MLAConfig | GQAConfig
    num_heads: int
    scale: float
    kv_cache: torch.Tensor
    formats: Sequence[RowFormat]
    groups: Mapping[str, Group]
    ownership: KVOwnership
    backend: AttentionBackend
    workspace: Workspace
    tile_tokens: int
    compute_dtype: torch.dtype


class ContextParallelAttention:
    """The AttentionContext of a rank: one object for all steps, one `StepPlan` each."""

    def __init__(self, setup: AttentionSetup) -> None:
        groups, ownership = setup.groups, setup.ownership
        self._attention = setup.attention
        self._scale = setup.scale
        self._kv_cache = setup.kv_cache
        self._formats = setup.formats
        self._format = setup.formats[0]  # of what queries attend to: all but an index key
        self._groups = groups
        # Queries travel to the ranks that hold other parts of the context: other shards, or else
        # replicas, of which each takes a slice.
        self._travel_group = groups["pcp" if ownership.dcp_size == 1 else "dcp"]
        self._heads_differ = ownership.dcp_size > groups["pcp"].size
        self._backend = setup.backend
        self._workspace = setup.workspace
        self._walker = Walker(setup.backend, setup.tile_tokens)
        self._compute_dtype = setup.compute_dtype
        self._can_attend_paged = can_attend_paged(setup.kv_cache)
        self._holds_requests = ownership.dcp_size == 1
        self._plan: StepPlan | None = None
        self._walked: tuple[RequestWork, ...] = ()
        self._walked_places: list[int] = []  # among the plan's works
        self._few: PagedQueries | None = None
        self._few_shared: PagedQueries | None = None
        self._few_visiting: tuple[PagedQueries | None, ...] = ()
        self._has_few_only = False
        self._write_decode: Rows | None = None

    def begin_step(self, plan: StepPlan) -> None:
        """Set the step that the coming `attend` calls, one per layer, belong to."""
        self._plan = plan
        has_one_form = isinstance(self._attention, GQAConfig)
        pages = self._can_attend_paged and self._holds_requests
        works, decode = within_buffers(plan.works, plan.num_prefill_tokens), plan.own_decode
        if decode is not None and not pages:
            works, decode = (*works, *decode.works()), None
        paged = [pages and is_paged(work, has_one_form) for work in works]
        self._walked_places = [i for i, is_one in enumerate(paged) if not is_one]
        self._walked = tuple(works[i] for i in self._walked_places)
        few = [work for work, is_one in zip(works, paged) if is_one]
        self._few = PagedQueries.of_step(few, decode)
        shared = plan.shared_decode if self._can_attend_paged else None
        self._few_shared = PagedQueries.of_step([], shared)
        block_size = self._kv_cache.shape[2]
        self._few_visiting = tuple(
            PagedQueries.of_visits(piece.visits, block_size) if self._can_attend_paged else None
            for piece in plan.travel
        )
        moves = plan.gather_tokens or plan.travel or plan.shared_decode is not None or plan.kv_tiles
        self._has_few_only = not self._walked and not moves
        if self._has_few_only:
            self._keep_in_place(plan)

    def _keep_in_place(self, plan: StepPlan) -> None:
        """Put what kernels read of the step where they have found it in the last one."""
        keep, written = self._workspace.keep, plan.write_decode
        self._write_decode = Rows(
            keep("attention.rows", written.rows), keep("attention.slots", written.slots)
        )
        if self._few is not None:
            self._few = self._few.kept(self._workspace)

    @property
    def step_kind(self) -> Hashable:
        """What the calls of kernels of this step depend on, besides its number of tokens."""
        if not self._has_few_only:
            return None
        assert self._write_decode is not None
        return len(self._write_decode.rows), None if self._few is None else self._few.kind

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        if self._has_few_only:  # kernels alone: a recording has them
            out, _ = self._attend(layer_idx, q, kv, rows)
        else:
            out, _ = again(self._attend, layer_idx, q, kv, rows)
        return out.flatten(1)

    def _attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The results [num_tokens, num_heads, v_head_dim], and the new prefill tokens' rows of the cache, all
        ranks', in the order of the global batch [num_new_tokens, width of a row]."""
        plan, width = self._plan, self._format.width
        assert plan is not None
        assert q.shape[0] == plan.num_tokens, (q.shape, plan.num_tokens)
        forms = KVForms.of(rows, self._compute_dtype, self._backend, self._workspace)
        stored = PagedCache(self._kv_cache[layer_idx][..., :width], self._format)
        out = self._workspace.get("attention.out", (*q.shape[:2], forms.plain.out_dim), self._compute_dtype)
        if self._has_few_only:
            assert self._write_decode is not None
            self._store(layer_idx, kv, self._write_decode)
            if self._few is not None:
                attend_own(self._few, stored, q, forms, self._scale, out, self._workspace)
            return out, self._stored_rows(kv, 0)
        new_kv = self._encode(kv, plan)
        cache = self._kv_cache[layer_idx][..., : new_kv.shape[1]]
        reader = CacheReader(stored.rows, self._format, self._workspace)
        gather = self._groups["pcp"].start_all_gather(new_kv[: plan.gather_tokens])
        self._write(cache, new_kv[plan.num_prefill_tokens : plan.num_tokens], plan.write_decode)
        trips = self._trips(plan, q, forms, stored, reader)
        for trip in trips[:1]:
            trip.send()
        decode = self._start_decode(plan, q, forms, stored)

        works = self._walked
        requests = [(work.tokens, work.absorbed) for work in works]
        queries = LayerQueries(q, requests, forms, self._scale, self._backend, self._workspace, "attention")
        windows = [work.window(forms.window) for work in works]
        for work, walk, window in zip(works, queries.walks, windows):
            for run, segment in zip(work.runs, work.own):
                source = rows_of(new_kv[:, :width], run.start - run.offset, self._format)
                self._walker.run(walk, [segment], source, window)
            self._walker.run(walk, work.cached, reader.request(work.block_ids), window)
        for trip in trips[:1]:
            trip.attend()
        self._kv_tiles(plan, reader).run(queries.walks)
        if decode is not None:
            decode.attend(out[plan.num_prefill_tokens :])
        shared = self._shared(
            plan, forms, rows_of(new_kv[:, :width], 0, self._format), queries.walks, windows
        )
        for tiles in shared:
            if not trips:  # else a third gather would be in flight
                tiles.begin()

        all_new = self._collect(gather, plan, new_kv.shape[1])
        self._write(cache, all_new, plan.write_new)
        for trip in trips[:1]:
            trip.send_back()
        for work, walk, window in zip(works, queries.walks, windows):
            source = rows_of(all_new[:, :width], -work.first_new_row, self._format)
            self._walker.run(walk, work.others, source, window)
        for tiles in shared:
            tiles.finish()
        if self._few is not None:
            attend_own(self._few, stored, q, forms, self._scale, out, self._workspace)
        self._finish(queries, trips, out)
        return out, all_new

    def _encode(self, kv: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """New KV as it is stored, with room for the rows that pad the gather. A layer whose rows lack the
        last part stores none of it."""
        new_kv = self._stored_rows(kv, max(plan.gather_tokens, plan.num_tokens))
        for one, part, stored in self._parts(kv, new_kv[: plan.num_tokens]):
            one.encode(part, stored)
        return new_kv

    def _store(self, layer_idx: int, kv: torch.Tensor, copy: Rows) -> None:
        """`_encode` and `_write` at once: rows of kv to slots of a layer's cache."""
        cache = self._kv_cache[layer_idx].flatten(0, 1)
        for one, part, stored in self._parts(kv, cache):
            one.store(part, stored, copy.rows, copy.slots)

    def _stored_rows(self, kv: torch.Tensor, num_rows: int) -> torch.Tensor:
        """A buffer for rows like those of kv."""
        width = sum(one.width for one in self._formats_of(kv))
        return self._workspace.get("attention.new_kv", (num_rows, width), self._kv_cache.dtype)

    def _formats_of(self, kv: torch.Tensor) -> Sequence[RowFormat]:
        is_whole = kv.shape[1] == sum(one.dim for one in self._formats)
        return self._formats if is_whole else self._formats[:-1]

    def _parts(
        self, kv: torch.Tensor, stored: torch.Tensor
    ) -> Iterator[tuple[RowFormat, torch.Tensor, torch.Tensor]]:
        """Each part of rows: its format, as it is, and where it is stored."""
        dim = width = 0
        for one in self._formats_of(kv):
            yield one, kv[:, dim : dim + one.dim], stored[:, width : width + one.width]
            dim, width = dim + one.dim, width + one.width
        assert dim == kv.shape[1], (dim, kv.shape)

    def _trips(
        self, plan: StepPlan, q: torch.Tensor, forms: KVForms, stored: PagedCache, reader: CacheReader
    ) -> list[Trip]:
        """One per piece of travelling queries."""
        if not plan.travel:
            return []
        tools = TravelTools(
            group=self._travel_group,
            absorbed=self._heads_differ,
            forms=forms,
            attention=self._attention,
            scale=self._scale,
            stored=stored,
            reader=reader,
            walker=self._walker,
            backend=self._backend,
            workspace=self._workspace,
        )
        return [
            Trip(piece, tools, q, few) for piece, few in zip(plan.travel, self._few_visiting, strict=True)
        ]

    def _start_decode(
        self, plan: StepPlan, q: torch.Tensor, forms: KVForms, stored: PagedCache
    ) -> SharedDecode | None:
        """The decode tokens of a sharded cache, with their queries on the way."""
        if plan.shared_decode is None:
            return None
        form, scale, paged = forms.absorbed, self._scale, self._few_shared
        if paged is None:
            reader = CacheReader(stored.rows, self._format, self._workspace)
            works = plan.shared_decode.shared_works()
            attend = ShardWalks(works, form, scale, reader, self._walker, self._backend)
        else:

            def attend(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
                stored.attend(paged, q, form, None, scale, out, lse)

        decode = self._shared_decode(attend, forms)
        decode.send(q[plan.num_prefill_tokens :])
        return decode

    def _shared_decode(self, attend_shard: AttendShard, forms: KVForms) -> SharedDecode:
        dcp_tp, dcp_pcp = self._groups["dcp_tp"], self._groups["dcp_pcp"]
        return SharedDecode(attend_shard, dcp_tp, dcp_pcp, forms.absorbed, self._workspace)

    def _kv_tiles(self, plan: StepPlan, reader: CacheReader) -> KVTiles:
        return KVTiles(
            plan.kv_tiles,
            self._groups["dcp"],
            reader,
            self._backend,
            self._workspace,
        )

    def _shared(
        self,
        plan: StepPlan,
        forms: KVForms,
        latents: Latents,
        walks: Sequence[Walk],
        windows: Sequence[Window | None],
    ) -> list[ProjectedTiles]:
        """The keys and values that ranks project for each other, if there are any."""
        if not plan.projected:
            return []
        assert isinstance(forms.plain, UpProjectedForm), "there is nothing to project"
        return [
            ProjectedTiles(
                plan.projected,
                self._groups["pcp"],
                forms.plain,
                latents,
                self._walker,
                dict(zip(self._walked_places, walks, strict=True)),
                dict(zip(self._walked_places, windows, strict=True)),
            )
        ]

    def _collect(self, gather: Gather, plan: StepPlan, width: int) -> torch.Tensor:
        """Stored rows of the new prefill tokens in the global batch's order, [num_new_tokens, width]."""
        shape = (plan.num_new_tokens, width)
        all_new = self._workspace.get("attention.all_new", shape, self._kv_cache.dtype)
        for rows, part in zip(plan.new_rows, gather.wait(), strict=True):
            if len(rows) > 0:
                all_new.index_copy_(0, rows, part[: len(rows)])
        gather.release()
        return all_new

    def _write(self, cache: torch.Tensor, stored: torch.Tensor, copy: Rows) -> None:
        """Copy stored rows, each at most once, to slots of one layer's cache."""
        num_rows = len(copy.rows)
        if num_rows == 0:
            return
        if num_rows < len(stored):
            rows = self._workspace.get("attention.written", (num_rows, stored.shape[1]), stored.dtype)
            stored = torch.index_select(stored, 0, copy.rows, out=rows)
        cache.view(-1, cache.shape[-1]).index_copy_(0, copy.slots, stored)

    def _finish(self, queries: LayerQueries, trips: list[Trip], out: torch.Tensor) -> None:
        """Write the results of this rank's own queries, joined with what they have brought from others."""
        lse = self._workspace.get("attention.lse", out.shape[:2], torch.float32)
        queries.lse(lse, [i for i, work in enumerate(self._walked) if work.travels])
        queries.finish(out)
        for trip in trips[:1]:
            trip.merge(out, lse)
        for trip in trips[1:]:
            trip.send()
            trip.attend()
            trip.send_back()
            trip.merge(out, lse)
