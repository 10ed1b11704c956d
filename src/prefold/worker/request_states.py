"""A worker's copy of every running request, in rows that never move.

All ranks apply the same `SchedulerOutput`s and so hold equal states. A step's batch is a gather of
row indices; nothing is compacted when a request leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from prefold.request import SamplingParams
from prefold.step import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass(frozen=True)
class RequestInfo:
    """What never changes while a request runs."""

    request_id: str
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]


class RequestStates:
    """Per-row arrays over `max_num_seqs` rows; `row_of` maps request ids to rows.

    Attributes:
        block_size: tokens of a block, over all ranks that share it (a virtual block).
        token_ids: [rows, max_model_len] int32, prompt and generated tokens.
        block_ids: [rows, max_blocks] int64, -1 where no block is.
        num_tokens, num_prompt_tokens, num_prefill_tokens, num_computed_tokens: [rows] int64.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_ids = np.full((max_num_seqs, max_blocks), -1, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prefill_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.info: list[RequestInfo | None] = [None] * max_num_seqs
        self.row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def apply(self, step: SchedulerOutput) -> None:
        """Bring the states to the start of `step`: drop, add, extend, in this order."""
        for request_id in step.finished_request_ids:
            row = self.row_of.pop(request_id, None)
            if row is not None:
                self.info[row] = None
                self._free_rows.append(row)
        for new in step.new_requests:
            self._add(new)
        if step.cached_requests:
            self._extend(step.cached_requests)

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.row_of, new.request_id
        row = self._free_rows.pop()
        self.row_of[new.request_id] = row
        self.info[row] = RequestInfo(new.request_id, new.sampling_params, new.seed, new.eos_token_ids)
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_prefill_tokens[row] = new.num_prefill_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.block_ids[row].fill(-1)
        self.block_ids[row, : len(new.block_ids)] = new.block_ids
        self.num_blocks[row] = len(new.block_ids)

    def _extend(self, cached: list[CachedRequestData]) -> None:
        rows = np.array([self.row_of[request.request_id] for request in cached])
        self.num_computed_tokens[rows] = [request.num_computed_tokens for request in cached]
        tokens = list(chain.from_iterable(request.new_token_ids for request in cached))
        counts = [len(request.new_token_ids) for request in cached]
        row_of, position = rows, self.num_tokens[rows]
        if not min(counts) == max(counts) == 1:  # else all decode
            row_of = np.repeat(rows, counts)
            first = np.cumsum(counts) - counts
            position = np.arange(len(tokens)) + np.repeat(position - first, counts)
        self.token_ids[row_of, position] = tokens
        self.num_tokens[rows] += counts
        for request, row in zip(cached, rows.tolist()):
            if request.new_block_ids:
                start = self.num_blocks[row]
                end = start + len(request.new_block_ids)
                self.block_ids[row, start:end] = request.new_block_ids
                self.num_blocks[row] = end
