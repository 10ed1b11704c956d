"""A request whose logits are no numbers fails; the others, and the engine, go on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.testing.reference import Case

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def cases(tiny) -> list[Case]:
    return tiny.cases([9, 30, 4, 17], num_tokens=8, seed=10)


def corrupt(llm: LLM, monkeypatch: pytest.MonkeyPatch, change: Callable[[int, torch.Tensor], None]) -> None:
    """`change(n, logits)` is called on the n-th logits, which hold one row per sampled request."""
    model = llm.engine.core.executor._worker.runner._model  # type: ignore[attr-defined]
    compute_logits, calls = model.compute_logits, [0]

    def corrupted(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        change(calls[0], logits)
        calls[0] += 1
        return logits

    monkeypatch.setattr(model, "compute_logits", corrupted)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 1, 5, 7])
def test_only_the_request_with_bad_logits_fails(tiny, cases, monkeypatch, value: float, at: int):
    llm = tiny.llm()

    def change(n: int, logits: torch.Tensor) -> None:
        if n == at:
            logits[1, 200] = value

    corrupt(llm, monkeypatch, change)
    outputs = llm.generate([case.prompt for case in cases], GREEDY)
    for i, (output, case) in enumerate(zip(outputs, cases)):
        sample = output.outputs[0]
        if i == 1:
            assert output.finished
            assert sample.finish_reason == "error"
            assert str(value) in str(sample.stop_reason)
            assert sample.token_ids == case.tokens[:at]
        else:
            assert (sample.token_ids, sample.finish_reason) == (case.tokens, "length")
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    again = llm.generate([case.prompt for case in cases], GREEDY)
    assert [output.outputs[0].token_ids for output in again] == [case.tokens for case in cases]


def test_all_requests_of_a_step_may_fail(tiny, cases, monkeypatch):
    llm = tiny.llm()
    corrupt(llm, monkeypatch, lambda n, logits: logits.fill_(math.nan) if n == 3 else None)
    outputs = llm.generate([case.prompt for case in cases], GREEDY)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert [output.outputs[0].token_ids for output in outputs] == [case.tokens[:3] for case in cases]
    assert llm.generate(cases[0].prompt, GREEDY)[0].outputs[0].token_ids == cases[0].tokens


def test_one_of_several_samples_fails(tiny, cases, monkeypatch):
    llm = tiny.llm()

    def change(n: int, logits: torch.Tensor) -> None:
        if n == 2:
            logits[1] = math.nan

    corrupt(llm, monkeypatch, change)
    (output,) = llm.generate(
        cases[0].prompt, SamplingParams(n=3, temperature=0.0, max_tokens=8, ignore_eos=True)
    )
    assert [sample.finish_reason for sample in output.outputs] == ["length", "error", "length"]
    # The others wait a step for the blocks that the first one computes.
    assert [sample.token_ids for sample in output.outputs] == [
        cases[0].tokens,
        cases[0].tokens[:1],
        cases[0].tokens,
    ]


def test_a_failed_request_leaves_nothing_to_reuse(tiny, cases):
    """Its KV may be what went wrong: an equal prompt must not be answered from it."""
    llm = tiny.llm()
    llm.engine.add_request("a", cases[1].prompt, GREEDY)
    llm.engine.step()
    llm.engine.core.executor._worker.runner.kv_cache.fill_(math.nan)
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "error"
    (output,) = llm.generate(cases[1].prompt, GREEDY)
    assert output.outputs[0].token_ids == cases[1].tokens
