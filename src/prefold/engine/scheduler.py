"""Who computes how many tokens in the next step.

Continuous batching: every running request gets its tokens first, then waiting ones are admitted in
order of arrival. There is no prefill or decode phase; a request computes the tokens it has not
computed yet, as many as the budget leaves.

The life of a request: `add_request` -> waiting -> admitted with blocks -> running -> finished, or
preempted -> front of the waiting queue. A step:

    output = scheduler.schedule()
    result = <workers execute output>
    for request, new_token_ids in scheduler.update_from_output(output, result): ...

With pipeline parallelism up to PP steps are in flight: scheduled, and not updated yet. Workers run them
in order, and updates come in order. The tokens of a step count as computed as soon as it is scheduled,
so the next chunk of a prefill follows at once, while a request whose next token is still to be
sampled has nothing to compute and sits out.

`add_request`, `finish_requests` and `abort_requests` may come at any moment, also between these two.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from prefold.config import EngineConfig
from prefold.engine.kv_cache_manager import KVCacheManager
from prefold.engine.request_checks import check_servable
from prefold.request import Request, RequestStatus
from prefold.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    step_id: int
    requests: list[Request]


class Scheduler:
    """Decides each step's batch; knows tokens and blocks, nothing of ranks but their number.

    One scheduler serves one replica. A step computes at most `max_num_batched_tokens * PCP` tokens: the
    limit is per rank, and PCP ranks share the tokens of a step evenly. Blocks are virtual ones, of
    `config.virtual_block_size` tokens.
    """

    def __init__(self, config: EngineConfig) -> None:
        limits, parallel = config.scheduler, config.parallel
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(limits, name) < 1:
                raise ValueError(f"{name}={getattr(limits, name)} must be at least 1")
        self._config = config
        self.max_num_seqs = limits.max_num_seqs
        self.max_model_len = limits.max_model_len
        self.max_num_scheduled_tokens = limits.max_num_batched_tokens * parallel.prefill_context_parallel_size
        self.max_steps_in_flight = parallel.pipeline_parallel_size
        self.kv = KVCacheManager(
            config.cache.num_blocks, config.virtual_block_size, config.cache.enable_prefix_caching
        )
        self.requests: dict[str, Request] = {}
        """Unfinished requests by id."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of admission. Only the last one can be in prefill after a step: it got all that
        was left of the budget. Hence there are never more running requests than budget."""
        self._num_waiting_tokens = 0
        """What `num_outstanding_tokens` counts for `waiting`."""
        self._in_flight: deque[_StepInFlight] = deque()
        self._ended_in_flight: list[Request] = []
        """Finished while a step in flight still writes their blocks: freed when it is over."""
        self._dropped_ids: list[str] = []
        """Finished or preempted since the last step: the workers must drop their state."""
        self._next_step_id = 0
        self.num_preemptions = 0

    # ---------------------------------------------------------------- requests

    def add_request(self, request: Request) -> None:
        """Queue a request. ValueError if it could never be served, with the numbers."""
        check_servable(self._config, request.request_id, request.num_prompt_tokens, request.max_tokens)
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.requests[request.request_id] = request
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        request.num_cached_tokens = self.kv.num_cached_tokens(request)
        self.waiting.append(request)
        self._num_waiting_tokens += _uncached_tokens(request)

    def abort_request(self, request_id: str) -> Request | None:
        """Abort one request; see `abort_requests`."""
        aborted = self.abort_requests([request_id])
        return aborted[0] if aborted else None

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests early, at any moment. Returns those that were alive; unknown ids are ignored."""
        return self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, stop_reason: int | str | None = None
    ) -> list[Request]:
        """End requests for a reason the scheduler can not see, such as a stop string.

        If they are part of a step in flight, its output for them will be ignored, and their blocks
        are not free before the last such step is over. Returns those that were alive.
        """
        assert status.is_finished, status
        finished: list[Request] = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
                self._num_waiting_tokens -= _uncached_tokens(request)
            self._finish(request, status, stop_reason)
            finished.append(request)
        return finished

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the front of the queue, unless a step in flight holds it.

        Its blocks are freed and all its tokens, prompt and output, will be computed again, except
        for what it then finds in the prefix cache. Returns whether it was preempted.
        """
        request = self.requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING or self._is_in_flight(request):
            return False
        self.running.remove(request)
        self._requeue(request)
        return True

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens that all unfinished requests have yet to compute, as far as they are known. A request
        that waits for its next token counts as one token, or many of them would look like no work."""
        return self._num_waiting_tokens + sum(
            max(1, r.num_tokens - r.num_computed_tokens) for r in self.running
        )

    def reset_prefix_cache(self) -> None:
        """Nothing computed until now is reused by a later request."""
        self.kv.reset_prefix_cache()

    def fail_requests(self, reason: str) -> None:
        """The workers are gone: end all requests and forget the steps in flight. All blocks are free then."""
        self._in_flight.clear()
        self._free_ended()
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ERROR, reason)

    def check_integrity(self) -> None:
        """AssertionError unless queues, statuses, tables and blocks agree (tests, debugging)."""
        for request in self.running:
            assert request.status is RequestStatus.RUNNING, request
        for request in self.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
            assert request.num_computed_tokens == request.num_sent_tokens == 0, request
            assert not self.kv.block_ids(request), request
        queued = [*self.running, *self.waiting]
        assert {request.request_id: request for request in queued} == self.requests, "queues and ids differ"
        assert len(queued) == len(self.requests), "a request is queued twice"
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} requests run"
        num_waiting_tokens = sum(map(_uncached_tokens, self.waiting))
        assert self._num_waiting_tokens == num_waiting_tokens, (self._num_waiting_tokens, num_waiting_tokens)
        assert len(self._in_flight) <= self.max_steps_in_flight, f"{len(self._in_flight)} steps are in flight"
        for request in self._ended_in_flight:
            assert request.status.is_finished, request
            assert self._is_in_flight(request), f"{request} still holds its blocks"
        self.kv.check_integrity([*queued, *self._ended_in_flight])

    # ---------------------------------------------------------------- a step

    def schedule(self) -> SchedulerOutput:
        """The next step; it counts as in flight if it holds tokens.

        With no step in flight it holds some if a request is unfinished. Otherwise there may be
        nothing to do before the next update: then the step is empty, says nothing that workers need to
        know, and may be run or not. Afterwards `num_computed_tokens` counts this step's tokens.
        """
        in_flight = len(self._in_flight)
        assert in_flight < self.max_steps_in_flight, "schedule() before the last step's update_from_output()"
        step_id = self._next_step_id
        self._next_step_id += 1
        scheduled: dict[str, int] = {}
        requests: list[Request] = []
        budget, cached, blocks_are_short = self._schedule_running(scheduled, requests)
        # Whoever came in now would be the next to yield.
        new = [] if blocks_are_short else self._schedule_waiting(budget, scheduled, requests)
        output = SchedulerOutput(step_id, new, cached, scheduled, finished_request_ids=[])
        if scheduled:
            for request in requests:
                request.last_step_id = step_id
            self.kv.cache_full_blocks([r for r in requests if r.num_computed_tokens >= r.next_full_block])
            self._in_flight.append(_StepInFlight(step_id, requests))
            output.finished_request_ids, self._dropped_ids = self._dropped_ids, []
        return output

    def _schedule_running(
        self, scheduled: dict[str, int], requests: list[Request]
    ) -> tuple[int, list[CachedRequestData], bool]:
        """Give running requests their tokens; (budget left, their data, did blocks run out). This and what it
        calls run hundreds of times per step.

        When blocks run out the most recently admitted request yields: it has none of this step's
        tokens yet, since requests are served in order of admission. One that is in flight cannot:
        then this step ends here, and the next one finds it back, or the blocks of an ended request.
        """
        budget = self.max_num_scheduled_tokens
        cached: list[CachedRequestData] = []
        decodes_left = self._decodes_per_step()
        blocks_are_short = False
        running, allocate = self.running, self.kv.allocate
        i = 0
        while i < len(running) and budget > 0:
            request = running[i]
            tokens, computed = request.all_token_ids, request.num_computed_tokens
            num_tokens = len(tokens) - computed
            if num_tokens > budget:
                num_tokens = budget
            is_decode = computed >= request.num_prefill_tokens
            if num_tokens == 0 or (is_decode and decodes_left == 0):
                i += 1
                continue
            end = computed + num_tokens
            new_block_ids = [] if end <= request.num_slots else allocate(request, end)
            if new_block_ids is None:
                blocks_are_short = True
                if self._ended_in_flight or self._is_in_flight(running[-1]):
                    break
                self._requeue(running.pop())
                continue
            request_id = request.request_id
            new_token_ids = tokens[request.num_sent_tokens :]
            cached.append(CachedRequestData(request_id, new_token_ids, new_block_ids, computed))
            scheduled[request_id] = num_tokens
            requests.append(request)
            request.num_sent_tokens = len(tokens)
            request.num_computed_tokens = end
            budget -= num_tokens
            decodes_left -= is_decode
            i += 1
        return budget, cached, blocks_are_short

    def _decodes_per_step(self) -> int:
        """How many decodes one step takes: an even share, so that every stage of a pipeline has some."""
        if self.max_steps_in_flight == 1:
            return len(self.running)
        num_decodes = sum(r.num_computed_tokens >= r.num_prefill_tokens for r in self.running)
        return -(-num_decodes // self.max_steps_in_flight)

    def _schedule_waiting(
        self, budget: int, scheduled: dict[str, int], requests: list[Request]
    ) -> list[NewRequestData]:
        """Admit waiting requests in order, until budget, seats or blocks are used up, or until one
        would compute what this step computes already: it shares that from the next step on."""
        new: list[NewRequestData] = []
        being_written: set[bytes] = set()
        if self.waiting:
            for request in requests:
                being_written.update(self.kv.hashes_being_written(request))
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if being_written and self.kv.next_block_hash(request) in being_written:
                break
            num_cached = self.kv.admit(request)
            if num_cached is None:
                break  # nobody overtakes: a long prompt would wait for ever behind short ones
            self._num_waiting_tokens -= _uncached_tokens(request)
            self.running.append(self.waiting.popleft())
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = num_cached
            request.status = RequestStatus.RUNNING
            num_tokens = min(request.num_tokens - num_cached, budget)
            new.append(
                NewRequestData(
                    request_id=request.request_id,
                    token_ids=request.all_token_ids + request.target_token_ids,
                    num_prompt_tokens=request.num_prompt_tokens + len(request.target_token_ids),
                    num_prefill_tokens=request.num_prefill_tokens + len(request.target_token_ids),
                    num_computed_tokens=num_cached,
                    block_ids=self.kv.block_ids(request),
                    sampling_params=request.sampling_params,
                    seed=request.seed,
                    eos_token_ids=request.eos_token_ids,
                )
            )
            scheduled[request.request_id] = num_tokens
            requests.append(request)
            request.num_sent_tokens = request.num_tokens
            request.num_computed_tokens = num_cached + num_tokens
            being_written.update(self.kv.hashes_being_written(request))
            budget -= num_tokens
        return new

    def update_from_output(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[tuple[Request, list[int]]]:
        """Append the sampled tokens of the oldest step in flight and end requests that are done.

        Returns, in batch order, each request of which there is news, with its new tokens; there are
        none where it got prompt log-probabilities only or failed. Tokens sampled after the end are cut
        off. `request.status` says whether and why it has ended. What the output says about requests
        that ended while the step was in flight is ignored, even if their ids are in use again.
        """
        step_id = scheduler_output.step_id
        assert step_id == output.step_id, "steps are mixed up"
        if not scheduler_output.num_scheduled_tokens:
            return []
        assert [step_id] == [step.step_id for step in self._in_flight][:1], "steps are mixed up"
        events: list[tuple[Request, list[int]]] = []
        requests = self._in_flight.popleft().requests
        next_step_id = self._in_flight[0].step_id if self._in_flight else sys.maxsize
        num_alive = len(self.requests)
        sampled_token_ids, errors, running = output.sampled_token_ids, output.errors, RequestStatus.RUNNING
        for request in requests:
            if request.status is not running:
                continue
            request_id = request.request_id
            if errors and request_id in errors:
                self._finish(request, RequestStatus.FINISHED_ERROR, errors[request_id])
                events.append((request, []))
                continue
            sampled, tokens = sampled_token_ids.get(request_id), request.all_token_ids
            if request.num_computed_tokens < len(tokens) or request.last_step_id >= next_step_id:
                assert not sampled, f"{request} was sampled in the middle of its prefill"
                if request_id in output.prompt_logprobs:
                    events.append((request, []))
                continue
            if request.max_tokens == 0:
                self._finish(request, RequestStatus.FINISHED_LENGTH, None)
                events.append((request, []))
                continue
            assert sampled, f"no token was sampled for {request}"
            if (
                len(sampled) == 1
                and len(tokens) + 1 < request.max_num_tokens
                and sampled[0] not in request.end_token_ids
            ):
                tokens.append(sampled[0])  # nearly all of a step's requests
            else:
                sampled = self._append(request, sampled)
            events.append((request, sampled))
        if len(self.requests) < num_alive:
            self.running = [request for request in self.running if request.status is running]
        self._free_ended()
        return events

    def _append(self, request: Request, sampled: list[int]) -> list[int]:
        """Append tokens up to the one that ends the request; those appended."""
        for i, token_id in enumerate(sampled):
            request.all_token_ids.append(token_id)
            status = self._ended(request, token_id)
            if status is not None:
                self._finish(request, status, self._stop_reason(request, token_id, status))
                return sampled[: i + 1]
        return sampled

    # ---------------------------------------------------------------- helpers

    def _ended(self, request: Request, token_id: int) -> RequestStatus | None:
        """Why the request ends with this token, its latest; None: it goes on."""
        num_tokens = len(request.all_token_ids)
        num_output = num_tokens - request.num_prompt_tokens
        params = request.sampling_params
        # A structured output that is complete has nowhere to go on to.
        may_end = num_output >= params.min_tokens or params.structured_outputs is not None
        if may_end and token_id in request.end_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if num_tokens >= request.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    @staticmethod
    def _stop_reason(request: Request, token_id: int, status: RequestStatus) -> int | None:
        """The stop token that ended the request; None for the model's own end-of-sequence token."""
        if status is not RequestStatus.FINISHED_STOPPED:
            return None
        is_eos = token_id in request.eos_token_ids and not request.sampling_params.ignore_eos
        return None if is_eos else token_id

    def _is_in_flight(self, request: Request) -> bool:
        """Whether a step in flight holds the request."""
        return bool(self._in_flight) and request.last_step_id >= self._in_flight[0].step_id

    def _finish(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        """Mark a request finished and free its blocks, or see to it that they will be."""
        if request.status is RequestStatus.RUNNING:
            self._dropped_ids.append(request.request_id)
        request.status = status
        request.stop_reason = stop_reason
        if status is RequestStatus.FINISHED_ERROR:
            # Its KV may be the cause: whoever shares it later would fail too.
            self.kv.distrust(request)
        del self.requests[request.request_id]
        self._ended_in_flight.append(request)
        if not self._is_in_flight(request):
            self._free_ended()

    def _free_ended(self) -> None:
        """Free the blocks of ended requests that no step in flight holds."""
        ended, self._ended_in_flight = self._ended_in_flight, []
        for request in ended:
            if self._is_in_flight(request):
                self._ended_in_flight.append(request)
            else:
                self.kv.free(request)

    def _requeue(self, request: Request) -> None:
        """Preempt a request just taken out of `running`."""
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.num_computed_tokens = 0
        request.num_sent_tokens = 0
        request.num_prefill_tokens = request.num_tokens
        self._dropped_ids.append(request.request_id)
        self.waiting.appendleft(request)
        self._num_waiting_tokens += _uncached_tokens(request)


def _uncached_tokens(request: Request) -> int:
    """What a waiting request has yet to compute, if it still finds what it found when it came."""
    return request.num_tokens - request.num_cached_tokens
