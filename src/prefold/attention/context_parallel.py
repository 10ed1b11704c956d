"""Attention of a step under prefill context parallelism: gather, write, walk.

Per layer, the new KV of prefill tokens is published to the PCP group as soon as it exists. While
it travels, each rank attends to what it has: the cached context and its own new tokens. Then the
others' tokens are written to the paged cache and attended to. Decode tokens live on one owner
rank; their KV joins the other replicas once, at the end of the step (worker/pcp_manager.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.mla import KVProjection, prefer_absorbed
from prefold.attention.walk import (
    RequestWork,
    Segment,
    Walk,
    Walker,
    segments_after_gather,
    segments_before_gather,
)
from prefold.config import MLAConfig
from prefold.distributed.group import Group
from prefold.workspace import Workspace


@dataclass(frozen=True)
class StepPlan:
    """What attention must know of a step, equal in meaning on all ranks, built by PCPManager.

    Attributes:
        prefill, decode: this rank's requests; prefill tokens come first in the local batch.
        num_prefill_tokens: this rank's.
        num_tokens: this rank's, prefill and decode.
        gather_tokens: prefill tokens of the fullest rank: the length every rank sends.
        gather_slots: per PCP rank, cache slots of its prefill tokens, [num_tokens of that rank] int64.
        decode_slots: per PCP rank, cache slots of its decode tokens, int64.
    """

    prefill: tuple[RequestWork, ...]
    decode: tuple[RequestWork, ...]
    num_prefill_tokens: int
    num_tokens: int
    gather_tokens: int
    gather_slots: tuple[torch.Tensor, ...]
    decode_slots: tuple[torch.Tensor, ...]


class ContextParallelAttention:
    """The AttentionContext of a rank: one object for all steps, one `StepPlan` each.

    Args:
        kv_cache: [num_layers, num_blocks, block_size, token_dim] in the cache's dtype.
        pcp_group: collective over the ranks that split the prompt.
        tile_tokens: keys that are read and projected at a time.
        compute_dtype: dtype of projections and of the result.
    """

    def __init__(
        self,
        mla: MLAConfig,
        scale: float,
        kv_cache: torch.Tensor,
        pcp_group: Group,
        backend: AttentionBackend,
        workspace: Workspace,
        tile_tokens: int,
        compute_dtype: torch.dtype,
    ) -> None:
        self._mla = mla
        self._scale = scale
        self._kv_cache = kv_cache
        self._pcp_group = pcp_group
        self._backend = backend
        self._workspace = workspace
        self._tile_tokens = tile_tokens
        self._compute_dtype = compute_dtype
        self._plan: StepPlan | None = None

    def begin_step(self, plan: StepPlan) -> None:
        """Set the step that the coming `attend` calls, one per layer, belong to."""
        self._plan = plan

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        plan = self._plan
        assert plan is not None
        assert q.shape[0] == plan.num_tokens, (q.shape, plan.num_tokens)
        cache = self._kv_cache[layer_idx]
        slots = cache.view(-1, cache.shape[-1])
        new_kv = self._to_cache_dtype(kv, plan)
        gather = None
        if plan.gather_tokens > 0:
            gather = self._pcp_group.start_all_gather(new_kv[: plan.gather_tokens])
        own_decode = new_kv[plan.num_prefill_tokens : plan.num_tokens]
        slots.index_copy_(0, plan.decode_slots[self._pcp_group.rank], own_decode)

        projection = KVProjection(self._mla, w_uk, w_uv, self._compute_dtype, self._backend, self._workspace)
        walker = Walker(self._backend, self._workspace, cache, new_kv, self._tile_tokens)
        layer = _LayerQueries(plan, projection, q, self._scale, self._backend, self._workspace)
        for walk in layer.prefill:
            walker.run(walk, segments_before_gather(walk.work))
        for walk in layer.decode:
            walker.run(walk, [Segment(0, walk.work.num_keys, 0)])
        if gather is not None:
            for rank_slots, rank_kv in zip(plan.gather_slots, gather.wait(), strict=True):
                slots.index_copy_(0, rank_slots, rank_kv[: rank_slots.shape[0]])
            gather.release()
        for walk in layer.prefill:
            walker.run(walk, segments_after_gather(walk.work))
        out = self._workspace.get(
            "attention.out", (q.shape[0], q.shape[1] * self._mla.v_head_dim), self._compute_dtype
        )
        layer.finish(out)
        return out

    def _to_cache_dtype(self, kv: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """New KV in the cache's dtype, with room for the rows that pad the gather."""
        rows = max(plan.gather_tokens, plan.num_tokens)
        new_kv = self._workspace.get("attention.new_kv", (rows, kv.shape[1]), self._kv_cache.dtype)
        new_kv[: plan.num_tokens].copy_(kv)
        return new_kv


