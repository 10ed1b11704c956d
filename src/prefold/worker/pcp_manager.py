"""Prefill context parallelism around a forward: split the global batch, restore what is sampled.

    global batch -> partition -> local batch -> forward -> exchange -> rows to sample from

At P = 1 the same code is the identity. Everything but the data of the exchange is derived from the
global batch, without communication, and comes out equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from prefold.attention.context_parallel import StepPlan
from prefold.attention.walk import RequestWork, Run
from prefold.distributed.group import Group
from prefold.distributed.pcp_layout import (
    Partition,
    local_token_indices,
    locate_tokens,
    partition,
    token_indices_by_rank,
)
from prefold.traffic import exchange_bytes
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.request_states import RequestStates
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class InputBatch:
    """A rank's share of a step, built whole by `build`: no field is inherited from the global batch.

    Attributes:
        input_ids, positions: [num_tokens] int64, prefill tokens first, then decode tokens.
        plan: what attention needs.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    plan: StepPlan

    @classmethod
    def build(
        cls,
        batch: GlobalBatch,
        parts: Partition,
        rank: int,
        states: RequestStates,
        block_size: int,
        device: torch.device,
    ) -> InputBatch:
        """The local batch of PCP rank `rank`."""
        tokens = local_token_indices(parts, rank, batch.query_start_loc)
        prefill, decode = _request_works(batch, parts, rank, states, block_size, device)
        gather_slots, decode_slots = _slots_by_rank(batch, parts, device)
        plan = StepPlan(
            prefill=tuple(prefill),
            decode=tuple(decode),
            num_prefill_tokens=int(parts.num_prefill_tokens[rank]),
            num_tokens=len(tokens),
            gather_tokens=int(parts.num_prefill_tokens.max()),
            gather_slots=gather_slots,
            decode_slots=decode_slots,
        )
        return cls(
            input_ids=torch.from_numpy(batch.token_ids[tokens]).to(device),
            positions=torch.from_numpy(batch.positions[tokens]).to(device),
            plan=plan,
        )


