"""The engine: requests in, outputs out, one step at a time."""

from __future__ import annotations

import hashlib
import logging
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from prefold.config import EngineConfig
from prefold.distributed.layouts import fullest_kv_spec
from prefold.engine.executor import EngineDeadError, Executor, make_executor
from prefold.engine.output_processor import OutputProcessor, TokenizerLike
from prefold.engine.scheduler import Scheduler
from prefold.request import Request, RequestOutput, RequestStatus, SamplingParams
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats

logger = logging.getLogger("prefold")


@dataclass
class EngineMetrics:
    """Sums over all steps so far.

    Attributes:
        num_steps: steps run.
        num_prompt_tokens: prompt tokens of all requests, at their arrival.
        num_prefill_tokens: prompt tokens computed or found in the prefix cache.
        rank_tokens, rank_causal_pairs: per PCP rank, prefill and decode.
        forward_s: time in steps on the sampling rank.
        bytes_sent: by collective, on the sampling rank; the others send as much.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    rank_tokens: list[int] = field(default_factory=list)
    rank_causal_pairs: list[int] = field(default_factory=list)
    forward_s: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)

    def add(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.forward_s += stats.forward_s
        for total, step in (
            (self.rank_tokens, stats.rank_tokens),
            (self.rank_causal_pairs, stats.rank_causal_pairs),
        ):
            total.extend([0] * (len(step) - len(total)))
            for rank, count in enumerate(step):
                total[rank] += count
        for key, count in stats.bytes_sent.items():
            self.bytes_sent[key] = self.bytes_sent.get(key, 0) + count


class LLMEngine:
    """Scheduler, ranks and output processing behind one `step()`.

    Args:
        config: resolved configuration.
        tokenizer: None works on token ids only.
        executor: for tests; by default the ranks that `config` asks for are started.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: TokenizerLike | None = None, executor: Executor | None = None
    ) -> None:
        self.config = config
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(
            config.scheduler, config.cache, config.parallel.prefill_context_parallel_size
        )
        self._outputs = OutputProcessor(tokenizer)
        _log_layout(config)
        self._executor = make_executor(config) if executor is None else executor
        self._failure: str | None = None

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

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
        """
        token_ids = _integers(request_id, prompt_token_ids)
        max_tokens = self._check_request(request_id, token_ids, params)
        sample_ids = self._outputs.add_request(request_id, prompt, token_ids, params, stream=stream)
        # Prompt log-probabilities are the same for all samples: the first one computes them.
        others = msgspec.structs.replace(params, prompt_logprobs=None)
        for index, sample_id in enumerate(sample_ids):
            request = Request(
                sample_id,
                token_ids,
                params if index == 0 else others,
                max_tokens=max_tokens,
                eos_token_ids=self.config.model.eos_token_ids,
                arrival_time=time.monotonic(),
                seed=self._sample_seed(request_id, params, index),
            )
            self.scheduler.add_request(request)
        self.metrics.num_prompt_tokens += len(token_ids) * len(sample_ids)

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
        max_tokens = limit - len(token_ids) if params.max_tokens is None else params.max_tokens
        if len(token_ids) >= limit or len(token_ids) + max_tokens > limit:
            raise ValueError(
                f"request {request_id}: {len(token_ids)} prompt tokens + max_tokens={max(max_tokens, 1)} "
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
        """Run one step on all ranks; returns the requests that have something new to show.

        Raises:
            EngineDeadError: a rank has failed, now or before.
        """
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        step = self.scheduler.schedule()
        self._note_scheduled(step)
        try:
            output = self._executor.execute(step)
        except BaseException as error:
            # Ranks that are in the middle of a step, be it by an interrupt, cannot take another.
            self._failure = str(error) or f"the engine is dead: a step ended in {type(error).__name__}"
            self._executor.shutdown()
            raise
        self.metrics.add(output.stats)
        if output.errors:
            self.scheduler.finish_requests(output.errors, RequestStatus.FINISHED_ERROR)
        events = self.scheduler.update_from_output(step, output)
        return self._process(step, output, events)

    def _note_scheduled(self, step: SchedulerOutput) -> None:
        for new in step.new_requests:
            request = self.scheduler.requests[new.request_id]
            if request.num_preemptions > 0:
                self._outputs.mark_preempted(new.request_id)
            self._outputs.mark_scheduled(new.request_id, num_cached_tokens=request.num_cached_tokens)
            if request.num_preemptions == 0:
                self.metrics.num_prefill_tokens += new.num_computed_tokens
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            before = request.num_computed_tokens - num_tokens
            if request.num_preemptions == 0:
                self.metrics.num_prefill_tokens += min(num_tokens, max(0, request.num_prompt_tokens - before))

    def _process(
        self,
        step: SchedulerOutput,
        output: ModelRunnerOutput,
        events: list[tuple[Request, list[int]]],
    ) -> list[RequestOutput]:
        """Texts, stop strings and finished requests of a step."""
        starts = {r.request_id: r.num_computed_tokens for r in (*step.new_requests, *step.cached_requests)}
        results: dict[str, RequestOutput] = {}
        stopped: set[str] = set()

        def collect(sample_id: str, new_token_ids: list[int], **about: object) -> None:
            result, to_stop = self._outputs.process(
                sample_id,
                new_token_ids,
                logprobs=output.logprobs.get(sample_id, ())[: len(new_token_ids)],
                prompt_logprobs=output.prompt_logprobs.get(sample_id, ()),
                prompt_start=starts.get(sample_id, 0),
                **about,  # type: ignore[arg-type]
            )
            stopped.update(to_stop)
            if result is not None:
                results[result.request_id] = result

        sampled = {request.request_id for request, _ in events}
        for sample_id in output.prompt_logprobs.keys() - sampled - output.errors.keys():
            collect(sample_id, [])
        for request, new_token_ids in events:
            finished = request.status.is_finished
            collect(
                request.request_id,
                new_token_ids,
                finish_reason=request.status.value if finished else None,
                stop_reason=request.stop_reason,
            )
        for sample_id, message in output.errors.items():
            collect(sample_id, [], finish_reason=RequestStatus.FINISHED_ERROR.value, stop_reason=message)
        self.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        return list(results.values())

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once; its blocks are free before the next step. None if unknown."""
        result, sample_ids = self._outputs.abort(request_id)
        self.scheduler.abort_requests(sample_ids)
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
