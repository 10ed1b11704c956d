"""The step's batch before it is split: equal on every rank, numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefold.kv_ownership import KVOwnership
from prefold.step import SchedulerOutput
from prefold.worker.request_states import RequestStates


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """R requests with T tokens in all, requests concatenated in the scheduler's order.

    Attributes:
        step_id: the scheduler's.
        request_ids: R ids.
        rows: [R] rows of the requests in RequestStates.
        num_computed, num_scheduled: [R] tokens in the cache, tokens of this step.
        is_prefill: [R] state, not shape: a prefill may have one token left.
        query_start_loc: [R + 1] first token of each request.
        token_ids, positions: [T].
        slot_mapping: [T] slots in the cache of one rank of the DCP group, -1 for tokens that others hold.
            Nothing else differs between ranks.
        sampled: indices (into R) of the requests whose next token this step decides.
    """

    step_id: int
    request_ids: list[str]
    rows: np.ndarray
    num_computed: np.ndarray
    num_scheduled: np.ndarray
    is_prefill: np.ndarray
    query_start_loc: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    sampled: np.ndarray

    @classmethod
    def build(
        cls, states: RequestStates, step: SchedulerOutput, ownership: KVOwnership, dcp_rank: int
    ) -> GlobalBatch:
        """Gather the step's requests out of `states`, which must have applied `step`.

        Args:
            dcp_rank: whose slots are meant.
        """
        assert states.block_size == ownership.virtual_block_size, (states.block_size, ownership)
        request_ids = list(step.num_scheduled_tokens)
        rows = np.array([states.row_of[request_id] for request_id in request_ids], np.int64)
        num_scheduled = np.array(list(step.num_scheduled_tokens.values()), np.int64)
        num_computed = states.num_computed_tokens[rows]
        query_start_loc = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(num_scheduled, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        positions, row_of = num_computed, rows
        if num_tokens > len(rows):  # else each has one: most steps decode only
            request_of = np.repeat(np.arange(len(rows)), num_scheduled)
            positions = np.arange(num_tokens) - (query_start_loc[:-1] - num_computed)[request_of]
            row_of = rows[request_of]
        blocks = states.block_ids[row_of, positions // states.block_size]
        assert blocks.min(initial=0) >= 0, "a scheduled token has no block"
        num_left = states.num_tokens[rows] - num_computed - num_scheduled
        assert num_left.min(initial=0) >= 0, "a step may not run past the known tokens"
        return cls(
            step_id=step.step_id,
            request_ids=request_ids,
            rows=rows,
            num_computed=num_computed,
            num_scheduled=num_scheduled,
            is_prefill=num_computed < states.num_prefill_tokens[rows],
            query_start_loc=query_start_loc,
            token_ids=states.token_ids[row_of, positions].astype(np.int64),
            positions=positions,
            slot_mapping=ownership.slots(positions, blocks, dcp_rank),
            sampled=np.flatnonzero(num_left == 0),
        )
