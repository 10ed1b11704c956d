"""The engine without text: schedulers, lanes and ranks. Samples in, tokens out, one step at a time.

`LLMEngine` puts an `OutputProcessor` on top in the same process; a server keeps that in the HTTP process,
and runs an `EngineCore` in a process of its own (core_process.py).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import msgspec

from prefold.config import EngineConfig
from prefold.distributed.layouts import fullest_kv_spec
from prefold.engine.core_messages import CoreOutputs, CoreRequest, SampleOutput, ScheduledSample
from prefold.engine.executor import EngineDeadError, Executor, make_executor
from prefold.engine.observer import EngineObserver
from prefold.engine.replicas import ReplicaStep, choose_replica, make_lanes
from prefold.engine.request_checks import check_request
from prefold.engine.scheduler import Scheduler
from prefold.request import Request, RequestStatus, SamplingParams
from prefold.step import ModelRunnerOutput, StepStats
from prefold.tracing import TraceWriter, merge

logger = logging.getLogger("prefold")


@dataclass
class EngineMetrics:
    """Sums over all steps that are done.

    Attributes:
        num_steps: steps run, counted per replica.
        num_prompt_tokens: prompt tokens of all requests, at their arrival.
        num_prefill_tokens: prompt tokens computed or found in the prefix cache.
        rank_tokens, rank_causal_pairs: prefill and decode, one entry per replica and PCP rank: that of
            replica d and PCP rank r is number d * PCP + r.
        forward_s: time in steps on the sampling ranks, summed over replicas.
        bytes_sent: by collective, on the sampling ranks; the others send as much.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    rank_tokens: list[int] = field(default_factory=list)
    rank_causal_pairs: list[int] = field(default_factory=list)
    forward_s: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)

    def add(self, stats: StepStats, replica: int = 0) -> None:
        self.num_steps += 1
        self.forward_s += stats.forward_s
        for total, step in (
            (self.rank_tokens, stats.rank_tokens),
            (self.rank_causal_pairs, stats.rank_causal_pairs),
        ):
            first = replica * len(step)
            total.extend([0] * (first + len(step) - len(total)))
            for rank, count in enumerate(step, start=first):
                total[rank] += count
        for key, count in stats.bytes_sent.items():
            self.bytes_sent[key] = self.bytes_sent.get(key, 0) + count


