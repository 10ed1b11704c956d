"""One layout per axis on ranks that are processes, with the real collectives: the single rank's tokens.

What does not depend on the collectives is tested on many more layouts with threads, in test_layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefold import LLM, SamplingParams
from prefold.testing.exactness import Oracle, generate_over_time, layout_options

LAYOUTS = ["PCP2", "TP2 PCP2", "PCP2 DCP2", "TP2 PCP2 DCP4 EP", "PP2 PCP2", "DP2 EP"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "block_size": 2,
    "num_blocks": 1000,
    "max_model_len": 600,
    "min_split_tokens": 1,
    "context_workspace_tokens": 32,
    "debug_poison": True,
    "threads_per_rank": 1,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, checkpoint_of: Callable[[int], Path]) -> Iterator[LLM]:
    with LLM(str(checkpoint_of(2)), **ENGINE, **layout_options(request.param)) as engine:
        yield engine


def tokens_of(llm: LLM, prompts: list[list[int]], arrivals: list[int]) -> list[list[int]]:
    outputs = generate_over_time(llm, prompts, GREEDY, arrivals)
    return [output.outputs[0].token_ids for output in outputs]


def test_lengths_over_time(llm: LLM, oracle: Oracle) -> None:
    lengths = [*range(1, 36), 200, 2, 100]
    prompts = [oracle.prompt(length) for length in lengths]
    arrivals = [i // 4 for i in range(len(prompts))]
    assert tokens_of(llm, prompts, arrivals) == [oracle(prompt) for prompt in prompts]


def test_alone(llm: LLM, oracle: Oracle) -> None:
    for length in (1, 2, 33):
        prompt = oracle.prompt(length, seed=1)
        assert tokens_of(llm, [prompt], [0]) == [oracle(prompt)]


def test_chunks_and_prefix_hits(llm: LLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    for scheduler in llm.engine.schedulers:
        monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 33)
    first = oracle.prompt(101, seed=40)
    assert tokens_of(llm, [first], [0]) == [oracle(first)]
    seconds = [oracle.prompt(101, seed=n, start=first[:n]) for n in (15, 16, 17, 60, 100)]
    assert tokens_of(llm, seconds, [0] * 5) == [oracle(prompt) for prompt in seconds]


def test_sampled_tokens_do_not_depend_on_the_layout(llm: LLM, oracle: Oracle) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=3, max_tokens=8, ignore_eos=True)
    prompt = oracle.prompt(21, seed=90)
    expected = [o.token_ids for o in oracle.llm.generate(prompt, params)[0].outputs]
    assert [o.token_ids for o in llm.generate(prompt, params)[0].outputs] == expected
