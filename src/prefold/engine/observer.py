"""Watches the engine's steps, and says in a snapshot what it does, for whom, and why others wait.

It must cost next to nothing: it runs between the steps. Which rank computes which part of a prompt comes from
`pcp_layout.partition`, the function that the ranks call, and is only asked for steps that hold a prefill.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from prefold.config import EngineConfig
from prefold.distributed.pcp_layout import partition
from prefold.engine.scheduler import Scheduler
from prefold.metrics import (
    BEHIND,
    BLOCKS,
    BUDGET,
    MAX_NUM_SEQS,
    EngineSnapshot,
    RequestState,
    RowParts,
    StepRecord,
    Totals,
)
from prefold.request import Request, RequestStatus
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats

MAX_ROWS = 32
"""Prefills of a step that are drawn."""

MAX_REQUESTS = 200
"""Requests in a snapshot."""

MAX_STEPS = 64
"""Steps in a snapshot."""


@dataclass(slots=True)
class _StepInFlight:
    """What is known of a step when it is scheduled. `num_prompt_tokens`: of the prompts that it completes."""

    scheduled_at: float
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    rows: list[RowParts] = field(default_factory=list)
    num_prompt_tokens: int = 0


class EngineObserver:
    """One per engine, for all replicas. `now` is always `time.monotonic()`.

    Attributes:
        totals: sums over the steps that are done.
    """

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self.totals = Totals()
        self._pcp_size = parallel.prefill_context_parallel_size
        self._decode_unit = min(parallel.decode_context_parallel_size, self._pcp_size)
        self._min_split_tokens = config.runtime.min_split_tokens
        self._to_unix = time.time() - time.monotonic()
        self._started_s = time.time()
        self._workspace_bytes, self._workspace_planned = 0, config.runtime.workspace_bytes
        self._in_flight: dict[tuple[int, int], _StepInFlight] = {}
        replicas = range(parallel.data_parallel_size)
        self._prefills: list[dict[str, tuple[int, int]]] = [{} for _ in replicas]
        """Per replica, of requests in prefill on the ranks: tokens of the prompt, and of the prefill."""
        stages = parallel.pipeline_parallel_size
        self._ends = [deque[float](maxlen=stages) for _ in replicas]
        """Per replica, when its last steps were done, one per pipeline stage."""
        self._done: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def on_scheduled(self, replica: int, step: SchedulerOutput, now: float) -> None:
        """A step is handed to the ranks."""
        prefills = self._prefills[replica]
        for request_id in step.finished_request_ids:
            prefills.pop(request_id, None)
        for new in step.new_requests:
            # Where nothing is generated the last token is not computed.
            unused = new.sampling_params.max_tokens == 0 and new.num_prefill_tokens > 1
            prefills[new.request_id] = (new.num_prompt_tokens, new.num_prefill_tokens - unused)
        if not step.num_scheduled_tokens:
            return
        total = step.total_num_scheduled_tokens
        if prefills:
            pending = self._with_prefills(step, prefills, total, now)
        else:
            pending = _StepInFlight(now, len(step.num_scheduled_tokens), 0, total)
        self._in_flight[replica, step.step_id] = pending

    def _with_prefills(
        self, step: SchedulerOutput, prefills: dict[str, tuple[int, int]], total: int, now: float
    ) -> _StepInFlight:
        """The step's prefills and decodes told apart, by the requests' state."""
        computed = {r.request_id: r.num_computed_tokens for r in (*step.new_requests, *step.cached_requests)}
        is_prefill = [request_id in prefills for request_id in step.num_scheduled_tokens]
        pending = _StepInFlight(now, len(step.num_scheduled_tokens), 0, total)
        if not any(is_prefill):
            return pending
        pending.rows = self._rows(step.num_scheduled_tokens, computed, is_prefill, prefills)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            if request_id not in prefills:
                continue
            num_prompt_tokens, prefill_end = prefills[request_id]
            pending.num_prefill_tokens += num_tokens
            if computed[request_id] + num_tokens >= prefill_end:
                del prefills[request_id]
                if (
                    prefill_end <= num_prompt_tokens
                ):  # else it is one that was preempted after its first token
                    pending.num_prompt_tokens += num_prompt_tokens
        pending.num_decode_tokens -= pending.num_prefill_tokens
        return pending

    def _rows(
        self,
        scheduled: dict[str, int],
        computed: dict[str, int],
        is_prefill: list[bool],
        prefills: dict[str, tuple[int, int]],
    ) -> list[RowParts]:
        """The first MAX_ROWS prefills, cut as the ranks cut them."""
        parts = partition(
            np.array([computed[request_id] for request_id in scheduled]),
            np.array(list(scheduled.values())),
            np.array(is_prefill),
            size=self._pcp_size,
            min_split_tokens=self._min_split_tokens,
            decode_unit=self._decode_unit,
        )
        request_ids = list(scheduled)
        drawn = list(islice((i for i, prefill in enumerate(is_prefill) if prefill), MAX_ROWS))
        rows = {
            i: RowParts(
                request_ids[i],
                computed[request_ids[i]],
                scheduled[request_ids[i]],
                True,
                prefills[request_ids[i]][0],
                [],
            )
            for i in drawn
        }
        chosen = np.flatnonzero(np.isin(parts.row_request, drawn))
        chosen = chosen[np.argsort(parts.row_start[chosen], kind="stable")]
        columns = (parts.row_request, parts.row_start, parts.row_end, parts.row_rank)
        for request, start, end, rank in zip(*(column[chosen].tolist() for column in columns)):
            rows[request].parts.append((start, end, rank))
        return list(rows.values())

    def on_done(self, replica: int, step: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """A step's output is here. An empty step leaves no trace."""
        pending = self._in_flight.pop((replica, step.step_id), None)
        if pending is None:
            return
        stats = output.stats
        self.totals.add_step(stats, replica)
        self._workspace_bytes = max(self._workspace_bytes, stats.workspace_bytes)
        self.totals.num_prefill_tokens += pending.num_prefill_tokens
        self.totals.num_decode_tokens += pending.num_decode_tokens
        self.totals.num_generation_tokens += sum(map(len, output.sampled_token_ids.values()))
        self.totals.num_prompt_tokens += pending.num_prompt_tokens
        self.totals.step_seconds.observe(now - pending.scheduled_at)
        if pending.num_decode_tokens:
            # What is decoded was computed by a step before.
            self.totals.inter_token_seconds.observe(now - self._ends[replica][0], pending.num_decode_tokens)
        self._ends[replica].append(now)
        record = self._record(replica, step.step_id, pending, now)
        for name in StepStats.__struct_fields__:
            setattr(record, name, getattr(stats, name))
        self._done.append(record)

    def _record(self, replica: int, step_id: int, pending: _StepInFlight, now: float) -> StepRecord:
        """All but what the ranks report."""
        return StepRecord(
            step_id=step_id,
            replica=replica,
            start_s=pending.scheduled_at + self._to_unix,
            duration_s=now - pending.scheduled_at,
            num_prefill_tokens=pending.num_prefill_tokens,
            num_decode_tokens=pending.num_decode_tokens,
            num_requests=pending.num_requests,
            rows=pending.rows,
        )

    @property
    def is_in_prefill(self) -> bool:
        """Whether a step in flight holds a prefill."""
        return any(pending.num_prefill_tokens for pending in self._in_flight.values())

    def snapshot(self, schedulers: Sequence[Scheduler], now: float) -> EngineSnapshot:
        """The engine as it is now, with the steps that were done since the last snapshot."""
        totals = self.totals
        totals.num_preemptions = sum(s.num_preemptions for s in schedulers)
        stats = [s.kv.prefix_cache_stats for s in schedulers]
        totals.prefix_query_tokens = sum(s.num_query_tokens for s in stats)
        totals.prefix_hit_tokens = sum(s.num_hit_tokens for s in stats)
        pools = [s.kv.pool for s in schedulers]
        blocks_total = sum(pool.num_blocks for pool in pools)
        steps = list(self._done)
        self._done.clear()
        return EngineSnapshot(
            time_s=now + self._to_unix,
            started_s=self._started_s,
            num_running=sum(len(s.running) for s in schedulers),
            num_waiting=sum(len(s.waiting) for s in schedulers),
            blocks_total=blocks_total,
            blocks_used=blocks_total - sum(pool.num_free_blocks for pool in pools),
            blocks_cached=sum(pool.num_cached_blocks for pool in pools),
            totals=totals.plus(Totals()),  # a copy
            requests=_request_states(schedulers, now),
            steps=steps,
            in_flight=[self._record(*key, pending, now) for key, pending in self._in_flight.items()],
            workspace_bytes=self._workspace_bytes,
            workspace_planned=self._workspace_planned,
        )


