"""Pipeline stages, and replicas that share experts, against one rank: the same steps, the same results.

A single rank runs a few requests, and its steps are recorded. They are then given to other layouts, which
needs no scheduler: several steps can be in flight, and a replica can be idle, as the test likes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.config import EngineConfig
from prefold.engine.args import EngineArgs
from prefold.engine.executor import Executor
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.thread_executor import ThreadExecutor, ThreadLLM

torch.set_num_threads(1)

VOCAB = 300
ENGINE: dict[str, Any] = {
    "block_size": 8,
    "num_blocks": 400,
    "max_model_len": 300,
    "threads_per_rank": 1,
    "min_split_tokens": 1,
    "context_workspace_tokens": 32,
    "debug_poison": True,
}

Recorded = list[tuple[SchedulerOutput, ModelRunnerOutput]]


def parallel(
    pp: int = 1, tp: int = 1, pcp: int = 1, dp: int = 1, dcp: int = 1, ep: bool = False
) -> dict[str, Any]:
    """Blocks are cut so that the scheduler's, and so the recorded steps, stay the same."""
    return {
        "block_size": ENGINE["block_size"] // dcp,
        "decode_context_parallel_size": dcp,
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "prefill_context_parallel_size": pcp,
        "data_parallel_size": dp,
        "enable_expert_parallel": ep,
    }


def requests() -> Iterator[tuple[list[int], SamplingParams]]:
    """All kinds: greedy and drawn, log-probabilities of prompt and output, one token to many chunks."""
    rng = random.Random(0)
    for index, length in enumerate((90, 1, 2, 3, 17, 40, 5, 64)):
        params = SamplingParams(
            temperature=0.9 if index % 3 == 2 else 0.0,
            seed=index,
            max_tokens=10,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if index % 4 == 0 else None,
        )
        yield [rng.randrange(VOCAB) for _ in range(length)], params


