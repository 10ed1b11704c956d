"""Attention of a step under prefill context parallelism: gather, write, walk.

Per layer, the new KV of prefill tokens is published to the PCP group as soon as it exists. While
it travels, each rank attends to what it has: the cached context and its own new tokens. Then the
others' tokens are written to the paged cache and attended to. Decode tokens live on one owner
rank; their KV joins the other replicas once, at the end of the step (worker/pcp_manager.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from prefold.attention.backend import AttentionBackend
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

    def attend(self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, w_kv_b: torch.Tensor) -> torch.Tensor:
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
        slots.index_copy_(
            0, plan.decode_slots[self._pcp_group.rank], new_kv[plan.num_prefill_tokens : plan.num_tokens]
        )

        projection = KVProjection(self._mla, w_kv_b, self._compute_dtype, self._workspace)
        walker = Walker(self._backend, self._workspace, cache, new_kv, self._scale, self._tile_tokens)
        layer = _LayerQueries(plan, projection, q, self._workspace)
        prefill = layer.prefill_walks()
        for walk in prefill:
            walker.run(walk, segments_before_gather(walk.work))
        for walk in layer.decode_walks():
            walker.run(walk, [Segment(0, walk.work.num_keys, 0)])
        if gather is not None:
            for rank_slots, rank_kv in zip(plan.gather_slots, gather.wait(), strict=True):
                slots.index_copy_(0, rank_slots, rank_kv[: rank_slots.shape[0]])
            gather.release()
        for walk in prefill:
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
    """Queries and running states of one layer, each request in its cheaper form.

    Long prefills are up-projected; short extends and decode tokens are absorbed. The absorbed
    ones have rows of their own: `absorbed_rows` are their rows in the local batch, runs of it.
    """

    def __init__(
        self, plan: StepPlan, projection: KVProjection, q: torch.Tensor, workspace: Workspace
    ) -> None:
        mla = projection.mla
        num_heads = q.shape[1]
        self._plan = plan
        self._projection = projection
        self._shorts = [w for w in plan.prefill if prefer_absorbed(mla, w.num_queries, w.num_keys)]
        self._absorbed_rows = [slice(w.offset, w.offset + w.num_queries) for w in self._shorts]
        self._absorbed_rows.append(slice(plan.num_prefill_tokens, plan.num_tokens))
        num_absorbed = sum(rows.stop - rows.start for rows in self._absorbed_rows)

        def state(name: str, num_rows: int, dim: int) -> torch.Tensor:
            return workspace.get(f"attention.{name}", (num_rows, num_heads, dim), torch.float32)

        self._q = q
        if q.dtype != torch.float32:
            self._q = state("q", *q.shape[::2]).copy_(q)
        self._out = state("heads", plan.num_prefill_tokens, mla.v_head_dim).zero_()
        self._latent_q = state("latent_q", num_absorbed, mla.token_dim)
        self._latent_out = state("latent", num_absorbed, mla.kv_lora_rank).zero_()
        self._lse = state("lse", q.shape[0], 1).squeeze(-1).fill_(-torch.inf)
        for rows, own in self._absorbed():
            projection.absorb(q[rows], self._latent_q[own])

    def _absorbed(self) -> Iterator[tuple[slice, slice]]:
        """(rows of the local batch, the same tokens' rows among the absorbed)."""
        start = 0
        for rows in self._absorbed_rows:
            end = start + rows.stop - rows.start
            yield rows, slice(start, end)
            start = end

    def prefill_walks(self) -> list[Walk]:
        own_rows = {rows.start: own for rows, own in self._absorbed()}
        walks = []
        for work in self._plan.prefill:
            rows = slice(work.offset, work.offset + work.num_queries)
            if work in self._shorts:
                walks.append(self._latent_walk(work, own_rows[work.offset], rows))
            else:
                keys_values = self._projection.head_keys_values
                walks.append(Walk(work, self._q[rows], self._out[rows], self._lse[rows], keys_values))
        return walks

    def decode_walks(self) -> list[Walk]:
        shift = self._latent_q.shape[0] - self._plan.num_tokens
        walks = []
        for work in self._plan.decode:
            rows = slice(work.offset, work.offset + work.num_queries)
            walks.append(self._latent_walk(work, slice(rows.start + shift, rows.stop + shift), rows))
        return walks

    def _latent_walk(self, work: RequestWork, own: slice, rows: slice) -> Walk:
        keys_values = self._projection.latent_keys_values
        return Walk(work, self._latent_q[own], self._latent_out[own], self._lse[rows], keys_values)

    def finish(self, out: torch.Tensor) -> None:
        """Write all rows' results to `out` [num_tokens, num_heads * v]."""
        out[: self._plan.num_prefill_tokens].copy_(self._out.flatten(1))
        for rows, own in self._absorbed():
            self._projection.unabsorb(self._latent_out[own], out[rows])
