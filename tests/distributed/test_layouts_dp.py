"""Replicas: idle ones, uneven loads, and what arrives while others run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefold import SamplingParams
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

LAYOUTS = ["DP2", "DP2 EP", "DP3 EP", "DP2 TP2 EP", "DP2 PCP2 EP", "DP2 PP2 EP"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, checkpoint_of: Callable[[int], Path]) -> Iterator[ThreadLLM]:
    with ThreadLLM(
        str(checkpoint_of(2)),
        block_size=4,
        num_blocks=1100,
        max_model_len=4200,
        max_num_batched_tokens=600,
        min_split_tokens=1,
        context_workspace_tokens=256,
        debug_poison=True,
        **layout_options(request.param),
    ) as engine:
        yield engine


def check(llm: ThreadLLM, oracle: Oracle, prompts: list[list[int]], arrivals: list[int]) -> list[int]:
    """Compare the tokens; returns the tokens that each replica has computed for it."""
    before = list(llm.engine.metrics.rank_tokens)
    outputs = generate_over_time(llm, prompts, GREEDY, arrivals)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle(prompt), len(prompt)
    after = llm.engine.metrics.rank_tokens
    before += [0] * (len(after) - len(before))
    parallel = llm.engine.config.parallel
    per_replica = [0] * parallel.data_parallel_size
    for rank, (now, then) in enumerate(zip(after, before, strict=True)):
        per_replica[rank // parallel.prefill_context_parallel_size] += now - then
    return per_replica


def test_all_but_one_replica_are_idle(llm: ThreadLLM, oracle: Oracle) -> None:
    for length in (1, 2, 33):
        computed = check(llm, oracle, [oracle.prompt(length)], [0])
        assert sorted(computed)[-2:] == [0, length + GREEDY.max_tokens - 1]


def test_loads_of_1_and_of_4097_tokens(llm: ThreadLLM, oracle: Oracle) -> None:
    for scheduler in llm.engine.schedulers:
        scheduler.reset_prefix_cache()
    computed = check(llm, oracle, [oracle.prompt(4097), oracle.prompt(1)], [0, 0])
    assert sorted(computed)[-2:] == [8, 4097 + 7], "one on each"


def test_arrivals_over_time(llm: ThreadLLM, oracle: Oracle) -> None:
    """Replicas get work, run dry, and get work again."""
    prompts = [oracle.prompt(length, seed=7) for length in (30, 2, 1, 700, 5, 64, 3)]
    computed = check(llm, oracle, prompts, [0, 2, 12, 13, 14, 25, 26])
    assert min(computed) > 0


def test_a_prefix_is_found_where_it_is(llm: ThreadLLM, oracle: Oracle) -> None:
    first = oracle.prompt(200, seed=8)
    check(llm, oracle, [first], [0])
    outputs = generate_over_time(llm, [[*first, 1, 2, 3]], GREEDY, [0])
    assert outputs[0].metrics.num_cached_tokens == 200
