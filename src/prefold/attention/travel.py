"""Queries that travel to where the keys are: the ways `sliced` and `query` (attention.context_ways).

All of a request's context [0, N) is visible to all of its new queries, so a rank can attend any queries
to any part of it, in any order. The queries of a group's ranks are gathered; each rank attends all of
them to the part of the context that is its own, and sends outputs and log-sum-exp back to the
queries' owners, who merge them. What part is a rank's own is all that tells the ways apart: with a
replicated cache its slice, with a sharded one its shard.

Queries travel as they are and come back as values, if all ranks of the group have the same heads: each
rank chooses the form of attention itself. Where heads differ they travel in the absorbed form and come back
so, because a rank has no up-projection of other heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.forms import KVForms, prefer_absorbed
from prefold.attention.lse import merge_
from prefold.attention.merge import merge_packed, packed
from prefold.attention.paged import PagedCache, PagedQueries, attend_rows
from prefold.attention.plan import TravelPiece
from prefold.attention.queries import LayerQueries
from prefold.attention.walk import CacheReader, Segment, Walk, Walker
from prefold.config import GQAConfig, MLAConfig
from prefold.distributed.group import Exchange, Gather, Group
from prefold.limits import ABSORBED_TOKENS
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class TravelTools:
    """What the pieces of a layer have in common.

    Attributes:
        group: among whose ranks queries travel.
        absorbed: they travel in that form.
    """

    group: Group
    absorbed: bool
    forms: KVForms
    attention: MLAConfig | GQAConfig
    scale: float
    stored: PagedCache
    reader: CacheReader
    walker: Walker
    backend: AttentionBackend
    workspace: Workspace


class Trip:
    """One piece's way through a layer: `send`, `attend`, `send_back`, `merge`, in this order.

    All ranks of the group take part in `send` and `send_back`, whether or not they have queries or keys.

    Args:
        paged: the piece's queries, if they are attended to the cache as it is stored.
    """

    def __init__(
        self, piece: TravelPiece, tools: TravelTools, q: torch.Tensor, paged: PagedQueries | None
    ) -> None:
        self._piece = piece
        self._paged = paged
        self._tools = tools
        self._q = q
        self._num_heads = q.shape[1]
        self._form = tools.forms.choose(tools.absorbed)
        self._is_plain = self._form is tools.forms.plain
        self._q_dim, self._out_dim = self._form.q_dim, self._form.out_dim
        self._there: Gather | None = None
        self._back: Exchange | None = None
        self._results = torch.empty(0)

    def send(self) -> None:
        """Start to gather the queries."""
        tools, piece = self._tools, self._piece
        dtype = self._q.dtype if self._is_plain else torch.float32
        shape = (max(piece.counts), self._num_heads, self._q_dim)
        sent = tools.workspace.get("travel.sent", shape, dtype)
        own = sent[: len(piece.own_tokens)]
        if self._is_plain:
            torch.index_select(self._q, 0, piece.own_tokens, out=own)
        else:
            q = tools.workspace.get("travel.own_q", (len(own), *self._q.shape[1:]), self._q.dtype)
            self._form.queries(torch.index_select(self._q, 0, piece.own_tokens, out=q), own)
        self._there = tools.group.start_all_gather(sent)

    def attend(self) -> None:
        """Attend all queries to this rank's part of their contexts."""
        tools, piece = self._tools, self._piece
        assert self._there is not None
        shape = (piece.num_queries, self._num_heads, self._q_dim)
        received = self._there.wait()
        q = tools.workspace.get("travel.q", shape, received[0].dtype)
        for rows, count, part in zip(piece.rows, piece.counts, received, strict=True):
            q.index_copy_(0, rows, part[:count])
        self._there.release()
        shape = (piece.num_queries, self._num_heads, self._out_dim)
        self._results, out, lse = packed(tools.workspace, "travel.results", *shape)
        if self._is_plain and self._paged is not None:
            attend_rows(self._paged, tools.stored, q, tools.forms, tools.scale, out, lse, tools.workspace)
        elif self._is_plain:
            self._attend_plain(q, out, lse)
        elif self._paged is not None:
            tools.stored.attend(self._paged, q, self._form, None, tools.scale, out, lse)
        else:
            self._attend_absorbed(q, out, lse)

    def _attend_plain(self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        tools, visits = self._tools, self._piece.visits
        requests, room = [], ABSORBED_TOKENS
        for visit in visits:
            num_queries = visit.queries.stop - visit.queries.start
            absorbed = num_queries <= room and prefer_absorbed(
                tools.attention, num_queries, visit.end - visit.start
            )
            room -= absorbed * num_queries
            requests.append((visit.queries, absorbed))
        queries = LayerQueries(
            q, requests, tools.forms, tools.scale, tools.backend, tools.workspace, "travel"
        )
        self._walk(queries.walks)
        queries.lse(lse, range(len(visits)))
        queries.finish(out)

    def _attend_absorbed(self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        tools, visits, form = self._tools, self._piece.visits, self._form
        queries = [Queries(q[v.queries], form.num_kv_heads, form.out_dim) for v in visits]
        states = tools.backend.start(queries, tools.scale, "travel")
        self._walk([Walk(v.queries, state, form.keys_values) for v, state in zip(visits, states)])
        for visit, state in zip(visits, states):
            lse[visit.queries].copy_(tools.backend.lse(state))
            tools.backend.finish(state, out[visit.queries])

    def _walk(self, walks: list[Walk]) -> None:
        for visit, walk in zip(self._piece.visits, walks, strict=True):
            segment = Segment(visit.start, visit.end, first_query=0)
            self._tools.walker.run(walk, [segment], self._tools.reader.request(visit.block_ids))

    def send_back(self) -> None:
        """Start to bring the results to the queries' owners."""
        tools, piece = self._tools, self._piece
        width = self._num_heads * (self._out_dim + 1)
        results = self._results.view(piece.num_queries, width)
        sent = tools.workspace.get("travel.back", results.shape, torch.float32)
        torch.index_select(results, 0, torch.cat(piece.rows), out=sent)
        own = len(piece.own_tokens)
        self._back = tools.group.start_all_to_all(
            sent,
            piece.counts,
            capacity=piece.num_queries,
            receive_counts=[own] * tools.group.size,
        )

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add what the context contributes to this rank's results.

        Args:
            out: [num_local_tokens, num_heads, v_head_dim], what the queries got from other keys; changed.
            lse: [num_local_tokens, num_heads] float32; changed.
        """
        tools, own = self._tools, self._piece.own_tokens
        assert self._back is not None
        shape = (len(own), self._num_heads, self._out_dim)
        _, context, context_lse = packed(tools.workspace, "travel.context", *shape)
        parts = [part.view(*shape[:2], self._out_dim + 1) for part in self._back.wait()]
        merge_packed(parts, context, context_lse)
        self._back.release()
        if not self._is_plain:
            values = tools.workspace.get("travel.values", (len(own), *out.shape[1:]), torch.float32)
            self._form.results(context, values)
            context = values
        rows = tools.workspace.get("travel.own_out", context.shape, out.dtype)
        torch.index_select(out, 0, own, out=rows)
        joint = tools.workspace.get("travel.joint", context.shape, torch.float32).copy_(rows)
        joint_lse = lse.index_select(0, own)
        merge_(joint, joint_lse, context, context_lse)
        out.index_copy_(0, own, rows.copy_(joint))
        lse.index_copy_(0, own, joint_lse)