class _LayerQueries:
    """One layer's queries, each request in the form that is cheaper for it.

    Long prefills are up-projected; short extends and decode tokens are absorbed. Absorbed tokens
    have rows of their own in `latent_q` and `latent_out`.
    """

    def __init__(
        self,
        plan: StepPlan,
        projection: KVProjection,
        q: torch.Tensor,
        scale: float,
        backend: AttentionBackend,
        workspace: Workspace,
    ) -> None:
        mla = projection.mla
        self._projection = projection
        self._backend = backend
        works = (*plan.prefill, *plan.decode)
        absorbed = [prefer_absorbed(mla, w.num_queries, w.num_keys) for w in plan.prefill]
        absorbed += [True] * len(plan.decode)
        # Decode tokens are neighbours in both batches: one projection serves them all.
        runs = [w.tokens for w, is_absorbed in zip(plan.prefill, absorbed) if is_absorbed]
        runs.append(slice(plan.num_prefill_tokens, plan.num_tokens))
        ends = list(accumulate(run.stop - run.start for run in runs))
        starts = [0, *ends[:-1]]
        self._absorbed = [(run, slice(*own)) for run, *own in zip(runs, starts, ends) if run.stop > run.start]
        shape = (ends[-1], q.shape[1])
        latent_q = workspace.get("attention.latent_q", (*shape, mla.token_dim), torch.float32)
        self._latent_out = workspace.get("attention.latent_out", (*shape, mla.kv_lora_rank), torch.float32)
        for run, own in self._absorbed:
            projection.absorb(q[run], latent_q[own])

        queries: list[Queries] = []
        self._own_rows: list[slice | None] = []
        start = 0
        for work, is_absorbed in zip(works, absorbed):
            if is_absorbed:
                own = slice(start, start + work.num_queries)
                start = own.stop
                queries.append(Queries(latent_q[own], 1, mla.kv_lora_rank))
                self._own_rows.append(own)
            else:
                queries.append(Queries(q[work.tokens], q.shape[1], mla.v_head_dim))
                self._own_rows.append(None)
        walks = [
            Walk(work, state, projection.latent_keys_values if is_absorbed else projection.head_keys_values)
            for work, state, is_absorbed in zip(works, backend.start(queries, scale), absorbed)
        ]
        self.prefill, self.decode = walks[: len(plan.prefill)], walks[len(plan.prefill) :]

    def finish(self, out: torch.Tensor) -> None:
        """Write all results to `out` [num_tokens, num_heads * v]."""
        num_tokens, v_dim = out.shape[0], self._projection.mla.v_head_dim
        by_head = out.view(num_tokens, out.shape[1] // v_dim, v_dim)  # there may be no tokens: no -1
        for walk, own in zip((*self.prefill, *self.decode), self._own_rows):
            target = by_head[walk.work.tokens] if own is None else self._latent_out[own]
            self._backend.finish(walk.state, target)
        for run, own in self._absorbed:
            self._projection.unabsorb(self._latent_out[own], out[run])