def _request_states(schedulers: Sequence[Scheduler], now: float) -> list[RequestState]:
    """Running requests of all replicas, then waiting ones, at most MAX_REQUESTS."""
    running = ((d, s, request, "") for d, s in enumerate(schedulers) for request in s.running)
    waiting = ((d, s, request, why) for d, s in enumerate(schedulers) for request, why in _waiting(s))
    chosen = [*islice(running, MAX_REQUESTS)]
    chosen += islice(waiting, MAX_REQUESTS - len(chosen))
    return [_request_state(d, s, request, why, now) for d, s, request, why in chosen]


def _waiting(scheduler: Scheduler) -> Iterator[tuple[Request, str]]:
    """Waiting requests in order, each with the reason why it does."""
    why = ""
    for request in scheduler.waiting:
        yield request, why or _why(scheduler, request)
        why = why or f"{BEHIND}{request.request_id}"


def _why(scheduler: Scheduler, request: Request) -> str:
    """What keeps the first waiting request from being admitted; see RequestState."""
    if len(scheduler.running) >= scheduler.max_num_seqs:
        return MAX_NUM_SEQS
    if _blocks_needed(scheduler, request) > scheduler.kv.pool.num_free_blocks:
        return BLOCKS
    return BUDGET


def _blocks_needed(scheduler: Scheduler, request: Request) -> int:
    """Free blocks that admission of a waiting request takes now."""
    prefix = scheduler.kv.find_cached_prefix(request)
    in_use = len(prefix) - scheduler.kv.pool.num_free_among(prefix)
    return scheduler.kv.blocks_for(request.num_tokens) - in_use


def _request_state(
    replica: int, scheduler: Scheduler, request: Request, why: str, now: float
) -> RequestState:
    kv = scheduler.kv
    if request.status is RequestStatus.RUNNING:
        num_blocks = kv.blocks_for(max(request.num_prefill_tokens, request.num_computed_tokens))
    elif why.startswith(BEHIND):
        # As of its arrival: to look again takes a while, and nobody asks before it is the first.
        num_blocks = kv.blocks_for(request.num_tokens - request.num_cached_tokens)
    else:
        num_blocks = _blocks_needed(scheduler, request)
    return RequestState(
        request_id=request.request_id,
        replica=replica,
        state=request.status.value,
        num_prompt_tokens=request.num_prompt_tokens,
        num_prefill_tokens=request.num_prefill_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        num_blocks=num_blocks,
        wait_s=now - request.arrival_time,
        why=why,
    )
