"""Expert parallelism: whole experts on ranks, and tokens that travel to those ranks only.

In each layer a rank sends every one of its tokens once to each rank that holds at least one of the token's
experts, and gets one row back from each: the sum over those experts, weighted. Sizes follow from the
routing, so nothing is sent or computed for padding. While tokens travel, the shared expert is computed.

Tokens are computed in several places on purpose: all tokens on every rank of a TP group, decode tokens on
every rank of a `dcp_pcp` group as well. Each is sent by one of those ranks only (see `TokenShare`).
What comes back is added to that rank's summand of the shared expert, in the rows that it sent; decode
rows then go round the `dcp_pcp` group, and the all-reduce over TP, which the shared expert needs anyway,
completes all rows on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from prefold.traffic import dispatch_row_bytes, experts_of

if TYPE_CHECKING:
    from prefold.distributed.group import Exchange, Group
    from prefold.workspace import Workspace


@dataclass(frozen=True)
class ExpertPlan:
    """What a step's layers need to know: the rows are prefill tokens, then decode tokens.

    Attributes:
        num_prefill_tokens: of this PCP rank; the same tokens on all ranks of its TP group.
        num_decode_tokens: the same tokens on all ranks of its TP and its `dcp_pcp` group.
        capacity_tokens: no rank of the EP group sends more tokens (the largest `dispatch_capacity` of
            all replicas). Equal on all of them; 0 if none of them has tokens.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    capacity_tokens: int


