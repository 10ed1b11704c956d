"""The engine: requests in, outputs out, one step at a time."""

from __future__ import annotations

import hashlib
import logging
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from prefold.config import EngineConfig
from prefold.distributed.layouts import fullest_kv_spec
from prefold.engine.executor import EngineDeadError, Executor, make_executor
from prefold.engine.output_processor import OutputProcessor, TokenizerLike
from prefold.engine.replicas import ReplicaStep, choose_replica, make_lanes
from prefold.engine.scheduler import Scheduler
from prefold.request import Request, RequestOutput, RequestStatus, SamplingParams
from prefold.step import ModelRunnerOutput, StepStats

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


class LLMEngine:
    """Schedulers, ranks and output processing behind one `step()`.

    Args:
        config: resolved configuration.
        tokenizer: None works on token ids only.
        executor: for tests; by default the ranks that `config` asks for are started.

    Attributes:
        schedulers: one per replica.
        failed_outputs: the requests that ended with finish reason "error" when the engine died.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: TokenizerLike | None = None, executor: Executor | None = None
    ) -> None:
        self.config = config
        self.metrics = EngineMetrics()
        self.schedulers = [Scheduler(config) for _ in range(config.parallel.data_parallel_size)]
        self.failed_outputs: list[RequestOutput] = []
        self._lanes = make_lanes(self.schedulers, config.parallel)
        self._lane_of = {replica: lane for lane in self._lanes for replica in lane.replicas}
        self._outputs = OutputProcessor(tokenizer)
        _log_layout(config)
        self._executor = make_executor(config) if executor is None else executor
        self._failure: str | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The first replica's."""
        return self.schedulers[0]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do: requests, or steps in flight of requests that were aborted."""
        return any(scheduler.has_unfinished_requests for scheduler in self.schedulers) or any(
            lane.num_steps_in_flight for lane in self._lanes
        )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        stream: bool = True,
    ) -> None:
        """Queue a request; with `stream` False nothing comes back before it has finished.

        Raises:
            ValueError: the request cannot be served; names the value and the limit.
            EngineDeadError: a rank has failed before.
        """
        self._raise_if_dead()
        token_ids = _integers(request_id, prompt_token_ids)
        max_tokens = self._check_request(request_id, token_ids, params)
        sample_ids = self._outputs.add_request(request_id, prompt, token_ids, params, stream=stream)
        # Prompt log-probabilities are the same for all samples: the first one computes them.
        others = msgspec.structs.replace(params, prompt_logprobs=None)
        requests = [
            Request(
                sample_id,
                token_ids,
                params if index == 0 else others,
                max_tokens=max_tokens,
                eos_token_ids=self.config.model.eos_token_ids,
                arrival_time=time.monotonic(),
                seed=self._sample_seed(request_id, params, index),
            )
            for index, sample_id in enumerate(sample_ids)
        ]
        # All samples on one replica: they share the prompt's blocks.
        scheduler = self.schedulers[choose_replica(self.schedulers, requests[0])]
        for request in requests:
            scheduler.add_request(request)
        self.metrics.num_prompt_tokens += sum(request.num_prompt_tokens for request in requests)

    def _check_request(self, request_id: str, token_ids: list[int], params: SamplingParams) -> int:
        """ValueError unless the request can be served; returns its limit of generated tokens."""
        limit, vocab_size = self.config.scheduler.max_model_len, self.config.model.vocab_size
        if not token_ids:
            raise ValueError(f"request {request_id}: the prompt is empty")
        outside = next((t for t in token_ids if not 0 <= t < vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"request {request_id}: token id {outside} is outside the vocabulary [0, {vocab_size})"
            )
        max_tokens = max(1, limit - len(token_ids)) if params.max_tokens is None else params.max_tokens
        if len(token_ids) + max_tokens > limit:
            raise ValueError(
                f"request {request_id}: {len(token_ids)} prompt tokens + max_tokens={max_tokens} "
                f"exceed max_model_len={limit}"
            )
        biased = max(params.logit_bias or {0: 0.0})
        if biased >= vocab_size:
            raise ValueError(
                f"request {request_id}: logit_bias names token {biased}, "
                f"outside the vocabulary [0, {vocab_size})"
            )
        self.scheduler.check_servable(request_id, len(token_ids), max_tokens)
        return max_tokens

    def _sample_seed(self, request_id: str, params: SamplingParams, index: int) -> int:
        """Seed of one sample: the request's own plus the index, or drawn from engine seed and id."""
        if params.seed is not None:
            return params.seed + index
        source = f"{self.config.seed}/{request_id}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(source, digest_size=7).digest(), "little")

    def step(self) -> list[RequestOutput]:
        """Hand out the steps that replicas have work for, then wait until one is done.

        Returns the requests that have something new to show.

        Raises:
            EngineDeadError: a step or a rank has failed, now or before; see `failed_outputs`.
        """
        with self._failure_is_fatal():
            for lane in self._lanes:
                while parts := lane.schedule():
                    self._submit(parts)
            done: list[tuple[ReplicaStep, ModelRunnerOutput]] = []
            while not done and any(lane.num_steps_in_flight for lane in self._lanes):
                replica, output = self._executor.receive()
                done = self._lane_of[replica].complete(replica, output)
            return [result for part, output in done for result in self._process(part, output)]

    def check_health(self) -> None:
        """For when no step is due. EngineDeadError if a rank has failed."""
        with self._failure_is_fatal():
            self._executor.check_health()

    @contextmanager
    def _failure_is_fatal(self) -> Iterator[None]:
        """Ranks that are in the middle of a step, be it by an interrupt, cannot take another."""
        self._raise_if_dead()
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

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def _die(self, message: str) -> None:
        """Fail all requests with the message and free their blocks."""
        self._failure = message
        for lane in self._lanes:
            lane.abandon()
        for scheduler in self.schedulers:
            scheduler.fail_requests(message)
        self.failed_outputs = self._outputs.fail_all(message)
        self._executor.shutdown()

    def _submit(self, parts: list[ReplicaStep]) -> None:
        for part in parts:
            self._note_scheduled(part)
            self._executor.submit(part.replica, part.step)

    def _note_scheduled(self, part: ReplicaStep) -> None:
        step, requests = part.step, part.scheduler.requests
        for new in step.new_requests:
            request = requests[new.request_id]
            if request.num_preemptions > 0:
                self._outputs.mark_preempted(new.request_id)
            self._outputs.mark_scheduled(new.request_id, num_cached_tokens=request.num_cached_tokens)
            if request.num_preemptions == 0:
                part.num_prefill_tokens += new.num_computed_tokens
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = requests[request_id]
            before = request.num_computed_tokens - num_tokens
            if request.num_preemptions == 0:
                part.num_prefill_tokens += min(num_tokens, max(0, request.num_prompt_tokens - before))

    def _process(self, part: ReplicaStep, output: ModelRunnerOutput) -> list[RequestOutput]:
        """Tokens, texts, stop strings and finished requests of a step that is done."""
        step = part.step
        self.metrics.add(output.stats, part.replica)
        self.metrics.num_prefill_tokens += part.num_prefill_tokens
        starts = {r.request_id: r.num_computed_tokens for r in (*step.new_requests, *step.cached_requests)}
        results: dict[str, RequestOutput] = {}
        stopped: set[str] = set()
        for request, new_token_ids in part.scheduler.update_from_output(step, output):
            sample_id = request.request_id
            result, to_stop = self._outputs.process(
                sample_id,
                new_token_ids,
                logprobs=output.logprobs.get(sample_id, ())[: len(new_token_ids)],
                prompt_logprobs=output.prompt_logprobs.get(sample_id, ()),
                prompt_start=starts[sample_id],
                finish_reason=request.status.value if request.status.is_finished else None,
                stop_reason=request.stop_reason,
            )
            stopped |= to_stop
            if result is not None:
                results[result.request_id] = result
        part.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        return list(results.values())

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once. None if unknown. Its blocks are free when no step in flight holds it."""
        result, sample_ids = self._outputs.abort(request_id)
        for scheduler in self.schedulers:
            scheduler.abort_requests(sample_ids)
        return result

    def shutdown(self) -> None:
        """End the ranks. The engine is of no use afterwards."""
        self._executor.shutdown()


def _log_layout(config: EngineConfig) -> None:
    """Say what runs where, and how much fits."""
    parallel, runtime, cache, model = config.parallel, config.runtime, config.cache, config.model
    logger.info(
        "%d rank(s) = DP %d x PP %d x PCP %d x TP %d, DCP %d, EP %s, %d thread(s) each; "
        "weights and KV cache %s, computing in %s",
        parallel.world_size,
        parallel.data_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.tensor_parallel_size,
        parallel.decode_context_parallel_size,
        "on" if parallel.enable_expert_parallel else "off",
        runtime.threads_per_rank,
        model.dtype,
        runtime.compute_dtype,
    )
    spec = fullest_kv_spec(model, parallel, cache.block_size)
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


def _integers(request_id: str, token_ids: Sequence[int]) -> list[int]:
    """Plain integers, also of numpy's; ValueError for anything else."""
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise ValueError(f"request {request_id}: token ids must be integers: {error}") from None