class EngineCore:
    """Schedulers and ranks behind one `step()`.

    Args:
        config: resolved configuration.
        executor: by default the ranks that `config` asks for are started.
        observer: is told of every step.
        wakeup: see `make_executor`.

    Attributes:
        schedulers: one per replica.
        executor: may be replaced by one that looks on (tests).
        failure: why the engine is dead; None while it lives.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        observer: EngineObserver | None = None,
        wakeup: int | None = None,
    ) -> None:
        self.config = config
        self.observer = observer
        self.metrics = EngineMetrics()
        self.schedulers = [Scheduler(config) for _ in range(config.parallel.data_parallel_size)]
        self.failure: str | None = None
        self._lanes = make_lanes(self.schedulers, config.parallel)
        self._lane_of = {replica: lane for lane in self._lanes for replica in lane.replicas}
        log_layout(config)
        self.executor = make_executor(config, wakeup) if executor is None else executor
        self._trace: TraceWriter | None = None
        if config.runtime.trace:
            self._trace = TraceWriter(config.runtime.trace, config.parallel.world_size, "engine", "engine")

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do: requests, or steps in flight of requests that were aborted."""
        return any(scheduler.has_unfinished_requests for scheduler in self.schedulers) or any(
            lane.num_steps_in_flight for lane in self._lanes
        )

    def add_request(self, request: CoreRequest) -> None:
        """Queue a request, all of its samples at one replica: they share the prompt's blocks.

        Raises:
            ValueError: the request cannot be served; names the value and the limit.
            EngineDeadError: a rank has failed before.
        """
        self.raise_if_dead()
        params = request.params
        max_tokens = check_request(self.config, request.request_id, request.prompt_token_ids, params)
        # Prompt log-probabilities are the same for all samples: the first one computes them.
        others = msgspec.structs.replace(params, prompt_logprobs=None)
        samples = [
            Request(
                sample_id,
                request.prompt_token_ids,
                params if index == 0 else others,
                max_tokens=max_tokens,
                eos_token_ids=self.config.model.eos_token_ids,
                arrival_time=request.arrival_time,
                seed=self._sample_seed(request.request_id, params, index),
            )
            for index, sample_id in enumerate(request.sample_ids)
        ]
        scheduler = self.schedulers[choose_replica(self.schedulers, samples[0])]
        for sample in samples:
            scheduler.add_request(sample)
        self.metrics.num_prompt_tokens += sum(sample.num_prompt_tokens for sample in samples)

    def _sample_seed(self, request_id: str, params: SamplingParams, index: int) -> int:
        """Seed of one sample: the request's own plus the index, or drawn from engine seed and id."""
        if params.seed is not None:
            return params.seed + index
        source = f"{self.config.seed}/{request_id}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(source, digest_size=7).digest(), "little")

    def step(self) -> CoreOutputs:
        """Hand out the steps that replicas have work for, then wait until one is done.

        Raises:
            EngineDeadError: a step or a rank has failed, now or before.
        """
        scheduled = self.schedule()
        return CoreOutputs(time.monotonic(), self.collect(), scheduled)

    def schedule(self) -> list[ScheduledSample]:
        """The first half of `step`: hand out steps. Returns the samples that are new on the ranks."""
        scheduled: list[ScheduledSample] = []
        with self.failure_is_fatal(), self._traced("schedule"):
            for lane in self._lanes:
                while parts := lane.schedule():
                    for part in parts:
                        self._note_scheduled(part, scheduled)
                        self.executor.submit(part.replica, part.step)
        return scheduled

    def collect(self) -> list[SampleOutput]:
        """The second half: wait until a step is done, or the executor was woken. Returns what is new."""
        with self.failure_is_fatal():
            while any(lane.num_steps_in_flight for lane in self._lanes):
                with self._traced("wait for ranks"):
                    received = self.executor.receive()
                if received is None:
                    break
                replica, output = received
                done = self._lane_of[replica].complete(replica, output)
                if done:
                    with self._traced("update"):
                        return [sample for part, output in done for sample in self._process(part, output)]
        return []

    def _traced(self, name: str) -> AbstractContextManager[None]:
        """What happens inside is a span of the trace, if there is one."""
        return nullcontext() if self._trace is None else self._trace.span(name)

    def _note_scheduled(self, part: ReplicaStep, scheduled: list[ScheduledSample]) -> None:
        step, requests = part.step, part.scheduler.requests
        now = time.monotonic()
        if self.observer is not None:
            self.observer.on_scheduled(part.replica, step, now)
        for new in step.new_requests:
            request = requests[new.request_id]
            preempted = request.num_preemptions > 0
            scheduled.append(
                ScheduledSample(new.request_id, now, request.num_cached_tokens, preempted=preempted)
            )
            if not preempted:
                part.num_prefill_tokens += new.num_computed_tokens
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = requests[request_id]
            before = request.num_computed_tokens - num_tokens
            if before < request.num_prompt_tokens and request.num_preemptions == 0:
                part.num_prefill_tokens += min(num_tokens, request.num_prompt_tokens - before)

    def _process(self, part: ReplicaStep, output: ModelRunnerOutput) -> list[SampleOutput]:
        """What a step that is done has to say."""
        step = part.step
        if self.observer is not None:
            self.observer.on_done(part.replica, step, output, time.monotonic())
        self.metrics.add(output.stats, part.replica)
        self.metrics.num_prefill_tokens += part.num_prefill_tokens
        starts: dict[str, int] = {}
        if output.prompt_logprobs:
            starts = {
                r.request_id: r.num_computed_tokens for r in (*step.new_requests, *step.cached_requests)
            }
        samples = []
        for request, new_token_ids in part.scheduler.update_from_output(step, output):
            sample = SampleOutput(request.request_id, new_token_ids)
            if request.status is not RequestStatus.RUNNING:
                sample.finish_reason, sample.stop_reason = request.status.value, request.stop_reason
            if output.logprobs:
                sample.logprobs = output.logprobs.get(request.request_id, [])[: len(new_token_ids)]
            if request.request_id in output.prompt_logprobs:
                sample.prompt_logprobs = output.prompt_logprobs[request.request_id]
                sample.prompt_start = starts[request.request_id]
            samples.append(sample)
        return samples

    def abort(self, sample_ids: Iterable[str]) -> None:
        """End samples at once; unknown ones are ignored. Blocks that a step in flight holds follow later."""
        self._end(sample_ids, RequestStatus.FINISHED_ABORTED)

    def stop(self, sample_ids: Iterable[str]) -> None:
        """The same for samples that have met a stop string."""
        self._end(sample_ids, RequestStatus.FINISHED_STOPPED)

    def _end(self, sample_ids: Iterable[str], status: RequestStatus) -> None:
        ids = list(sample_ids)
        if ids:
            for scheduler in self.schedulers:
                scheduler.finish_requests(ids, status)

    def check_health(self) -> None:
        """For when no step is due. EngineDeadError if a rank has failed."""
        with self.failure_is_fatal():
            self.executor.check_health()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a rank has failed (EngineDeadError), the executor is woken, or the time is over."""
        with self.failure_is_fatal():
            self.executor.wait(timeout_s)

    @contextmanager
    def failure_is_fatal(self) -> Iterator[None]:
        """Ranks that are in the middle of a step, be it by an interrupt, cannot take another."""
        self.raise_if_dead()
        try:
            yield
        except EngineDeadError as error:
            self._die(str(error))
            raise
        except BaseException as error:
            message = f"the engine is dead: a step ended in {error!r}"
            self._die(message)
            if isinstance(error, Exception):
                raise EngineDeadError(message) from error
            raise

    def raise_if_dead(self) -> None:
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def _die(self, message: str) -> None:
        """Fail all requests with the message and free their blocks."""
        if self.failure is not None:
            return
        self.failure = message
        for lane in self._lanes:
            lane.abandon()
        for scheduler in self.schedulers:
            scheduler.fail_requests(message)
        self.shutdown()

    def shutdown(self) -> None:
        """End the ranks. The engine is of no use afterwards."""
        self.executor.shutdown()
        if self._trace is not None:
            self._trace.close()
            self._trace = None
            merge(self.config.runtime.trace)


def log_layout(config: EngineConfig) -> None:
    """Say what runs where, and how much fits."""
    parallel, runtime, cache, model = config.parallel, config.runtime, config.cache, config.model
    logger.info(
        "%d rank(s) = DP %d x PP %d x PCP %d x TP %d, DCP %d, EP %s, %d thread(s) each; "
        "weights %s, KV cache %s, computing in %s",
        parallel.world_size,
        parallel.data_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.tensor_parallel_size,
        parallel.decode_context_parallel_size,
        "on" if parallel.enable_expert_parallel else "off",
        runtime.threads_per_rank,
        model.dtype,
        cache.cache_dtype,
        runtime.compute_dtype,
    )
    spec = fullest_kv_spec(model, parallel, cache.block_size, cache.cache_dtype)
    logger.info(
        "KV cache of a rank: %d blocks of %d tokens = %d tokens, %.0f MiB; max_model_len %d",
        cache.num_blocks,
        cache.block_size,
        cache.num_blocks * cache.block_size,
        cache.num_blocks * spec.bytes_per_block / 2**20,
        config.scheduler.max_model_len,
    )
    logger.info(
        "KV cache in all: %d tokens in each of %d replica(s); a virtual block, the unit of a prefix-cache "
        "hit, is %d tokens on each of %d DCP rank(s) = %d tokens",
        cache.num_blocks * config.virtual_block_size,
        parallel.data_parallel_size,
        cache.block_size,
        parallel.decode_context_parallel_size,
        config.virtual_block_size,
    )
