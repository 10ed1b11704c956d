"""Random traffic against the scheduler, judged from the workers' side.

FakeWorker keeps, in place of keys and values, the prefix of tokens that a slot stands for. A block that
is reused wrongly, freed too early or filled twice then shows as a wrong prefix. It runs a step as soon as
that is scheduled, as the first stage of a pipeline does; the scheduler hears of it up to PP steps later.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefold.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig
from prefold.engine.scheduler import Scheduler
from prefold.request import Request, RequestStatus, SamplingParams
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats

VOCAB = 3  # few tokens: prompts often share prefixes
EOS = 2


def next_token(tokens: list[int], seed: int) -> int:
    """The model: a fixed function of all tokens so far."""
    state = seed
    for token_id in tokens:
        state = (state * 31 + token_id + 7) % 1009
    return EOS if state % 11 == 0 else state % 2


def expected_output(prompt: list[int], seed: int, max_tokens: int, max_model_len: int) -> list[int]:
    """What the request generates if nothing ever disturbs it."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@dataclass
class HeldRequest:
    tokens: list[int]
    num_prefill: int
    num_computed: int
    block_ids: list[int]
    seed: int
    epoch: int


@dataclass
class FakeWorker:
    """Executes steps and asserts what every real worker relies on.

    `epoch` counts resets of the prefix cache; a slot knows the epoch in which its request was admitted.
    """

    block_size: int
    budget: int
    seqs: int
    held: dict[str, HeldRequest] = field(default_factory=dict)
    kv: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    epoch: int = 0

    def execute(self, out: SchedulerOutput) -> ModelRunnerOutput:
        news = [*out.new_requests, *out.cached_requests, *out.finished_request_ids]
        assert out.num_scheduled_tokens or not news, "an empty step may be left out"
        for request_id in out.finished_request_ids:
            del self.held[request_id]  # KeyError: told twice, or never held
        self._add(out)
        assert len(self.held) <= self.seqs, "there is a row for each of max_num_seqs requests"
        self._extend(out)
        told = [c.request_id for c in out.cached_requests] + [n.request_id for n in out.new_requests]
        assert list(out.num_scheduled_tokens) == told, "each request of the step once, running ones first"
        assert sum(out.num_scheduled_tokens.values()) <= self.budget
        self._check_reads(out)
        self._write(out)
        sampled = {}
        for request_id in out.num_scheduled_tokens:
            held = self.held[request_id]
            if held.num_computed == len(held.tokens):
                sampled[request_id] = [next_token(held.tokens, held.seed)]
        return ModelRunnerOutput(out.step_id, sampled, {}, {}, StepStats([], []))

    def _add(self, out: SchedulerOutput) -> None:
        for new in out.new_requests:
            assert new.request_id not in self.held
            assert new.num_prompt_tokens <= new.num_prefill_tokens == len(new.token_ids)
            assert new.num_computed_tokens % self.block_size == 0
            assert not (new.num_computed_tokens and new.sampling_params.prompt_logprobs is not None)
            self.held[new.request_id] = HeldRequest(
                tokens=new.token_ids,
                num_prefill=new.num_prefill_tokens,
                num_computed=new.num_computed_tokens,
                block_ids=new.block_ids,
                seed=new.seed,
                epoch=self.epoch,
            )

    def _extend(self, out: SchedulerOutput) -> None:
        for cached in out.cached_requests:
            held = self.held[cached.request_id]
            assert cached.num_computed_tokens == held.num_computed, "computed twice or left out"
            held.tokens += cached.new_token_ids
            held.block_ids += cached.new_block_ids
            decoding = held.num_computed >= held.num_prefill
            assert len(cached.new_token_ids) == decoding, "a decode brings one token, a prefill none"

    def _check_reads(self, out: SchedulerOutput) -> None:
        """All context of the step must be there before the step: none of it is this step's work."""
        for request_id, num_scheduled in out.num_scheduled_tokens.items():
            held = self.held[request_id]
            assert 1 <= num_scheduled <= len(held.tokens) - held.num_computed
            assert len(held.block_ids) * self.block_size >= held.num_computed + num_scheduled
            for position in range(held.num_computed):
                content = self.kv.get(self._slot(held, position))
                expected = (held.epoch, tuple(held.tokens[: position + 1]))
                assert content == expected, f"{request_id} at {position}: {content} is not {expected}"

    def _write(self, out: SchedulerOutput) -> None:
        written: dict[int, str] = {}
        for request_id, num_scheduled in out.num_scheduled_tokens.items():
            held = self.held[request_id]
            for position in range(held.num_computed, held.num_computed + num_scheduled):
                block_id, offset = self._slot(held, position)
                assert written.setdefault(block_id, request_id) == request_id, f"two write block {block_id}"
                self.kv[block_id, offset] = (held.epoch, tuple(held.tokens[: position + 1]))
            held.num_computed += num_scheduled
        for request_id, held in self.held.items():
            for block_id in held.block_ids:
                assert written.get(block_id, request_id) == request_id, f"{request_id}'s block overwritten"

    def _slot(self, held: HeldRequest, position: int) -> tuple[int, int]:
        return held.block_ids[position // self.block_size], position % self.block_size


@dataclass
class InFlight:
    """A step that the worker has run and the scheduler has not heard of. `ends`: positions it computes to."""

    out: SchedulerOutput
    result: ModelRunnerOutput
    ends: dict[Request, int]


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, failures, aborts and preemptions in any order."""

    @initialize(
        budget=st.sampled_from([1, 2, 7, 16, 33, 72]),
        pcp=st.sampled_from([1, 2, 3]),
        stages=st.integers(1, 4),
        seqs=st.integers(1, 6),
        block_size=st.sampled_from([1, 2, 4]),
        dcp=st.sampled_from([1, 1, 2, 3]),
        num_blocks=st.integers(4, 20),
        max_model_len=st.integers(6, 48),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, budget, pcp, stages, seqs, block_size, dcp, num_blocks, max_model_len, caching):
        parallel = ParallelConfig(
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            pipeline_parallel_size=stages,
        )
        limits = SchedulerConfig(seqs, budget, max_model_len)
        cache = CacheConfig(block_size, num_blocks, caching)
        self.scheduler = Scheduler(EngineConfig(None, parallel, cache, limits, RuntimeConfig()))
        self.worker = FakeWorker(block_size * dcp, budget * pcp, seqs)
        self.stages = stages
        self.arrived: list[Request] = []
        self.outputs: dict[Request, list[int]] = {}
        self.in_flight: deque[InFlight] = deque()

    def unfinished(self) -> list[str]:
        return list(self.scheduler.requests)

    @rule(
        prefix=st.integers(0, 12),
        own=st.lists(st.integers(0, VOCAB - 2), max_size=9),
        max_tokens=st.integers(1, 12),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        again=st.booleans(),
        same_id=st.booleans(),
        data=st.data(),
    )
    def arrive(self, prefix, own, max_tokens, prompt_logprobs, again, same_id, data):
        """A prompt with a common prefix, or an earlier request's prompt and output again. The id may be that
        of a request that has ended, even if steps in flight still hold it."""
        prompt = [i % 3 % 2 for i in range(prefix)] + own
        if again and self.arrived:
            prompt = list(data.draw(st.sampled_from(self.arrived)).all_token_ids)
        params = SamplingParams(prompt_logprobs=prompt_logprobs)
        name = str(len(self.arrived))
        if same_id and self.arrived and self.arrived[-1].status.is_finished:
            name = self.arrived[-1].request_id
        self.add(Request(name, prompt, params, max_tokens, eos_token_ids=(EOS,), seed=len(prompt) % 5))

    def add(self, request):
        prompt, max_tokens = request.all_token_ids, request.max_tokens
        limit = self.scheduler.max_model_len
        slots = min(len(prompt) + max_tokens, limit) - 1
        pool = self.scheduler.kv.pool
        servable = 0 < len(prompt) < limit and slots <= pool.num_blocks * pool.block_size
        try:
            self.scheduler.add_request(request)
        except ValueError:
            assert not servable
            return
        assert servable
        self.arrived.append(request)
        self.outputs[request] = []

    @rule(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=5), seed=st.integers(0, 4))
    def crowd(self, lengths, seed):
        """Short prompts that generate much: they are let in together, and then blocks run out."""
        pool = self.scheduler.kv.pool
        max_tokens = pool.num_blocks * pool.block_size // 2
        for i, length in enumerate(lengths):
            prompt = [(i >> bit) % 2 for bit in range(length)]
            name = str(len(self.arrived))
            self.add(Request(name, prompt, SamplingParams(), max_tokens, eos_token_ids=(EOS,), seed=seed))
        self.run(8)

    @precondition(lambda self: len(self.in_flight) < self.stages)
    @rule()
    def schedule(self):
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        awaiting = {request.request_id for request in running if self.awaits_a_token(request)}
        out = self.scheduler.schedule()
        assert out.num_scheduled_tokens or self.in_flight or not self.unfinished(), "no progress"
        scheduled = list(out.num_scheduled_tokens)
        order = [request.request_id for request in self.scheduler.running]
        assert scheduled == [name for name in order if name in out.num_scheduled_tokens], "order of admission"
        assert not awaiting & set(scheduled), "there is nothing to compute before the token is there"
        if self.stages == 1:
            assert scheduled == order, "every running request gets its turn"
        new = [n.request_id for n in out.new_requests]
        assert new == [request.request_id for request in waiting[: len(new)]], "somebody overtook"
        for request in running:
            held = request.request_id in {r.request_id for f in self.in_flight for r in f.ends}
            assert not (request.status is RequestStatus.PREEMPTED and held), f"{request} is in flight"
        requests = [self.scheduler.requests[name] for name in scheduled]
        ends = {request: request.num_computed_tokens for request in requests}
        self.in_flight.append(InFlight(out, self.worker.execute(out), ends))

    def awaits_a_token(self, request: Request) -> bool:
        return any(step.ends.get(request) == request.num_tokens for step in self.in_flight)

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.integers(0, 40))
    def update(self, fails=40):
        """The oldest step is done; now and then it has failed a request."""
        step = self.in_flight.popleft()
        for request_id in list(step.out.num_scheduled_tokens)[fails : fails + 1]:
            step.result.errors[request_id] = "bad logits"
            step.result.sampled_token_ids.pop(request_id, None)
        for request, new_token_ids in self.scheduler.update_from_output(step.out, step.result):
            assert request in step.ends
            assert bool(new_token_ids) != (request.status is RequestStatus.FINISHED_ERROR)
            self.outputs[request] += new_token_ids

    @rule(steps=st.integers(1, 4))
    def run(self, steps):
        """As the engine does it: as many steps in flight as may be."""
        for _ in range(steps):
            while len(self.in_flight) < self.stages:
                self.schedule()
                if not self.in_flight[-1].out.num_scheduled_tokens:
                    break
            self.update()

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(self.unfinished()))
        request = self.scheduler.requests[name]
        assert self.scheduler.abort_requests([name, "unknown"]) == [request]

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        request = data.draw(st.sampled_from(self.scheduler.running))
        in_flight = any(request in step.ends for step in self.in_flight)
        assert self.scheduler.preempt(request.request_id) is not in_flight

    @rule()
    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()
        self.worker.epoch += 1

    @invariant()
    def books_agree(self):
        self.scheduler.check_integrity()
        for step in self.in_flight:
            for request, end in step.ends.items():
                num_blocks = len(self.scheduler.kv.block_ids(request))
                assert num_blocks * self.worker.block_size >= end, (
                    f"{request} is in flight without its blocks"
                )

    def teardown(self):
        for _ in range(3000):
            if not self.scheduler.has_unfinished_requests and not self.in_flight:
                break
            self.run(1)
        assert not self.scheduler.has_unfinished_requests
        self.books_agree()
        assert self.scheduler.kv.pool.num_free_blocks == self.scheduler.kv.pool.num_blocks
        # The workers hear of the last ends with the next tokens.
        last = Request("last", [0], SamplingParams(), max_tokens=1)
        self.scheduler.add_request(last)
        self.outputs[last] = []
        self.run(1)
        assert list(self.worker.held) == ["last"]
        for request in self.arrived:
            output = self.outputs[request]
            prompt = request.all_token_ids[: request.num_prompt_tokens]
            assert output == request.output_token_ids
            expected = expected_output(prompt, request.seed, request.max_tokens, self.scheduler.max_model_len)
            assert output == expected[: len(output)]
            if request.status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                assert output == expected


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=30)
