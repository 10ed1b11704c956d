"""Decode tokens over a sharded cache: all ranks of a DCP group compute them, each attends its shard.

A token's result is spread twice: over the ranks that have other heads (dcp_tp), and over those that have
the same heads (dcp_pcp). So it is joined in two steps, of which the layout makes one the identity:

    absorbed queries, own heads --gather over dcp_tp--> all heads of the group
      -> attention to the shard -> all-to-all over dcp_tp -> own heads, joined over dcp_tp
      -> up-projection, which commutes with the merge and makes rows short -> joined over dcp_pcp

When D divides P there are no other heads: nothing but the last step communicates. With grouped-query
attention queries are gathered as they are: ranks of such a group that have other heads share their KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.forms import KVForm
from prefold.attention.merge import join_over, packed, scatter_heads
from prefold.attention.walk import CacheReader, Segment, Walk, Walker
from prefold.distributed.group import Gather, Group
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class SharedWork:
    """A decode request's queries and this rank's part of what they see.

    Attributes:
        tokens: of the decode tokens.
        positions: [n] int64, of the tokens.
        block_ids: of the request.
        segments: of the tokens that this rank holds, as it numbers them; none if it holds none.
    """

    tokens: slice
    positions: torch.Tensor
    block_ids: torch.Tensor
    segments: tuple[Segment, ...]


AttendShard = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Attends absorbed queries [num_tokens, heads of the group, q_dim] to this rank's shard, writing results
[num_tokens, heads of the group, out_dim] and log-sum-exps [num_tokens, heads of the group], float32."""


class SharedDecode:
    """One layer's decode tokens: `send` their queries, then `attend`.

    Args:
        attend_shard: what each rank does with its part of the keys.
        dcp_tp, dcp_pcp: the parts of the DCP group.
        form: the absorbed one.
    """

    def __init__(
        self, attend_shard: AttendShard, dcp_tp: Group, dcp_pcp: Group, form: KVForm, workspace: Workspace
    ) -> None:
        self._attend_shard = attend_shard
        self._dcp_tp = dcp_tp
        self._dcp_pcp = dcp_pcp
        self._form = form
        self._workspace = workspace
        self._gather: Gather | None = None

    def send(self, q: torch.Tensor) -> None:
        """Absorb the queries [num_decode_tokens, num_heads, qk_head_dim] and start to gather them."""
        own = self._workspace.get("decode.own_q", (*q.shape[:2], self._form.q_dim), torch.float32)
        self._form.queries(q, own)
        self._gather = self._dcp_tp.start_all_gather(own)

    def attend(self, out: torch.Tensor) -> None:
        """Write the whole results to out [num_decode_tokens, num_heads, v_head_dim], of any float dtype."""
        lse = self._workspace.get("decode.lse", out.shape[:2], torch.float32)
        self.attend_parts(out, lse)
        join_over(self._dcp_pcp, out, lse, self._workspace)

    def attend_parts(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """The same, but for the last step: of each rank of dcp_pcp what it has found, and the log-sum-exp
        [num_decode_tokens, num_heads] float32. Either may be strided."""
        assert self._gather is not None
        num_tokens, num_heads, _ = out.shape
        form, workspace = self._form, self._workspace
        shape = (num_tokens, self._dcp_tp.size * num_heads)
        q = workspace.get("decode.all_q", (*shape, form.q_dim), torch.float32)
        for place, part in enumerate(self._gather.wait()):
            q[:, place * num_heads : (place + 1) * num_heads].copy_(part)
        self._gather.release()

        partial, partial_out, partial_lse = packed(workspace, "decode.partial", *shape, form.out_dim)
        self._attend_shard(q, partial_out, partial_lse)
        own = workspace.get("decode.own_out", (num_tokens, num_heads, form.out_dim), torch.float32)
        scatter_heads(self._dcp_tp, partial, own, lse, workspace)
        form.results(own, out)


class ShardWalks:
    """An AttendShard: each request's queries walk over all that the rank holds of it.

    Args:
        works: the decode requests of this unit, equal on all ranks of the DCP group but for `segments`.
    """

    def __init__(
        self,
        works: Sequence[SharedWork],
        form: KVForm,
        scale: float,
        reader: CacheReader,
        walker: Walker,
        backend: AttentionBackend,
    ) -> None:
        self._works, self._form, self._scale = works, form, scale
        self._reader, self._walker, self._backend = reader, walker, backend

    def __call__(self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        backend, form = self._backend, self._form
        queries = [Queries(q[w.tokens], form.num_kv_heads, form.out_dim) for w in self._works]
        states = backend.start(queries, self._scale, "decode")
        for work, state in zip(self._works, states):
            walk = Walk(work.tokens, state, form.keys_values)
            self._walker.run(walk, work.segments, self._reader.request(work.block_ids))
            lse[work.tokens].copy_(backend.lse(state))
            backend.finish(state, out[work.tokens])
