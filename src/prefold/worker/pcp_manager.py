"""Prefill context parallelism around a forward: split the global batch, restore what is sampled.

    global batch -> partition -> local batch -> forward -> exchange -> rows to sample from

At P = 1 the same code is the identity. Everything but the data of the exchange is derived from the
global batch, without communication, and comes out equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from prefold.attention.context_ways import ContextWays
from prefold.attention.plan import StepPlan
from prefold.distributed.group import Group
from prefold.distributed.pcp_layout import Partition, TokenOrder, partition
from prefold.kv_ownership import KVOwnership
from prefold.traffic import exchange_bytes
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.request_states import RequestStates
from prefold.worker.step_plan import RankPlace, build_step_plan
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class InputBatch:
    """A rank's share of a step, built whole by `build`: no field is inherited from the global batch.

    Attributes:
        input_ids, positions: [num_tokens] int64, prefill tokens first, then decode tokens.
        order: who computes which of the global batch's tokens.
        plan: what attention needs.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    order: TokenOrder
    plan: StepPlan

    @classmethod
    def build(
        cls,
        batch: GlobalBatch,
        parts: Partition,
        states: RequestStates,
        place: RankPlace,
        ways: ContextWays,
        device: torch.device,
    ) -> InputBatch:
        """The local batch of the rank at `place`."""
        order = TokenOrder.of(parts, batch.query_start_loc)
        tokens = order.of_rank(place.pcp)
        return cls(
            input_ids=torch.from_numpy(batch.token_ids[tokens]).to(device),
            positions=torch.from_numpy(batch.positions[tokens]).to(device),
            order=order,
            plan=build_step_plan(batch, parts, order, states, place, ways, device),
        )


class PCPManager:
    """Splits steps over the PCP ranks and brings the results together.

    Args:
        groups: this rank's; used are pcp and dcp.
        ownership: which rank of the DCP group holds which token.
        ways: chooses how contexts are attended.
        min_split_tokens: shorter prefills stay whole on one rank.
        kv_cache: [num_layers, num_blocks, block_size, width of a row].
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        ownership: KVOwnership,
        ways: ContextWays,
        min_split_tokens: int,
        kv_cache: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        self.group = groups["pcp"]
        self._place = RankPlace(self.group.rank, self.group.size, groups["dcp"].rank, ownership)
        self._ways = ways
        self._min_split_tokens = min_split_tokens
        self._kv_cache = kv_cache
        self._workspace = workspace

    def partition(self, batch: GlobalBatch) -> Partition:
        """Rows of every rank; a pure function of the global batch."""
        return partition(
            batch.num_computed,
            batch.num_scheduled,
            batch.is_prefill,
            size=self.group.size,
            min_split_tokens=self._min_split_tokens,
            decode_unit=self._place.unit,
        )

    def input_batch(self, batch: GlobalBatch, parts: Partition, states: RequestStates) -> InputBatch:
        """This rank's local batch."""
        return InputBatch.build(batch, parts, states, self._place, self._ways, self._kv_cache.device)

    def exchange(self, local: InputBatch, hidden: torch.Tensor, wanted: np.ndarray) -> torch.Tensor:
        """The step's last collective: decode KV to other replicas, wanted hidden rows to PCP place 0.

        A step without decode tokens to send moves nothing if all wanted rows are on place 0, or if there are
        none (a prompt's non-final chunk).

        Args:
            hidden: [num_local_tokens, hidden_size], this rank's.
            wanted: global token indices, the same on all ranks.

        Returns:
            [len(wanted), hidden_size] in the order of `wanted`; on other places than 0 undefined.
        """
        plan = local.plan
        rank_of, index_of = local.order.locate(wanted)
        restored = self._workspace.get("pcp.restored", (len(wanted), hidden.shape[1]), hidden.dtype)
        own = self.group.rank
        if not plan.sent_decode.any() and not rank_of.any():
            if own == 0:
                torch.index_select(hidden, 0, torch.from_numpy(index_of).to(hidden.device), out=restored)
            return restored
        layout = ExchangeLayout.of(plan.sent_decode, rank_of, self._kv_cache, hidden)
        cache = self._kv_cache.flatten(1, 2)
        buffer = self._workspace.get("pcp.exchange", (layout.num_bytes,), torch.uint8)
        kv, rows = layout.views(buffer, own)
        torch.index_select(cache, 1, plan.sent_decode_slots[own], out=kv)
        local_rows = torch.from_numpy(index_of[rank_of == own]).to(hidden.device)
        torch.index_select(hidden, 0, local_rows, out=rows)

        gather = self.group.start_all_gather(buffer)
        for rank, received in enumerate(gather.wait()):
            kv, rows = layout.views(received, rank)
            slots = plan.sent_decode_slots[rank]
            if rank != own and len(slots) > 0:
                cache.index_copy_(1, slots, kv)
            if own == 0 and len(rows) > 0:
                places = torch.from_numpy(np.flatnonzero(rank_of == rank))
                restored.index_copy_(0, places.to(hidden.device), rows)
        gather.release()
        return restored


@dataclass(frozen=True)
class ExchangeLayout:
    """Bytes of the exchange: `decode KV of all layers | wanted hidden rows`, equal length on all ranks.

    Attributes:
        decode_tokens, hidden_rows: [P] counts per rank: decode tokens whose KV it sends, rows wanted of it.
        hidden_offset: where the hidden rows start.
        num_bytes: length that every rank sends.
    """

    decode_tokens: np.ndarray
    hidden_rows: np.ndarray
    hidden_offset: int
    num_bytes: int
    kv_shape: tuple[int, int]
    kv_dtype: torch.dtype
    hidden_size: int
    hidden_dtype: torch.dtype

    @classmethod
    def of(
        cls, decode_tokens: np.ndarray, rank_of: np.ndarray, kv_cache: torch.Tensor, hidden: torch.Tensor
    ) -> ExchangeLayout:
        num_layers, width = kv_cache.shape[0], kv_cache.shape[3]
        hidden_rows = np.bincount(rank_of, minlength=len(decode_tokens))
        kv_bytes = int(decode_tokens.max()) * num_layers * width * kv_cache.element_size()
        hidden_bytes = int(hidden_rows.max()) * hidden.shape[1] * hidden.element_size()
        offset, num_bytes = exchange_bytes(kv_bytes, hidden_bytes)
        return cls(
            decode_tokens=decode_tokens,
            hidden_rows=hidden_rows,
            hidden_offset=offset,
            num_bytes=num_bytes,
            kv_shape=(num_layers, width),
            kv_dtype=kv_cache.dtype,
            hidden_size=hidden.shape[1],
            hidden_dtype=hidden.dtype,
        )

    def views(self, buffer: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank `rank`'s sections of its uint8 buffer: kv [layers, tokens, width], rows [rows, hidden]."""
        num_layers, width = self.kv_shape
        tokens, rows = int(self.decode_tokens[rank]), int(self.hidden_rows[rank])
        kv_bytes = num_layers * tokens * width * self.kv_dtype.itemsize
        row_bytes = rows * self.hidden_size * self.hidden_dtype.itemsize
        kv = buffer[:kv_bytes].view(self.kv_dtype).view(num_layers, tokens, width)
        end = self.hidden_offset + row_bytes
        hidden = buffer[self.hidden_offset : end].view(self.hidden_dtype).view(rows, self.hidden_size)
        return kv, hidden
