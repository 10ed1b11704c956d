"""Sparse attention by all ranks of a DCP group together, each to the keys that it holds.

All ranks score the keys of their shards for the same queries. The best of each are gathered, `index_topk`
numbers of 8 bytes per query and rank, and the best of all are the selection, equal on all ranks. Each attends
to what it holds of it, and partial results are joined by their log-sum-exp (attention.shared_decode).

Two kinds of tokens are attended to so. Decode tokens are on all ranks of a unit anyway, and all need the
results. Prefill tokens of the way `query` (attention.context_ways) visit: their queries and those of the
indexer are gathered over the unit first, and only their owner gets results. The step's new keys are in the
cache by then, so that a visitor finds all of its keys in the shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from prefold.attention.backend import IndexQueries
from prefold.attention.merge import merge_packed, packed
from prefold.attention.selected import attend_selected
from prefold.attention.selection import KeySelector, join_ranked, positions_of
from prefold.attention.shared_decode import SharedDecode, SharedWork
from prefold.attention.sparse_layer import PagedKeys, RequestKeys, SparseLayer
from prefold.distributed.group import Group
from prefold.kv_ownership import KVOwnership
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class Visitors:
    """Prefill tokens of a unit's ranks that visit the shards together, few enough for the buffers. They are
    ordered by rank. Equal on all ranks but for `own_tokens`.

    Attributes:
        own_tokens: [n] int64, this rank's, in its local batch.
        counts: tokens of each rank of the unit.
        works: whose they are; tokens count from the first rank's first. No segments.
    """

    own_tokens: torch.Tensor
    counts: tuple[int, ...]
    works: tuple[SharedWork, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class SparseShards:
    """One per rank, for all steps.

    Args:
        groups: used are dcp, dcp_pcp (the unit) and dcp_tp (ranks of the DCP group with other heads).
        scale: of scores.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        ownership: KVOwnership,
        selector: KeySelector,
        topk: int,
        paged: PagedKeys,
        scale: float,
        workspace: Workspace,
    ) -> None:
        self._dcp, self._unit, self._dcp_tp = groups["dcp"], groups["dcp_pcp"], groups["dcp_tp"]
        self._ownership, self._selector, self._topk = ownership, selector, topk
        self._paged, self._scale, self._workspace = paged, scale, workspace
        self._visits: Sequence[Visitors] = ()
        self._decode: Sequence[SharedWork] = ()
        self._decode_tokens = slice(0)
        self._selected = torch.empty(0)

    def begin_step(
        self, visits: Sequence[Visitors], decode: Sequence[SharedWork], decode_tokens: slice
    ) -> None:
        """`decode_tokens`: of the local batch, those of `decode`."""
        self._visits, self._decode, self._decode_tokens = visits, decode, decode_tokens
        num_decode = sum(work.tokens.stop - work.tokens.start for work in decode)
        num_tokens = sum(piece.num_tokens for piece in visits) + num_decode
        self._selected = self._workspace.get("shards.selected", (num_tokens, self._topk), torch.int32)

    def attend(self, layer: SparseLayer) -> None:
        """Write the results of this rank's visitors and decode tokens to `layer.out`."""
        rest = self._selected
        for piece in self._visits:
            selected, rest = rest[: piece.num_tokens], rest[piece.num_tokens :]
            self._attend_visitors(piece, layer, selected)
        if self._decode:
            tokens, index = self._decode_tokens, layer.index
            if index is not None:
                index = index.of_tokens(tokens)
            shared = self._start(self._decode, index, layer, rest)
            shared.send(layer.q[tokens])
            shared.attend(layer.out[tokens])

    def _attend_visitors(self, piece: Visitors, layer: SparseLayer, selected: torch.Tensor) -> None:
        q, index = self._gather(piece, layer)
        shared = self._start(piece.works, index, layer, selected)
        shared.send(q)
        shape = (len(q), q.shape[1], layer.out.shape[2])
        results, out, lse = packed(self._workspace, "shards.results", *shape)
        shared.attend_parts(out, lse)
        own = len(piece.own_tokens)
        exchange = self._unit.start_all_to_all(
            results.flatten(1),
            piece.counts,
            capacity=len(q),
            receive_counts=[own] * self._unit.size,
        )
        joint = self._workspace.get("shards.joint", (own, *shape[1:]), torch.float32)
        parts = [part.view(own, shape[1], shape[2] + 1) for part in exchange.wait()]
        merge_packed(parts, joint, self._workspace.get("shards.lse", joint.shape[:2], torch.float32))
        exchange.release()
        layer.out.index_copy_(0, piece.own_tokens, joint.to(layer.out.dtype))

    def _gather(self, piece: Visitors, layer: SparseLayer) -> tuple[torch.Tensor, IndexQueries | None]:
        """All visitors' queries, and those of the indexer, which travel in one row of float32."""
        sources = [layer.q] if layer.index is None else [layer.q, layer.index.q, layer.index.weights]
        widths = [math.prod(source.shape[1:]) for source in sources]
        shape = (max(piece.counts), sum(widths))
        sent = self._workspace.get("shards.sent", shape, torch.float32)
        own = sent[: len(piece.own_tokens)].split(widths, dim=1)
        for source, part in zip(sources, own):
            part.copy_(source.index_select(0, piece.own_tokens).flatten(1))
        gather = self._unit.start_all_gather(sent)
        parts = [part[:count].split(widths, dim=1) for part, count in zip(gather.wait(), piece.counts)]
        found = []
        for i, source in enumerate(sources):
            shape = (piece.num_tokens, widths[i])
            every = self._workspace.get(f"shards.received.{i}", shape, source.dtype)
            for rows, part in zip(every.split(piece.counts), parts):
                rows.copy_(part[i])
            found.append(every.view(piece.num_tokens, *source.shape[1:]))
        gather.release()
        return found[0], IndexQueries(found[1], found[2]) if layer.index is not None else None

    def _start(
        self,
        works: Sequence[SharedWork],
        index: IndexQueries | None,
        layer: SparseLayer,
        selected: torch.Tensor,
    ) -> SharedDecode:
        """Select, if the layer has an indexer, for the tokens of `works`, and prepare to attend to that."""
        keys = [self._paged.of(layer, work.block_ids) for work in works]
        if index is not None:
            self._select(works, index, keys, selected)

        def attend_shard(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
            rows, row_format = keys[0].rows, self._paged.formats[0]
            attend_selected(q, selected, rows, row_format, self._scale, out, lse, self._workspace)

        return SharedDecode(attend_shard, self._dcp_tp, self._unit, layer.forms.absorbed, self._workspace)

    def _select(
        self,
        works: Sequence[SharedWork],
        index: IndexQueries,
        keys: Sequence[RequestKeys],
        selected: torch.Tensor,
    ) -> None:
        """Each rank selects from its shard, then all from what each has found. Writes where it lies here."""
        longest = max(int(work.positions.max()) for work in works) + 1
        width = min(self._topk, int(self._ownership.local_lengths(longest).max()))
        ranks = self._workspace.get("shards.ranks", (len(index.q), width), torch.int64)
        for work, own in zip(works, keys, strict=True):
            part = index.of_tokens(work.tokens)
            self._selector.select(part, work.positions, own.index_keys, own.held, ranks[work.tokens])
        best = positions_of(join_ranked(self._dcp, ranks, self._topk))
        for work, own in zip(works, keys, strict=True):
            slots = own.held.slots(best[work.tokens], own.block_ids)
            selected[work.tokens, : best.shape[1]] = slots
        selected[:, best.shape[1] :] = -1
