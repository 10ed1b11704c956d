"""Each way to attend to a cached context, forced wherever it is possible, gives the single rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefold import SamplingParams
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

LAYOUTS = ["PCP2", "PCP3", "TP2 PCP2", "TP2 DCP2", "PCP2 DCP2", "PCP4 DCP2", "TP2 PCP2 DCP4", "PP2 PCP2 EP"]
WAYS = ["local", "sliced", "query", "kv"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_way_to_attend(layout: str, way: str, checkpoint_of: Callable[[int], Path], oracle: Oracle) -> None:
    """Short and long rows over contexts from 1 to more tokens than the workspace holds, beside decode."""
    options = layout_options(layout) | {"context_attention": way, "max_num_batched_tokens": 19}
    with ThreadLLM(
        str(checkpoint_of(2)),
        block_size=2,
        num_blocks=1000,
        max_model_len=400,
        min_split_tokens=1,
        context_workspace_tokens=32,
        debug_poison=True,
        **options,
    ) as llm:
        budget = llm.engine.scheduler.max_num_scheduled_tokens
        # Ends of chunks and prompts: one token left, two, a few, and many.
        lengths = [budget + 1, 2 * budget + 2, 2 * budget - 1, 1, 2, 3 * budget + 7]
        prompts = [oracle.prompt(length, seed) for seed, length in enumerate(lengths)]
        outputs = generate_over_time(llm, prompts, GREEDY, [0, 1, 2, 5, 5, 6])
        # Tails of 1 to 64 tokens after a prefix that is cached.
        first = prompts[-1]
        tails = [1, 2, 17, 64]
        seconds = [oracle.prompt(len(first) + n, seed=n, start=first) for n in tails]
        outputs += generate_over_time(llm, seconds, GREEDY, [0, 0, 3, 4])
        assert any(output.metrics.num_cached_tokens > 32 for output in outputs)
        for prompt, output in zip(prompts + seconds, outputs, strict=True):
            assert output.outputs[0].token_ids == oracle(prompt), len(prompt)
