"""Decode tokens over a sharded cache: all ranks of a DCP group compute them, each attends its shard.

A token's result is spread twice: over the ranks that have other heads (dcp_tp), and over those that have
the same heads (dcp_pcp). So it is joined in two steps, of which the layout makes one the identity:

    latent queries, own heads --gather over dcp_tp--> all heads of the group
      -> attention to the shard -> all-to-all over dcp_tp -> own heads, joined over dcp_tp
      -> up-projection, which commutes with the merge and makes rows short -> joined over dcp_pcp

When D divides P there are no other heads: nothing but the last step communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.merge import join_over, packed, scatter_heads
from prefold.attention.mla import KVProjection
from prefold.attention.walk import CacheReader, Segment, Walk, Walker
from prefold.distributed.group import Gather, Group
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class SharedWork:
    """A decode request's queries and this rank's part of what they see.

    Attributes:
        tokens: of the decode tokens.
        block_ids: of the request.
        segments: of the tokens that this rank holds, as it numbers them; none if it holds none.
    """

    tokens: slice
    block_ids: torch.Tensor
    segments: tuple[Segment, ...]


class SharedDecode:
    """One layer's decode tokens: `send` their queries, then `attend`.

    Args:
        works: the decode requests of this unit, equal on all ranks of the DCP group but for `segments`.
        dcp_tp, dcp_pcp: the parts of the DCP group.
    """

    def __init__(
        self,
        works: Sequence[SharedWork],
        dcp_tp: Group,
        dcp_pcp: Group,
        projection: KVProjection,
        scale: float,
        reader: CacheReader,
        walker: Walker,
        backend: AttentionBackend,
        workspace: Workspace,
    ) -> None:
        self._works = works
        self._dcp_tp = dcp_tp
        self._dcp_pcp = dcp_pcp
        self._projection = projection
        self._scale = scale
        self._reader = reader
        self._walker = walker
        self._backend = backend
        self._workspace = workspace
        self._gather: Gather | None = None

    def send(self, q: torch.Tensor) -> None:
        """Absorb the queries [num_decode_tokens, num_heads, qk_head_dim] and start to gather them."""
        shape = (*q.shape[:2], self._projection.mla.token_dim)
        latent_q = self._workspace.get("decode.latent_q", shape, torch.float32)
        self._projection.absorb(q, latent_q)
        self._gather = self._dcp_tp.start_all_gather(latent_q)

    def attend(self, out: torch.Tensor) -> None:
        """Write the whole results to out [num_decode_tokens, num_heads, v_head_dim], of any float dtype."""
        assert self._gather is not None
        num_tokens, num_heads, _ = out.shape
        mla, workspace = self._projection.mla, self._workspace
        shape = (num_tokens, self._dcp_tp.size * num_heads)
        q = workspace.get("decode.all_q", (*shape, mla.token_dim), torch.float32)
        for place, part in enumerate(self._gather.wait()):
            q[:, place * num_heads : (place + 1) * num_heads].copy_(part)
        self._gather.release()

        rank = mla.kv_lora_rank
        partial, partial_out, partial_lse = packed(workspace, "decode.partial", *shape, rank)
        self._attend_shard(q, partial_out, partial_lse)
        latent = workspace.get("decode.latent_out", (num_tokens, num_heads, rank), torch.float32)
        lse = workspace.get("decode.lse", (num_tokens, num_heads), torch.float32)
        scatter_heads(self._dcp_tp, partial, latent, lse, workspace)
        self._projection.unabsorb(latent, out)
        join_over(self._dcp_pcp, out, lse, workspace)

    def _attend_shard(self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        backend, rank = self._backend, self._projection.mla.kv_lora_rank
        states = backend.start([Queries(q[w.tokens], 1, rank) for w in self._works], self._scale, "decode")
        for work, state in zip(self._works, states):
            walk = Walk(work.tokens, state, self._projection.latent_keys_values)
            self._walker.run(walk, work.segments, self._reader.request(work.block_ids))
            lse[work.tokens].copy_(backend.lse(state))
            backend.finish(state, out[work.tokens])