def dispatch_capacity(
    num_prefill_by_rank: Sequence[int] | np.ndarray,
    num_decode_by_rank: Sequence[int] | np.ndarray,
    tp: int,
    u: int,
) -> int:
    """No rank of one replica sends more tokens to experts in a step than this; 0 only without tokens.

    A pure function of the partition: equal on all ranks of the replica. Reached where all ranks have
    equally many tokens. Of several replicas the largest counts.

    Args:
        num_prefill_by_rank, num_decode_by_rank: [P] tokens of each PCP rank; ranks of one `dcp_pcp`
            group have the same decode tokens.
        tp: ranks of a TP group.
        u: ranks of a `dcp_pcp` group, min(D, P).

    >>> dispatch_capacity([5, 4], [3, 3], tp=2, u=2)
    4
    """
    prefill, decode = np.asarray(num_prefill_by_rank), np.asarray(num_decode_by_rank)
    # Cutting by TP and then by dcp_pcp leaves as many in the largest part as cutting by both at once.
    return int((-(-prefill // tp) - (-decode // (tp * u))).max(initial=0))


@dataclass(frozen=True)
class TokenShare:
    """Which of its rows a rank sends: every token is sent by exactly one of the ranks that compute it.

    Prefill rows are cut in TP runs, decode rows in TP runs and each of those in `u` runs of `stride`
    rows, one for each rank of the `dcp_pcp` group; the last of these may be short or empty.

        5 prefill and 3 decode rows, tp = 2, u = 2:

        row               0 1 2 3 4 | 5 6 7
        tp 0, place 0     x x       | x          the run of tp 0 is row 5: stride 1
        tp 0, place 1     x x       |            (with other prefill rows: another PCP rank)
        tp 1, place 0         x x x |   x        the run of tp 1 is rows 6 and 7: stride 1
        tp 1, place 1         x x x |     x

    >>> for tp_rank in range(2):
    ...     for place in range(2):
    ...         share = TokenShare.of(ExpertPlan(5, 3, 4), tp_rank, 2, place, 2)
    ...         print(share.rows.tolist(), share.decode_run, share.decode_sent)
    [0, 1, 5] range(5, 6) range(5, 6)
    [0, 1] range(5, 6) range(6, 6)
    [2, 3, 4, 6] range(6, 8) range(6, 7)
    [2, 3, 4, 7] range(6, 8) range(7, 8)

    Attributes:
        rows: rows that this rank sends, ascending.
        decode_run: decode rows that the `dcp_pcp` group sends.
        decode_sent: those of them that this rank sends.
        stride: rows of the longest part of `decode_run`, equal in the `dcp_pcp` group.
    """

    rows: np.ndarray
    decode_run: range
    decode_sent: range
    stride: int

    @classmethod
    def of(cls, plan: ExpertPlan, tp_rank: int, tp: int, place: int, u: int) -> TokenShare:
        prefill, decode = plan.num_prefill_tokens, plan.num_decode_tokens
        start = prefill + decode * tp_rank // tp
        end = prefill + decode * (tp_rank + 1) // tp
        stride = -(-(end - start) // u)
        sent = range(min(start + place * stride, end), min(start + (place + 1) * stride, end))
        prefill_sent = np.arange(prefill * tp_rank // tp, prefill * (tp_rank + 1) // tp)
        rows = np.concatenate([prefill_sent, np.arange(sent.start, sent.stop)])
        return cls(rows, range(start, end), sent, stride)


@dataclass(frozen=True)
class PackedRows:
    """Tokens as they travel: views of `data` [n, width] uint8, see `dispatch_row_bytes`.

    Attributes:
        hidden: [n, hidden] of the compute dtype.
        ids, weights: [n, top_k] int32 and float32: all experts of the token, also those elsewhere.
    """

    data: torch.Tensor
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class RowFormat:
    """What a travelling row holds."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    def buffer(self, name: str, num_rows: int, workspace: Workspace) -> PackedRows:
        start, width = dispatch_row_bytes(self.hidden_size, self.top_k, self.dtype.itemsize)
        data = workspace.get(name, (num_rows, width), torch.uint8)
        words = data[:, start : start + 8 * self.top_k].view(torch.int32)
        return PackedRows(
            data=data,
            hidden=data.view(self.dtype)[:, : self.hidden_size],
            ids=words[:, : self.top_k],
            weights=words[:, self.top_k :].view(torch.float32),
        )


@dataclass(frozen=True)
class Dispatch:
    """Tokens on their way to experts.

    Attributes:
        rows: this rank's row that each sent row is a copy of, by destination.
        counts: [E] rows to each place of the EP group; as many come back.
    """

    exchange: Exchange
    format: RowFormat
    rows: torch.Tensor
    counts: list[int]


class ExpertParallel:
    """Moves tokens to the ranks of their experts and back. One object per rank, for all layers.

    All ranks of the EP group call `begin_step` once per step and then go through the same layers, with
    tokens or without. In a step whose capacity is 0 nothing is called.

    Args:
        groups: of this rank; "ep", "tp" and "dcp_pcp" are used.

    Attributes:
        held: experts of this rank; may be empty.
        share: of the present step's rows.
    """

    def __init__(self, groups: dict[str, Group], num_experts: int, workspace: Workspace) -> None:
        self._ep, self._tp, self._dcp_pcp = groups["ep"], groups["tp"], groups["dcp_pcp"]
        self._workspace = workspace
        by_place = [experts_of(place, num_experts, self._ep.size) for place in range(self._ep.size)]
        self.held = by_place[self._ep.rank]
        self._place_of_expert = np.repeat(np.arange(self._ep.size), [len(held) for held in by_place])
        self.begin_step(ExpertPlan(0, 0, 0))

    def begin_step(self, plan: ExpertPlan) -> None:
        """Layers called from now on compute the rows of `plan`."""
        self.share = TokenShare.of(plan, self._tp.rank, self._tp.size, self._dcp_pcp.rank, self._dcp_pcp.size)
        self.capacity_tokens = plan.capacity_tokens
        assert len(self.share.rows) <= plan.capacity_tokens, (len(self.share.rows), plan)

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Dispatch:
        """Start to send this rank's share of x [n, hidden] to the experts ids [n, top_k].

        `weights` [n, top_k] float32 go along. All three are copied.
        """
        sent, format = self.share.rows, RowFormat(x.shape[1], ids.shape[1], x.dtype)
        places = self._place_of_expert[ids.cpu().numpy()[sent]]  # [sent, top_k]
        needed = np.zeros((self._ep.size, len(sent)), bool)
        needed[places.T, np.arange(len(sent))] = True
        destination, token = needed.nonzero()
        counts = np.bincount(destination, minlength=self._ep.size).tolist()
        rows = torch.from_numpy(sent[token]).to(x.device)

        packed = format.buffer("ep.sent", len(rows), self._workspace)
        torch.index_select(x, 0, rows, out=packed.hidden)
        torch.index_select(weights, 0, rows, out=packed.weights)
        packed.ids.copy_(ids[rows])
        capacity = self.capacity_tokens * min(self._ep.size, format.top_k)
        exchange = self._ep.start_all_to_all(packed.data, counts, capacity)
        return Dispatch(exchange, format, rows, counts)

    def receive(self, dispatch: Dispatch) -> tuple[PackedRows, list[int]]:
        """What other ranks sent to this one, by source, and how many rows each did."""
        parts = dispatch.exchange.wait()
        counts = [len(part) for part in parts]
        received = dispatch.format.buffer("ep.received", sum(counts), self._workspace)
        torch.cat(parts, out=received.data)
        dispatch.exchange.release()
        return received, counts

    def combine_(
        self, out: torch.Tensor, dispatch: Dispatch, result: torch.Tensor, counts: list[int]
    ) -> None:
        """Send `result` [received, hidden] back, and add to out [n, hidden] what comes back.

        Added in the order of the ranks. Afterwards the ranks of a TP group have everything between them.
        """
        # A rank may have to answer every token of every rank.
        capacity = self.capacity_tokens * self._ep.size
        back = self._ep.start_all_to_all(result, counts, capacity, receive_counts=dispatch.counts)
        start = 0
        for part in back.wait():
            out.index_add_(0, dispatch.rows[start : start + len(part)], part)
            start += len(part)
        back.release()
        self._gather_decode_(out)

    def _gather_decode_(self, out: torch.Tensor) -> None:
        """Take decode rows from the rank of the `dcp_pcp` group that sent them."""
        run, sent, stride = self.share.decode_run, self.share.decode_sent, self.share.stride
        own = self._workspace.get("ep.decode", (stride, out.shape[1]), out.dtype)
        own[: len(sent)].copy_(out[sent.start : sent.stop])
        shape = (self._dcp_pcp.size, *own.shape)
        gathered = self._workspace.get("ep.decode_gathered", shape, out.dtype)
        self._dcp_pcp.all_gather(own, out=gathered)
        # Only the end of the last parts is unused: one after the other they are the run.
        out[run.start : run.stop].copy_(gathered.flatten(0, 1)[: len(run)])
