"""DeepSeek Sparse Attention of a step: select keys, attend to them in absorbed form.

A query that sees no more keys than it may attend to is attended densely, exactly as without sparse
attention; so the first `index_topk` tokens of every request are. For the others, the indexer's queries of a
rank are scored against all keys before them. These are all in the rank's own cache once the step's new
tokens, latents and index keys in one row, have been gathered and written: so PCP needs no collective of
its own for the indexer. The keys must be there whole (D = 1).

A selection is made by the layers that have an indexer and used by those after it, up to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from prefold.attention.backend import HeadRows, IndexQueries, LatentRows
from prefold.attention.context_parallel import AttentionSetup, ContextParallelAttention
from prefold.attention.forms import KVForm, KVForms, prefer_absorbed
from prefold.attention.plan import RequestWork, StepPlan
from prefold.attention.queries import LayerQueries
from prefold.attention.selected import attend_selected
from prefold.attention.selection import QUERY_BLOCK, KeySelector
from prefold.attention.walk import CacheReader, Run, Segment, rows_of
from prefold.config import MLAConfig


@dataclass(frozen=True, eq=False)
class SparseRun:
    """Consecutive queries with a selection.

    Attributes:
        run: the queries.
        rows: of the rank's selections.
        block_ids: of their request.
    """

    run: Run
    rows: slice
    block_ids: torch.Tensor


class SparseAttention(ContextParallelAttention):
    """The AttentionContext of a rank for models with an indexer."""

    def __init__(self, setup: AttentionSetup) -> None:
        super().__init__(setup)
        attention = setup.attention
        assert isinstance(attention, MLAConfig)
        assert attention.dsa is not None
        assert setup.ownership.dcp_size == 1, "refused at start-up"
        self._mla = attention
        _, self._index_format = setup.formats
        self._topk = attention.dsa.index_topk
        self._selector = KeySelector(self._topk, setup.tile_tokens, setup.workspace)
        self._dense: list[RequestWork] = []
        self._sparse: list[SparseRun] = []
        self._selected: torch.Tensor | None = None

    def begin_step(self, plan: StepPlan) -> None:
        """See ContextParallelAttention.begin_step."""
        super().begin_step(plan)
        assert not plan.travel
        assert not plan.kv_tiles
        assert not plan.shared_decode
        self._dense = [work for w in plan.works if (work := dense_part(w, self._topk, self._mla)) is not None]
        self._sparse = sparse_runs(plan.works, self._topk)
        self._selected = None

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        plan, mla, workspace = self._plan, self._mla, self._workspace
        assert plan is not None
        assert isinstance(rows, LatentRows)
        assert q.shape[0] == plan.num_tokens, (q.shape, plan.num_tokens)
        new_kv = self._encode(kv, plan)
        cache = self._kv_cache[layer_idx][..., : new_kv.shape[1]]
        width = self._format.width
        latents = cache[..., :width]
        forms = KVForms.of(rows, self._compute_dtype, self._backend, workspace)
        gather = self._groups["pcp"].start_all_gather(new_kv[: plan.gather_tokens])
        self._write(cache, new_kv[plan.num_prefill_tokens : plan.num_tokens], plan.write_decode)

        requests = [(work.tokens, work.absorbed) for work in self._dense]
        queries = LayerQueries(q, requests, forms, self._scale, self._backend, workspace, "attention")
        reader = CacheReader(latents, self._format, workspace)
        for work, walk in zip(self._dense, queries.walks):
            for run, segment in zip(work.runs, work.own):
                source = rows_of(new_kv[:, :width], run.start - run.offset, self._format)
                self._walker.run(walk, [segment], source)
            self._walker.run(walk, work.cached, reader.request(work.block_ids))
        all_new = self._collect(gather, plan, new_kv.shape[1])
        self._write(cache, all_new, plan.write_new)
        for work, walk in zip(self._dense, queries.walks):
            source = rows_of(all_new[:, :width], -work.first_new_row, self._format)
            self._walker.run(walk, work.others, source)
        out = workspace.get("attention.out", (*q.shape[:2], mla.v_head_dim), self._compute_dtype)
        queries.finish(out)

        if rows.index is not None:
            self._select(rows.index, cache[..., width:])
        self._attend_selected(q, forms.absorbed, latents, out)
        return out.flatten(1)

    def _select(self, index: IndexQueries, index_keys: torch.Tensor) -> None:
        """Positions of the selected keys of all queries that have a choice."""
        num_queries = sum(part.rows.stop - part.rows.start for part in self._sparse)
        self._selected = self._workspace.get("sparse.selected", (num_queries, self._topk), torch.int32)
        reader = CacheReader(index_keys, self._index_format, self._workspace)
        for part in self._sparse:
            keys = reader.request(part.block_ids)
            self._selector.select(index, part.run, keys, self._selected[part.rows])

    def _attend_selected(
        self, q: torch.Tensor, absorbed: KVForm, latents: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert self._selected is not None, "the first layer of a stage has an indexer"
        mla, workspace = self._mla, self._workspace
        by_slot = latents.view(-1, latents.shape[-1])
        for part in self._sparse:
            for start in range(0, part.rows.stop - part.rows.start, QUERY_BLOCK):
                end = min(start + QUERY_BLOCK, part.rows.stop - part.rows.start)
                tokens = slice(part.run.offset + start, part.run.offset + end)
                shape = (end - start, q.shape[1])
                latent_q = workspace.get("sparse.latent_q", (*shape, mla.token_dim), torch.float32)
                absorbed.queries(q[tokens], latent_q)
                latent_out = workspace.get("sparse.latent_out", (*shape, mla.kv_lora_rank), torch.float32)
                lse = workspace.get("sparse.lse", shape, torch.float32)
                slots = self._slots(self._selected[part.rows][start:end], part.block_ids)
                attend_selected(
                    latent_q, slots, by_slot, self._format, self._scale, latent_out, lse, workspace
                )
                absorbed.results(latent_out, out[tokens])

    def _slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Where the cache has a request's tokens; any shape."""
        block_size = self._kv_cache.shape[2]
        positions = positions.long()
        return block_ids[positions // block_size] * block_size + positions % block_size


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


def sparse_runs(works: Sequence[RequestWork], topk: int) -> list[SparseRun]:
    """The queries that see more than `topk` keys, and where their selections go."""
    found: list[SparseRun] = []
    end = 0
    for work in works:
        for run in work.runs:
            dense = min(max(topk - run.start, 0), run.end - run.start)
            rest = Run(run.start + dense, run.end, run.offset + dense)
            if rest.start < rest.end:
                start, end = end, end + rest.end - rest.start
                found.append(SparseRun(rest, slice(start, end), work.block_ids))
    return found