class Recorder:
    """An executor that remembers steps and outputs."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.steps: Recorded = []

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        self._step = step
        self._executor.submit(replica, step)

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        replica, output = self._executor.receive()
        self.steps.append((self._step, output))
        return replica, output

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.submit(0, step)
        return self.receive()[1]

    def check_health(self) -> None:
        self._executor.check_health()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v3")
    return make_checkpoint("DeepseekV3ForCausalLM", folder, vocab_size=VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def recorded(checkpoint: Path) -> Recorded:
    """Steps of one rank in chunks of 24 tokens: most hold several requests, prefill and decode."""
    llm = ThreadLLM(str(checkpoint), max_num_batched_tokens=24, **ENGINE)
    recorder = Recorder(llm.executor)
    llm.engine.core.executor = recorder
    for index, (prompt, params) in enumerate(requests()):
        llm.engine.add_request(str(index), prompt, params, stream=False)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert len(recorder.steps) > 15
    assert any(not output.sampled_token_ids for _, output in recorder.steps), "no chunk inside a prompt"
    return recorder.steps


def config_of(checkpoint: Path, layout: dict[str, Any]) -> EngineConfig:
    return EngineArgs(str(checkpoint), max_num_batched_tokens=24, **(ENGINE | layout)).resolve()


def replay(executor: Executor, recorded: Recorded, in_flight: int) -> list[ModelRunnerOutput]:
    """Outputs of the recorded steps on replica 0, with up to `in_flight` of them on their way."""
    waiting, outputs = deque(step for step, _ in recorded), []
    submitted = 0
    while len(outputs) < len(recorded):
        while waiting and submitted - len(outputs) < in_flight:
            executor.submit(0, waiting.popleft())
            submitted += 1
        replica, output = executor.receive()
        assert replica == 0
        outputs.append(output)
    return outputs


def check(outputs: list[ModelRunnerOutput], recorded: Recorded, exact: bool) -> None:
    """The same tokens and, up to rounding unless `exact`, the same log-probabilities."""
    for output, (step, expected) in zip(outputs, recorded, strict=True):
        assert output.step_id == step.step_id
        assert output.sampled_token_ids == expected.sampled_token_ids
        assert output.errors == {}
        for ours, theirs in (
            (output.logprobs, expected.logprobs),
            (output.prompt_logprobs, expected.prompt_logprobs),
        ):
            assert ours.keys() == theirs.keys()
            for name, entries in ours.items():
                assert [e.token_ids for e in entries] == [e.token_ids for e in theirs[name]]
                for entry, other in zip(entries, theirs[name], strict=True):
                    tolerance = 0.0 if exact else 1e-4
                    assert entry.logprobs == pytest.approx(other.logprobs, rel=0.0, abs=tolerance)


LAYOUTS = {
    "pp2": parallel(pp=2),
    "pp3": parallel(pp=3),
    "pp4": parallel(pp=4),
    "pp2_tp2": parallel(pp=2, tp=2),
    "pp2_pcp2": parallel(pp=2, pcp=2),
    "pp3_tp2_pcp2": parallel(pp=3, tp=2, pcp=2),
    "pp2_pcp3_ep": parallel(pp=2, pcp=3, ep=True),
    "pp2_tp2_pcp2_ep": parallel(pp=2, tp=2, pcp=2, ep=True),
    "pp2_pcp2_dcp2_ep": parallel(pp=2, pcp=2, dcp=2, ep=True),
    "pp2_tp2_pcp2_dcp4": parallel(pp=2, tp=2, pcp=2, dcp=4),
    "pp2_tp2_dcp2": parallel(pp=2, tp=2, dcp=2),
}


@pytest.mark.parametrize(
    ("name", "in_flight"), [*((name, 5) for name in LAYOUTS), ("pp3", 1), ("pp2_tp2_pcp2_dcp4", 1)]
)
def test_stages_repeat_the_single_rank(checkpoint: Path, recorded: Recorded, name: str, in_flight: int):
    """With stages alone bit for bit: what travels is what a whole model goes on from. With one step in flight
    the stages take turns, with more they overlap."""
    executor = ThreadExecutor(config_of(checkpoint, LAYOUTS[name]))
    outputs = replay(executor, recorded, in_flight)
    check(outputs, recorded, exact=name in ("pp2", "pp3", "pp4"))
    executor.shutdown()


@pytest.mark.parametrize("name", ["pp2", "pp2_tp2", "pp2_pcp2"])
def test_stages_in_processes(checkpoint: Path, recorded: Recorded, name: str):
    """The recorded steps, and then every length, in chunks of which several are in flight."""
    options = {"max_num_batched_tokens": 24, "skip_tokenizer_init": True} | ENGINE | LAYOUTS[name]
    with LLM(str(checkpoint), **options) as llm:
        executor = llm.engine.core.executor
        for in_flight in (1, 2):
            check(replay(executor, recorded, in_flight), recorded, exact=name == "pp2")
            executor.submit(0, forget(recorded))
            executor.receive()
        prompts = [[(length * i + 5) % VOCAB for i in range(length)] for length in (*range(1, 34), 150)]
        expected = generate(ThreadLLM(str(checkpoint), **ENGINE), prompts)
        assert generate(llm, prompts) == expected


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def forget(recorded: Recorded) -> SchedulerOutput:
    """A step without tokens that ends all requests."""
    names = [new.request_id for step, _ in recorded for new in step.new_requests]
    return SchedulerOutput(10_000, [], [], {}, names)


@pytest.mark.parametrize(
    ("layout", "busy"),
    [
        (parallel(dp=2, ep=True), 0),
        (parallel(dp=2, pcp=2, ep=True), 1),
        (parallel(dp=3, tp=2, ep=True), 1),
        (parallel(dp=2, pp=2, ep=True), 1),
        (parallel(dp=2, pp=2, pcp=2, dcp=2, ep=True), 0),
    ],
    ids=str,
)
def test_an_idle_replica_joins_the_experts(
    checkpoint: Path, recorded: Recorded, layout: dict[str, Any], busy: int
):
    """One replica computes, the others are given steps without tokens."""
    executor = ThreadExecutor(config_of(checkpoint, layout))
    outputs: list[ModelRunnerOutput] = []
    replicas = layout["data_parallel_size"]
    for step, _ in recorded:
        for replica in range(replicas):
            empty = SchedulerOutput(step.step_id, [], [], {}, [])
            executor.submit(replica, step if replica == busy else empty)
        received = dict(executor.receive() for _ in range(replicas))
        assert sorted(received) == list(range(replicas))
        outputs.append(received.pop(busy))
        for output in received.values():
            assert output.step_id == step.step_id
            assert output.sampled_token_ids == output.errors == {}
            assert sum(output.stats.rank_tokens) == 0
    check(outputs, recorded, exact=False)
    executor.shutdown()


def test_replicas_with_different_loads(checkpoint: Path, recorded: Recorded):
    """Replica 1 is a few steps behind: batches of other sizes, at the end of one none at all."""
    executor = ThreadExecutor(config_of(checkpoint, parallel(dp=2, tp=2, ep=True)))
    behind = 3
    outputs: list[list[ModelRunnerOutput]] = [[], []]
    for turn in range(len(recorded) + behind):
        for replica, index in enumerate((turn, turn - behind)):
            has_work = 0 <= index < len(recorded)
            empty = SchedulerOutput(1000 + turn, [], [], {}, [])
            executor.submit(replica, recorded[index][0] if has_work else empty)
        for _ in range(2):
            replica, output = executor.receive()
            if output.step_id < 1000:
                outputs[replica].append(output)
    for replica_outputs in outputs:
        check(replica_outputs, recorded, exact=False)
    executor.shutdown()


def test_a_stage_holds_its_share_of_the_cache(checkpoint: Path):
    executor = ThreadExecutor(config_of(checkpoint, parallel(pp=3)))
    runners = [runner for runner in executor.runners if runner is not None]
    assert [runner.kv_cache.shape[1:] for runner in runners] == [runners[0].kv_cache.shape[1:]] * 3
    assert sum(runner.kv_cache.shape[0] for runner in runners) == 4
    executor.shutdown()


@pytest.mark.parametrize("name", ["pp2", "pp2_tp2_pcp2_ep"])
def test_bad_logits_fail_one_request(checkpoint: Path, name: str):
    """The last stage says which; the others go on, and the stages before know of nothing."""
    prompts = [[7 * i + 3 for i in range(1, length)] for length in (30, 9, 20, 14)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = generate(ThreadLLM(str(checkpoint), **ENGINE), prompts)
    llm = ThreadLLM(str(checkpoint), **(ENGINE | LAYOUTS[name]))
    for runner in llm.executor.runners:
        assert runner is not None
        if runner._model.head is not None:
            spoil_once(runner._model)
    samples = [output.outputs[0] for output in llm.generate(prompts, params)]
    failed = [i for i, sample in enumerate(samples) if sample.finish_reason == "error"]
    assert len(failed) == 1
    assert "nan" in str(samples[failed[0]].stop_reason)
    for i, sample in enumerate(samples):
        assert sample.token_ids == expected[i][: len(sample.token_ids)]
        assert len(sample.token_ids) == 8 or i in failed
    llm.engine.scheduler.check_integrity()
    assert generate(llm, prompts) == expected


def spoil_once(model: torch.nn.Module) -> None:
    """The last row of the third logits of several requests."""
    compute_logits, calls = model.compute_logits, [0]

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        calls[0] += len(logits) > 1
        if calls[0] == 3 and len(logits) > 1:
            logits[-1, 200] = torch.nan
        return logits

    model.compute_logits = spoiled