def _slots_by_rank(
    batch: GlobalBatch, parts: Partition, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Cache slots of every rank's (prefill, decode) tokens, in the order the rank computes them."""
    by_class = []
    for indices in token_indices_by_rank(parts, batch.query_start_loc):
        slots = [torch.from_numpy(batch.slot_mapping[own[own >= 0]]).to(device) for own in indices]
        by_class.append(tuple(slots))
    return by_class[0], by_class[1]


def _request_works(
    batch: GlobalBatch,
    parts: Partition,
    rank: int,
    states: RequestStates,
    block_size: int,
    device: torch.device,
) -> tuple[list[RequestWork], list[RequestWork]]:
    """The rank's rows joined to requests: (prefill, decode). Rows of a request are neighbours."""
    works: tuple[list[RequestWork], list[RequestWork]] = ([], [])
    runs: list[Run] = []
    offset = 0
    rows = parts.rows_of(rank)
    for index in range(rows.start, rows.stop):
        start, end = int(parts.row_start[index]), int(parts.row_end[index])
        runs.append(Run(start, end, offset))
        offset += end - start
        request = int(parts.row_request[index])
        if index + 1 < rows.stop and parts.row_request[index + 1] == request:
            continue
        row = batch.rows[request]
        num_blocks = -(-int(batch.num_computed[request] + batch.num_scheduled[request]) // block_size)
        block_ids = torch.from_numpy(states.block_ids[row, :num_blocks].astype(np.int64)).to(device)
        work = RequestWork(tuple(runs), int(batch.num_computed[request]), block_ids)
        works[0 if parts.row_is_prefill[index] else 1].append(work)
        runs = []
    return works


class PCPManager:
    """Splits steps over the PCP ranks and brings the results together.

    Args:
        group: PCP group of this rank.
        min_split_tokens: shorter prefills stay whole on one rank.
        kv_cache: [num_layers, num_blocks, block_size, token_dim].
    """

    def __init__(
        self, group: Group, min_split_tokens: int, kv_cache: torch.Tensor, workspace: Workspace
    ) -> None:
        self.group = group
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
        )

    def input_batch(self, batch: GlobalBatch, parts: Partition, states: RequestStates) -> InputBatch:
        """This rank's local batch."""
        return InputBatch.build(
            batch, parts, self.group.rank, states, self._kv_cache.shape[2], self._kv_cache.device
        )

    def exchange(
        self,
        batch: GlobalBatch,
        parts: Partition,
        plan: StepPlan,
        hidden: torch.Tensor,
        wanted: np.ndarray,
    ) -> torch.Tensor:
        """The step's last collective: decode KV to the replicas, wanted hidden rows to everyone.

        A step without decode tokens and wanted rows (a prompt's non-final chunk) moves nothing.

        Args:
            hidden: [num_local_tokens, hidden_size], this rank's.
            wanted: global token indices, the same on all ranks.

        Returns:
            [len(wanted), hidden_size] in the order of `wanted`.
        """
        rank_of, index_of = locate_tokens(parts, batch.query_start_loc, wanted)
        layout = ExchangeLayout.of(parts.num_decode_tokens, rank_of, self._kv_cache, hidden)
        restored = self._workspace.get("pcp.restored", (len(wanted), hidden.shape[1]), hidden.dtype)
        if layout.num_bytes == 0:
            return restored
        own = self.group.rank
        cache = self._kv_cache.flatten(1, 2)
        buffer = self._workspace.get("pcp.exchange", (layout.num_bytes,), torch.uint8)
        kv, rows = layout.views(buffer, own)
        torch.index_select(cache, 1, plan.decode_slots[own], out=kv)
        local_rows = torch.from_numpy(index_of[rank_of == own]).to(hidden.device)
        torch.index_select(hidden, 0, local_rows, out=rows)

        gather = self.group.start_all_gather(buffer)
        for rank, received in enumerate(gather.wait()):
            kv, rows = layout.views(received, rank)
            if rank != own:
                cache.index_copy_(1, plan.decode_slots[rank], kv)
            restored[torch.from_numpy(np.flatnonzero(rank_of == rank)).to(hidden.device)] = rows
        gather.release()
        return restored


@dataclass(frozen=True)
class ExchangeLayout:
    """Bytes of the exchange: `decode KV of all layers | wanted hidden rows`, equal length on all ranks.

    Attributes:
        decode_tokens, hidden_rows: [P] counts per rank.
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
        num_layers, token_dim = kv_cache.shape[0], kv_cache.shape[3]
        hidden_rows = np.bincount(rank_of, minlength=len(decode_tokens))
        kv_bytes = int(decode_tokens.max()) * num_layers * token_dim * kv_cache.element_size()
        hidden_bytes = int(hidden_rows.max()) * hidden.shape[1] * hidden.element_size()
        offset, num_bytes = exchange_bytes(kv_bytes, hidden_bytes)
        return cls(
            decode_tokens=decode_tokens,
            hidden_rows=hidden_rows,
            hidden_offset=offset,
            num_bytes=num_bytes,
            kv_shape=(num_layers, token_dim),
            kv_dtype=kv_cache.dtype,
            hidden_size=hidden.shape[1],
            hidden_dtype=hidden.dtype,
        )

    def views(self, buffer: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank `rank`'s sections of its uint8 buffer: kv [layers, tokens, token_dim], rows [rows, hidden]."""
        num_layers, token_dim = self.kv_shape
        tokens, rows = int(self.decode_tokens[rank]), int(self.hidden_rows[rank])
        kv_bytes = num_layers * tokens * token_dim * self.kv_dtype.itemsize
        row_bytes = rows * self.hidden_size * self.hidden_dtype.itemsize
        kv = buffer[:kv_bytes].view(self.kv_dtype).view(num_layers, tokens, token_dim)
        end = self.hidden_offset + row_bytes
        hidden = buffer[self.hidden_offset : end].view(self.hidden_dtype).view(rows, self.hidden_size)
        return kv, hidden
