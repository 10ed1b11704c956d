"""LLMEngine over a fake executor: what is submitted when, to which replica, and what comes out.

The executor's ranks complete the steps of one replica in order, but those of different replicas in an
order that the test chooses.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from prefold.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from prefold.engine.engine import LLMEngine
from prefold.engine.executor import EngineDeadError
from prefold.engine.llm import LLM
from prefold.request import RequestOutput, SamplingParams
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats
from prefold.testing.model_config import mla_model_config

VOCAB = 1000
MODEL = mla_model_config(vocab_size=VOCAB)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % VOCAB


def expected(prompt: Sequence[int], num_tokens: int = 5) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeExecutor:
    """Ranks that compute `next_token`. `choose` picks, among replicas with steps in flight, the one whose
    oldest step is done next. `before` may raise what the real executor would."""

    def __init__(
        self,
        choose: Callable[[list[int]], int] = min,
        before: Callable[[str, int], None] = lambda call, number: None,
    ) -> None:
        self._choose = choose
        self._before = before
        self._calls = Counter[str]()
        self._held: dict[tuple[int, str], tuple[list[int], int]] = {}
        self._pending: dict[int, deque[ModelRunnerOutput]] = {}
        self.submitted: list[tuple[int, SchedulerOutput]] = []
        self.most_in_flight = Counter[int]()
        self.shut_down = False

    def _note(self, call: str) -> None:
        assert not self.shut_down
        self._calls[call] += 1
        self._before(call, self._calls[call])

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        self._note("submit")
        for request_id in step.finished_request_ids:
            del self._held[replica, request_id]
        for new in step.new_requests:
            assert (replica, new.request_id) not in self._held
            self._held[replica, new.request_id] = (list(new.token_ids), new.num_computed_tokens)
        for cached in step.cached_requests:
            tokens, computed = self._held[replica, cached.request_id]
            assert computed == cached.num_computed_tokens
            tokens += cached.new_token_ids
        sampled = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            tokens, computed = self._held[replica, request_id]
            self._held[replica, request_id] = (tokens, computed + num_tokens)
            if computed + num_tokens == len(tokens):
                sampled[request_id] = [next_token(tokens)]
        count = step.total_num_scheduled_tokens
        stats = StepStats([count, 2 * count], [3 * count, 0], forward_s=1.0, bytes_sent={"x": 1})
        self.submitted.append((replica, step))
        queue = self._pending.setdefault(replica, deque())
        queue.append(ModelRunnerOutput(step.step_id, sampled, {}, {}, stats))
        self.most_in_flight[replica] = max(self.most_in_flight[replica], len(queue))

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        self._note("receive")
        replica = self._choose([replica for replica, queue in self._pending.items() if queue])
        return replica, self._pending[replica].popleft()

    def check_health(self) -> None:
        self._note("check_health")

    def shutdown(self) -> None:
        self.shut_down = True


def make(
    executor: FakeExecutor | None = None, dp: int = 1, pp: int = 1, ep: bool = False, **limits: int
) -> tuple[LLMEngine, FakeExecutor]:
    parallel = ParallelConfig(data_parallel_size=dp, pipeline_parallel_size=pp, enable_expert_parallel=ep)
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "max_model_len": 5000} | limits
    blocks = sizes.pop("num_blocks", 1500)
    config = EngineConfig(
        MODEL, parallel, CacheConfig(4, blocks, True), SchedulerConfig(**sizes), RuntimeConfig()
    )
    executor = executor or FakeExecutor()
    return LLMEngine(config, executor=executor), executor


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + i * i) % VOCAB for i in range(length)]


def assert_idle(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests
    for scheduler in engine.schedulers:
        scheduler.check_integrity()
        assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks


def run(engine: LLMEngine, limit: int = 3000) -> dict[str, RequestOutput]:
    outputs = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests:
            break
        outputs |= {output.request_id: output for output in engine.step()}
        for scheduler in engine.schedulers:
            scheduler.check_integrity()
    assert_idle(engine)
    return outputs


# -------------------------------------------------------------------- steps in flight


LAYOUTS = [
    dict(zip(("dp", "pp", "ep"), sizes)) for sizes in itertools.product((1, 2, 3), (1, 2, 3), (False, True))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_the_layout_nor_on_who_is_done_first(layout: dict, seed: int):
    rng = random.Random(seed)
    engine, executor = make(FakeExecutor(rng.choice), **layout, num_blocks=120, max_model_len=150)
    prompts = {str(i): prompt_of(rng.choice([1, 3, 8, 20, 70, 101]), rng.randrange(4)) for i in range(14)}
    outputs = {}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, GREEDY)
        if rng.random() < 0.5:
            outputs |= {output.request_id: output for output in engine.step()}
    outputs |= run(engine)
    assert {i: o.outputs[0].token_ids for i, o in outputs.items()} == {
        i: expected(prompt) for i, prompt in prompts.items()
    }
    assert max(executor.most_in_flight.values()) <= layout["pp"]
    assert (
        engine.metrics.num_prefill_tokens
        == sum(map(len, prompts.values()))
        == engine.metrics.num_prompt_tokens
    )


def test_a_long_prompt_fills_the_pipeline():
    engine, executor = make(pp=3)
    engine.add_request("a", prompt_of(32 * 5), GREEDY)
    assert engine.step() == []
    assert [step.num_scheduled_tokens for _, step in executor.submitted] == [{"a": 32}] * 3
    assert engine.metrics.num_prefill_tokens == 32, "what is in flight is not done"
    engine.step()
    assert len(executor.submitted) == 4
    run(engine)


def test_an_idle_engine_submits_nothing():
    engine, executor = make(dp=2, ep=True)
    assert engine.step() == []
    assert executor.submitted == []


# -------------------------------------------------------------------- lanes


def test_without_experts_replicas_do_not_wait_for_each_other():
    engine, executor = make(FakeExecutor(max), dp=2, max_num_batched_tokens=256)
    engine.add_request("long", prompt_of(4097), GREEDY)
    engine.add_request("short", prompt_of(1, 5), GREEDY)
    for _ in range(5):
        outputs = engine.step()
    assert [output.request_id for output in outputs] == ["short"]
    assert [replica for replica, _ in executor.submitted] == [0, 1, 1, 1, 1, 1]
    run(engine)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("lengths", [(4097, 1), (1, 4097), (40,), (3, 3, 3, 3, 700)], ids=str)
def test_with_experts_all_replicas_take_every_step(dp: int, pp: int, lengths: tuple[int, ...]):
    engine, executor = make(
        FakeExecutor(random.Random(0).choice), dp, pp, ep=True, max_num_batched_tokens=256
    )
    for i, length in enumerate(lengths):
        engine.add_request(str(i), prompt_of(length, i), GREEDY)
    outputs = run(engine)
    assert [outputs[str(i)].outputs[0].token_ids for i in range(len(lengths))] == [
        expected(prompt_of(length, i)) for i, length in enumerate(lengths)
    ]
    steps = [executor.submitted[i : i + dp] for i in range(0, len(executor.submitted), dp)]
    for parts in steps:
        assert [replica for replica, _ in parts] == list(range(dp))
        assert len({step.step_id for _, step in parts}) == 1, "one number: it names the step in errors"
        assert any(step.num_scheduled_tokens for _, step in parts), "nobody had work"
    idle = [step for _, step in executor.submitted if not step.num_scheduled_tokens]
    assert idle, "some replica has less to do than another"
    assert not any(step.new_requests or step.finished_request_ids for step in idle)
    assert max(executor.most_in_flight.values()) <= pp


def test_a_lockstep_is_over_when_all_outputs_are_in():
    engine, executor = make(FakeExecutor(min), dp=2, ep=True)
    engine.add_request("a", prompt_of(3), GREEDY)
    engine.add_request("b", prompt_of(3, 1), GREEDY)
    assert {output.request_id for output in engine.step()} == {"a", "b"}
    assert len(executor.submitted) == 2


# -------------------------------------------------------------------- routing


def replicas_of(engine: LLMEngine) -> dict[str, int]:
    return {request_id: d for d, s in enumerate(engine.schedulers) for request_id in s.requests}


def test_requests_go_where_least_is_to_do():
    engine, _ = make(dp=3)
    for i, length in enumerate([10, 6, 7, 1, 1, 8, 20]):
        engine.add_request(str(i), prompt_of(length, i), GREEDY)
    # Outstanding before each: 0 0 0 | 10 0 0 | 10 6 0 | 10 6 7 | 10 7 7 | 10 8 7 | 10 8 15
    assert [replicas_of(engine)[str(i)] for i in range(7)] == [0, 1, 2, 1, 1, 2, 1]
    run(engine)


def test_many_decodes_are_load():
    engine, _ = make(dp=2, max_num_batched_tokens=512)
    for i in range(6):
        engine.add_request(str(i), prompt_of(2, i), GREEDY)
    assert list(Counter(replicas_of(engine).values()).values()) == [3, 3]
    engine.abort_request("1")
    engine.step()
    engine.step()
    engine.add_request("new", prompt_of(2, 9), GREEDY)
    assert replicas_of(engine)["new"] == 1
    run(engine)


def test_a_cached_prefix_draws_as_many_tokens_as_it_saves():
    engine, _ = make(dp=2, max_num_batched_tokens=512)
    shared = prompt_of(40, 3)
    engine.add_request("load", prompt_of(4, 1), GREEDY)
    engine.add_request("first", shared, GREEDY)
    assert replicas_of(engine) == {"load": 0, "first": 1}
    run(engine)
    engine.add_request("a", [*shared, 1], GREEDY)
    assert replicas_of(engine) == {"a": 1}, "40 tokens are cached there"
    engine.add_request("b", prompt_of(100, 5), GREEDY)
    assert replicas_of(engine)["b"] == 0
    engine.add_request("c", [*shared, 2], GREEDY)
    assert replicas_of(engine)["c"] == 1
    engine.add_request("d", prompt_of(90, 6), GREEDY)  # 100 tokens against 1 + 1
    assert replicas_of(engine)["d"] == 1
    engine.add_request("e", prompt_of(45, 7), GREEDY)  # 100 against 92
    engine.add_request("f", [*shared, 4], GREEDY)  # 100 against 137 - 40
    assert (replicas_of(engine)["e"], replicas_of(engine)["f"]) == (1, 1)
    engine.add_request("g", [*shared, 5], GREEDY)  # 100 against 138 - 40
    engine.add_request("h", prompt_of(5, 8), GREEDY)
    engine.add_request("i", [*shared, 5], SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=0))
    assert (replicas_of(engine)["g"], replicas_of(engine)["h"]) == (1, 0)
    assert replicas_of(engine)["i"] == 0, "it needs all logits, a cached prefix does not help it"
    engine.abort_request("i")  # the executor here computes no log-probabilities
    run(engine)


def test_samples_of_a_request_stay_together():
    engine, _ = make(dp=2)
    params = SamplingParams(temperature=0.0, n=3, max_tokens=5, ignore_eos=True)
    for name in "abcd":
        engine.add_request(name, prompt_of(20, ord(name)), params)
    where = replicas_of(engine)
    assert [{where[f"{name}:{i}"] for i in range(3)} for name in "abcd"] == [{0}, {1}, {0}, {1}]
    outputs = run(engine)
    for name in "abcd":
        tokens = expected(prompt_of(20, ord(name)))
        assert [sample.token_ids for sample in outputs[name].outputs] == [tokens] * 3


def test_what_no_replica_can_hold_is_refused():
    engine, _ = make(dp=2, num_blocks=10)
    with pytest.raises(ValueError, match=r"11 blocks of 4 tokens.*has 10"):
        engine.add_request("a", prompt_of(37), GREEDY)
    assert_idle(engine)


# -------------------------------------------------------------------- metrics, aborts


def test_metrics_have_an_entry_per_replica_and_pcp_rank():
    engine, _ = make(FakeExecutor(max), dp=2)
    engine.add_request("a", prompt_of(10), GREEDY)
    engine.add_request("b", prompt_of(7, 1), GREEDY)
    run(engine)
    assert engine.metrics.rank_tokens == [14, 28, 11, 22]  # the last token sampled is not computed
    assert engine.metrics.rank_causal_pairs == [42, 0, 33, 0]
    assert (engine.metrics.num_steps, engine.metrics.forward_s, engine.metrics.bytes_sent) == (
        10,
        10,
        {"x": 10},
    )


@pytest.mark.parametrize("layout", [{"pp": 3}, {"dp": 2, "pp": 2, "ep": True}, {"dp": 2}], ids=str)
def test_an_id_may_be_used_again_while_its_old_request_is_in_flight(layout: dict):
    engine, _ = make(**layout)
    for seed in range(12):
        engine.add_request("a", prompt_of(150, seed), GREEDY)
        for _ in range(seed % 6):
            engine.step()
        aborted = engine.abort_request("a")
        assert aborted is not None
        assert aborted.outputs[0].finish_reason == "abort"
        for scheduler in engine.schedulers:
            scheduler.check_integrity()
    engine.add_request("a", prompt_of(9), GREEDY)
    assert run(engine)["a"].outputs[0].token_ids == expected(prompt_of(9))


def test_steps_of_aborted_requests_are_waited_for():
    engine, _ = make(pp=2)
    engine.add_request("a", prompt_of(150), GREEDY)
    engine.step()
    engine.abort_request("a")
    assert engine.has_unfinished_requests, "its last step holds blocks"
    assert run(engine) == {}


def test_a_step_that_is_waited_for_keeps_nobody_from_an_idle_replica():
    """What `collect` returns when the executor is woken: nothing, and all goes on afterwards."""
    woken = []

    class Woken(FakeExecutor):
        def receive(self) -> tuple[int, ModelRunnerOutput] | None:
            return woken.pop() if woken else super().receive()

    engine, executor = make(Woken(max), dp=2, max_num_batched_tokens=256)
    engine.add_request("long", prompt_of(1000), GREEDY)
    woken.append(None)
    assert engine.step() == []
    assert [replica for replica, _ in executor.submitted] == [0]
    engine.add_request("short", prompt_of(3, 5), GREEDY)
    assert [output.request_id for output in engine.step()] == ["short"]
    assert [replica for replica, _ in executor.submitted] == [0, 1]
    assert {name: o.outputs[0].token_ids for name, o in run(engine).items()} == {
        "long": expected(prompt_of(1000)),
        "short": expected(prompt_of(3, 5)),
    }


# -------------------------------------------------------------------- failure


class Failing:
    """Raises `error` at the n-th of these calls."""

    def __init__(self, call: str, number: int, error: BaseException) -> None:
        self.call, self.number, self.error = call, number, error

    def __call__(self, call: str, number: int) -> None:
        if (call, number) == (self.call, self.number):
            raise self.error


DEAD = EngineDeadError("the engine is dead: rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"dp": 2}, {"dp": 2, "pp": 2, "ep": True}], ids=str)
@pytest.mark.parametrize("call", ["submit", "receive"])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (DEAD, EngineDeadError, "rank 1 was killed by SIGKILL"),
        (ZeroDivisionError("by zero"), EngineDeadError, "ZeroDivisionError.*by zero"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_failure_ends_all_requests(layout: dict, call: str, number: int, error, raised, message):
    engine, executor = make(FakeExecutor(before=Failing(call, number, error)), **layout, max_num_seqs=2)
    for i in range(8):
        engine.add_request(str(i), prompt_of(30, i), GREEDY)
    finished = set()

    def step_on() -> None:
        while True:
            finished.update(output.request_id for output in engine.step() if output.finished)

    with pytest.raises(raised, match=message):
        step_on()
    assert executor.shut_down
    assert_idle(engine)
    failed = {output.request_id: output for output in engine.failed_outputs}
    assert failed.keys() == {str(i) for i in range(8)} - finished
    for output in failed.values():
        assert output.finished
        assert output.outputs[0].finish_reason == "error"
        assert "the engine is dead" in str(output.outputs[0].stop_reason)
    later = (
        engine.step,
        engine.check_health,
        lambda: engine.add_request("later", [1], GREEDY),
    )
    for attempt in later:
        with pytest.raises(EngineDeadError, match=message or "KeyboardInterrupt"):
            attempt()
    assert engine.abort_request("7") is None


def test_a_rank_that_dies_while_the_engine_is_idle():
    engine, _ = make(FakeExecutor(before=Failing("check_health", 2, DEAD)))
    engine.check_health()
    engine.add_request("a", [1, 2], GREEDY)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        engine.check_health()
    assert [output.request_id for output in engine.failed_outputs] == ["a"]
    assert_idle(engine)


def test_a_half_finished_request_keeps_its_finished_samples():
    engine, _ = make(FakeExecutor(before=Failing("receive", 4, DEAD)))
    engine.add_request("a", [5], SamplingParams(n=2, temperature=0.0, max_tokens=5, stop_token_ids=[155]))
    engine.schedulers[0].requests["a:0"].max_num_tokens = 2
    with pytest.raises(EngineDeadError):
        run(engine)
    (output,) = engine.failed_outputs
    assert [sample.finish_reason for sample in output.outputs] == ["length", "error"]
    assert [len(sample.token_ids) for sample in output.outputs] == [1, 3]


def test_llm_raises_and_goes_on_raising():
    llm = LLM.__new__(LLM)
    llm.engine, _ = make(FakeExecutor(before=Failing("receive", 3, DEAD)))
    llm.tokenizer, llm._request_ids = None, itertools.count()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate([prompt_of(20), prompt_of(20, 1)], GREEDY)
    assert_idle(llm.engine)
