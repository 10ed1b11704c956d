"""EngineObserver: what it says of steps and requests is what scheduler and partition say."""

import random

import msgspec
import numpy as np
import pytest

from prefold.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig
from prefold.distributed.pcp_layout import partition
from prefold.engine.observer import MAX_REQUESTS, MAX_ROWS, EngineObserver
from prefold.engine.scheduler import Scheduler
from prefold.metrics import EngineSnapshot, StepRecord, Totals, imbalance
from prefold.request import Request, SamplingParams
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats

B = 4


class Engine:
    """A scheduler, an observer and a clock; the ranks sample token 7."""

    def __init__(
        self, budget: int = 64, seqs: int = 8, blocks: int = 64, min_split: int = 0, **sizes: int
    ) -> None:
        limits, cache = SchedulerConfig(seqs, budget, 200), CacheConfig(B, blocks, True)
        runtime = RuntimeConfig(min_split_tokens=min_split)
        config = EngineConfig(None, ParallelConfig(**sizes), cache, limits, runtime)  # type: ignore[arg-type]
        self.scheduler, self.observer = Scheduler(config), EngineObserver(config)
        self.config = config
        self.now = 100.0
        self.num_prompts = 0
        self.sampled: dict[int, dict[str, list[int]]] = {}
        self.steps: list[StepRecord] = []

    def add(self, name: str, prompt: int | list[int], max_tokens: int = 4) -> Request:
        if isinstance(prompt, int):
            self.num_prompts += 1
            prompt = [self.num_prompts * 1000 + i for i in range(prompt)]
        request = Request(
            name, prompt, SamplingParams(max_tokens=max_tokens), max_tokens, arrival_time=self.now
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        self.observer.on_scheduled(0, step, self.now)
        requests = [self.scheduler.requests[name] for name in step.num_scheduled_tokens]
        self.sampled[step.step_id] = {
            r.request_id: [7] for r in requests if r.num_computed_tokens == r.num_tokens and r.max_tokens > 0
        }
        return step

    def complete(self, step: SchedulerOutput, stats: StepStats | None = None) -> None:
        self.now += 0.5
        sampled = self.sampled.pop(step.step_id)
        output = ModelRunnerOutput(step.step_id, sampled, {}, {}, stats or StepStats([], []))
        self.observer.on_done(0, step, output, self.now)
        self.scheduler.update_from_output(step, output)

    def step(self, stats: StepStats | None = None) -> SchedulerOutput:
        step = self.schedule()
        self.complete(step, stats)
        return step

    def snapshot(self) -> EngineSnapshot:
        """As it arrives at the other end."""
        sent = msgspec.msgpack.encode(self.observer.snapshot([self.scheduler], self.now))
        snapshot = msgspec.msgpack.decode(sent, type=EngineSnapshot)
        self.steps += snapshot.steps
        return snapshot


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"prefill_context_parallel_size": 2},
        {"prefill_context_parallel_size": 4, "decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_parts_are_those_of_the_partition(sizes: dict[str, int], seed: int):
    """Random arrivals, few blocks (so that some are preempted), aborts, prompts without a generated token."""
    rng = random.Random(seed)
    engine = Engine(budget=rng.choice([6, 16]), blocks=14, min_split=rng.choice([0, 8]), **sizes)
    parallel = engine.config.parallel
    size, unit = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    expected: dict[int, tuple[dict, int, int]] = {}
    pending = []
    finished_prompts = 0
    for turn in range(160):
        if turn < 130 and rng.random() < 0.5:
            engine.add(f"r{turn}", rng.randint(1, 30), rng.choice([0, 1, 6, 12]))
        if rng.random() < 0.05 and engine.scheduler.requests:
            engine.scheduler.abort_requests([rng.choice(list(engine.scheduler.requests))])
        if len(pending) < parallel.pipeline_parallel_size:
            step = engine.schedule()
            if step.num_scheduled_tokens:
                pending.append(step)
                expected[step.step_id] = split(engine.scheduler, step, size, unit, engine.config)
                for name, count in step.num_scheduled_tokens.items():
                    r = engine.scheduler.requests[name]
                    before = r.num_computed_tokens - count
                    if r.num_output_tokens == 0 and before < r.num_prompt_tokens <= before + count:
                        finished_prompts += r.num_prompt_tokens + len(r.target_token_ids)
                continue
        if pending:
            engine.complete(pending.pop(0))
        engine.snapshot()
    while pending:
        engine.complete(pending.pop(0))
    snapshot = engine.snapshot()
    assert len(engine.steps) == len(expected) > 20
    for record in engine.steps:
        rows, prefill, decode = expected[record.step_id]
        assert {row.request_id: row.parts for row in record.rows} == rows
        assert (record.num_prefill_tokens, record.num_decode_tokens) == (prefill, decode)
        for row in record.rows:
            assert row.is_prefill
            covered = [p for start, end, _ in row.parts for p in range(start, end)]
            assert covered == list(range(row.start, row.start + row.num_tokens))
    assert sum(len(record.rows) for record in engine.steps) > 10
    assert snapshot.totals.num_prompt_tokens == finished_prompts
    assert snapshot.totals.num_preemptions == engine.scheduler.num_preemptions


def split(
    scheduler: Scheduler, step: SchedulerOutput, size: int, unit: int, config: EngineConfig
) -> tuple[dict, int, int]:
    """(prefill rows, prefill tokens, decode tokens) of the step scheduled last, by its requests' state."""
    requests = [scheduler.requests[name] for name in step.num_scheduled_tokens]
    counts = np.array(list(step.num_scheduled_tokens.values()))
    computed = np.array([r.num_computed_tokens for r in requests]) - counts
    is_prefill = computed < np.array([r.num_prefill_tokens for r in requests])
    parts = partition(
        computed,
        counts,
        is_prefill,
        size,
        min_split_tokens=config.runtime.min_split_tokens,
        decode_unit=unit,
    )
    rows: dict[str, list] = {r.request_id: [] for r, prefill in zip(requests, is_prefill) if prefill}
    for rank, i, start, end in zip(parts.row_rank, parts.row_request, parts.row_start, parts.row_end):
        if is_prefill[i]:
            rows[requests[i].request_id].append((int(start), int(end), int(rank)))
    ordered = {name: sorted(parts) for name, parts in rows.items()}
    return ordered, int(counts[is_prefill].sum()), int(counts[~is_prefill].sum())


def test_a_step_is_recorded_with_what_its_rank_says():
    engine = Engine(prefill_context_parallel_size=2)
    engine.add("a", 20)
    stats = StepStats(
        [10, 10],
        [100, 110],
        forward_s=0.25,
        bytes_sent={"pcp.all_gather": 80},
        calls={"pcp.all_gather": 3},
        collective_s={"pcp.all_gather": 0.125},
        layer_s=[0.1, 0.05],
        ways={"local": 1},
    )
    engine.step(stats)
    (record,) = engine.snapshot().steps
    assert record.duration_s == 0.5
    assert abs(record.start_s - engine.observer._to_unix - 100.0) < 1e-6
    for name in StepStats.__struct_fields__:
        assert getattr(record, name) == getattr(stats, name)
    engine.step(stats)
    snapshot = engine.snapshot()
    assert [step.step_id for step in snapshot.steps] == [1], "a step is told once"
    totals = snapshot.totals
    assert (totals.num_steps, totals.num_prompt_tokens, totals.num_generation_tokens) == (2, 20, 2)
    assert (totals.num_prefill_tokens, totals.num_decode_tokens) == (20, 1)
    assert (totals.rank_tokens, totals.rank_causal_pairs, totals.forward_s) == ([20, 20], [200, 220], 0.5)
    assert (totals.bytes_sent, totals.calls) == ({"pcp.all_gather": 160}, {"pcp.all_gather": 6})
    assert totals.step_seconds.counts == [0] * 8 + [2] + [0] * 8  # 0.5 s each
    assert (sum(totals.inter_token_seconds.counts), totals.inter_token_seconds.sum) == (1, 0.5)
    assert (totals.collective_s, totals.ways) == ({"pcp.all_gather": 0.25}, {"local": 2})


def test_a_snapshot_is_not_changed_by_later_steps():
    engine = Engine()
    engine.add("a", 10)
    engine.step(StepStats([10], [55], bytes_sent={"x": 1}))
    before = engine.observer.snapshot([engine.scheduler], engine.now)
    sent = msgspec.msgpack.encode(before)
    engine.step(StepStats([1], [11], bytes_sent={"x": 1}))
    assert msgspec.msgpack.encode(before) == sent


def test_steps_in_flight_are_shown():
    engine = Engine(prefill_context_parallel_size=2)
    engine.add("a", 20)
    step = engine.schedule()
    engine.now += 0.75
    (flying,) = engine.snapshot().in_flight
    assert (flying.step_id, flying.duration_s, flying.num_prefill_tokens) == (step.step_id, 0.75, 20)
    assert flying.rank_tokens == []
    assert engine.observer.is_in_prefill
    engine.complete(step)
    assert not engine.observer.is_in_prefill
    snapshot = engine.snapshot()
    assert snapshot.in_flight == []
    assert snapshot.steps[0].rows == flying.rows


def test_time_between_tokens_is_counted_per_token():
    engine = Engine(budget=8)
    for name, length in (("a", 3), ("b", 5), ("c", 30)):
        engine.add(name, length, max_tokens=3)
    for pause in (0, 0.25, 1.5):
        engine.now += pause
        engine.step()
    # The first step samples a and b; c's chunks and their decodes share the two others.
    assert engine.observer.totals.inter_token_seconds.counts == [0] * 9 + [2, 2] + [0] * 6
    assert engine.observer.totals.inter_token_seconds.sum == 2 * 0.75 + 2 * 2.0


def test_replicas_count_for_themselves():
    totals = Totals()
    totals.add_step(StepStats([1, 2], [3, 4]), replica=1)
    totals.add_step(StepStats([5, 6], [7, 8]), replica=0)
    assert (totals.rank_tokens, totals.rank_causal_pairs) == ([5, 6, 1, 2], [7, 8, 3, 4])
    both = totals.plus(Totals(num_steps=3, rank_tokens=[1, 1, 1, 1], ways={"kv": 1}))
    assert (both.num_steps, both.rank_tokens, both.ways) == (5, [6, 7, 2, 3], {"kv": 1})
    assert totals.num_steps == 2


def test_states_of_requests():
    engine = Engine(budget=8)
    engine.add("a", 20)
    engine.add("b", 3)
    engine.step()
    engine.now += 2
    snapshot = engine.snapshot()
    a, b = snapshot.requests
    assert (a.request_id, a.state, a.num_prompt_tokens, a.num_computed_tokens) == ("a", "running", 20, 8)
    assert (a.num_blocks, a.wait_s, a.why) == (5, 2.5, "")
    assert (b.state, b.num_blocks, b.why) == ("waiting", 1, "budget")
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
    assert (snapshot.blocks_total, snapshot.blocks_used) == (64, 5)
    assert snapshot.blocks_cached == 2


def test_blocks_of_running_requests_are_those_they_hold():
    engine = Engine(budget=9, blocks=20)
    rng = random.Random(1)
    for turn in range(80):
        if rng.random() < 0.3:
            engine.add(f"r{turn}", rng.randint(1, 30), rng.randint(1, 20))
        engine.step()
        states = {state.request_id: state for state in engine.snapshot().requests}
        for request in engine.scheduler.running:
            held = len(engine.scheduler.kv.block_ids(request))
            assert states[request.request_id].num_blocks == held, request
    assert engine.scheduler.num_preemptions > 0


def why(engine: Engine) -> list[str]:
    return [state.why for state in engine.snapshot().requests if state.state != "running"]


def test_why_requests_wait():
    engine = Engine(seqs=1)
    for name in "abc":
        engine.add(name, 5)
    engine.step()
    assert why(engine) == ["max_num_seqs", "behind b"]

    engine = Engine(blocks=4)
    engine.add("a", 10, max_tokens=4)
    engine.add("b", 8)
    engine.step()
    assert why(engine) == ["blocks"]
    (_, b) = engine.snapshot().requests
    assert b.num_blocks == 2

    engine = Engine(budget=4, blocks=20)
    engine.add("a", 40)
    engine.add("b", 5)
    engine.step()
    assert why(engine) == ["budget"]


def test_blocks_that_a_waiting_request_shares_are_not_needed():
    """Three blocks of its prefix are in use by another request: only the rest must be free."""
    engine = Engine(seqs=1)
    prompt = list(range(12))
    engine.add("a", [*prompt, 1], max_tokens=8)
    engine.add("b", [*prompt, 2, 3, 4, 5, 6], max_tokens=2)
    engine.step()
    (_, b) = engine.snapshot().requests
    assert (b.why, b.num_blocks) == ("max_num_seqs", 2)


def test_a_preempted_request_waits():
    engine = Engine(blocks=5)
    engine.add("a", 8, max_tokens=12)
    engine.add("b", 8, max_tokens=12)
    while not engine.scheduler.num_preemptions:
        engine.step()
    a, b = engine.snapshot().requests
    assert (a.state, b.state, b.why) == ("running", "preempted", "blocks")
    assert b.num_prefill_tokens == b.num_prompt_tokens + b.num_output_tokens > 8


def test_a_snapshot_is_bounded():
    engine = Engine(budget=400, seqs=400, blocks=9000, prefill_context_parallel_size=2)
    for i in range(MAX_REQUESTS + 50):
        engine.add(f"r{i}", 2, max_tokens=150)
    for _ in range(100):
        engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.num_running, len(snapshot.requests)) == (250, MAX_REQUESTS)
    assert snapshot.steps[-1].step_id == 99
    assert len(snapshot.steps) == 64
    engine = Engine(budget=400, seqs=400, blocks=900)
    for i in range(MAX_ROWS + 8):
        engine.add(f"r{i}", 2)
    engine.step()
    (record,) = engine.snapshot().steps
    assert [len(record.rows), record.num_prefill_tokens] == [MAX_ROWS, 2 * (MAX_ROWS + 8)]


def test_imbalance():
    assert imbalance([]) == imbalance([0, 0]) == imbalance([5, 5]) == 1.0
    assert imbalance([4, 0]) == 2.0
