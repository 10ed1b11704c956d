"""The clock of `prefold bench latency`, with times that are made up."""

from __future__ import annotations

import pytest

from prefold.benchmark.latency import LatencyPlan
from prefold.benchmark.stopwatch import Stopwatch


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prefold.benchmark.stopwatch.time.monotonic", lambda: 100.0)
    return Stopwatch


def test_one_request(watch: type[Stopwatch]):
    one = watch(1, 3)
    one.note(102.0, {})
    assert not one.is_over
    for now, count in ((103.0, 1), (103.5, 2), (105.0, 3)):
        assert not one.is_over
        one.note(now, {"0": count}, any_finished=count == 3)
    assert one.is_over
    assert one.times() == {"ttft_s": 3.0, "prefill_s": 3.0, "tpot_s": 1.0}


def test_a_single_token_has_no_time_per_token(watch: type[Stopwatch]):
    one = watch(1, 1)
    one.note(104.0, {"0": 1}, any_finished=True)
    assert one.is_over
    assert one.times() == {"ttft_s": 4.0, "prefill_s": 4.0, "tpot_s": None}


def test_a_batch_counts_while_all_decode(watch: type[Stopwatch]):
    """The first request decodes twice while the second is prefilled; those tokens do not count."""
    two = watch(2, 3)
    two.note(101.0, {"0": 1})
    two.note(102.0, {"0": 2})
    two.note(105.0, {"0": 3, "1": 1})
    two.note(106.0, {"0": 4, "1": 2})
    assert not two.is_over
    two.note(107.0, {"0": 5, "1": 3})
    assert two.is_over
    two.note(109.0, {"0": 6, "1": 4})
    assert two.times() == {"ttft_s": 3.0, "prefill_s": 5.0, "tpot_s": 1.0}


def test_a_request_that_ends_early_ends_the_time_in_which_all_decode(watch: type[Stopwatch]):
    two = watch(2, 9)
    two.note(101.0, {"0": 1, "1": 1})
    two.note(103.0, {"0": 2, "1": 2}, any_finished=True)
    assert two.is_over
    assert two.times()["tpot_s"] == 2.0


def test_a_batch_that_does_not_run_at_once_is_refused(watch: type[Stopwatch]):
    two = watch(2, 2)
    two.note(101.0, {"0": 1})
    with pytest.raises(ValueError, match="1 of 2 requests ran at the same time"):
        two.note(102.0, {"0": 2}, any_finished=True)


def plan(**changes: int) -> LatencyPlan:
    class Model:
        vocab_size = 50

    counts = {"input_len": 5, "output_len": 1, "warmup": 0, "repeats": 1, "seed": 3}
    return LatencyPlan(Model(), [], **(counts | changes))  # type: ignore[arg-type]


def test_prompts_begin_with_the_prefix_and_are_new_in_each_turn():
    two = plan(cached_prefix_len=7, batch_size=2)
    prompts = [prompt for turn in range(3) for prompt in two.prompts(turn)]
    assert {len(prompt) for prompt in prompts} == {12}
    assert all(prompt[:7] == two.prefix() for prompt in prompts)
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 6
    assert two.prompts(1) == two.prompts(1)
    assert plan().prefix() == []


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"cached_prefix_len": -1}, {"input_len": 0}])
def test_counts_that_are_too_small_are_named(changes: dict[str, int]):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}={changes[name]} must be at least"):
        plan(**changes)
