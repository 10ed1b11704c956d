"""KV shards: every length by itself where blocks are small, and blocks and interleaves of other sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefold import SamplingParams
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

CASES: dict[str, list[tuple[int, int]]] = {
    "TP2 DCP2": [(2, 2), (4, 1), (8, 4)],
    "PCP2 DCP2": [(2, 2), (4, 1), (4, 4), (8, 4), (8, 8)],
    "PCP4 DCP2": [(2, 2), (4, 4), (8, 4)],
    "PCP4 DCP4": [(2, 2), (4, 1), (8, 8)],
    "TP2 PCP2 DCP4": [(2, 2), (4, 4), (8, 4)],
    "PP2 PCP2 DCP2 EP": [(4, 1), (8, 8)],
}
"""(block size, interleave): each with a D of 2 and of 4. What is not here, (2, 1), runs everything in
test_layouts; where each token lies is tested for all forms in null/test_kv_ownership."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def start(folder: Path, layout: str, block_size: int, interleave: int, **options: Any) -> ThreadLLM:
    return ThreadLLM(
        str(folder),
        block_size=block_size,
        cp_kv_cache_interleave_size=interleave,
        num_blocks=600,
        max_model_len=600,
        min_split_tokens=1,
        context_workspace_tokens=32,
        debug_poison=True,
        **layout_options(layout),
        **options,
    )


def check(llm: ThreadLLM, oracle: Oracle, prompts: list[list[int]], arrivals: list[int]) -> list[int]:
    """Compare the tokens of all; returns how many tokens of each were cached."""
    outputs = generate_over_time(llm, prompts, GREEDY, arrivals)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle(prompt), len(prompt)
    return [output.metrics.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(("layout", "interleave"), [("PCP2 DCP2", 1), ("TP2 PCP2 DCP4", 2)])
def test_every_length_alone(
    layout: str, interleave: int, checkpoint_of: Callable[[int], Path], oracle: Oracle
) -> None:
    """All lengths up to two virtual blocks per chunk and a few more."""
    with start(checkpoint_of(2), layout, 2, interleave) as llm:
        parallel = llm.engine.config.parallel
        pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
        for length in range(1, 2 * pcp * 2 * dcp + 4):
            check(llm, oracle, [oracle.prompt(length)], [0])


@pytest.mark.parametrize(
    ("layout", "block_size", "interleave"),
    [(layout, *blocks) for layout, forms in CASES.items() for blocks in forms],
)
def test_blocks_and_interleaves(
    layout: str, block_size: int, interleave: int, checkpoint_of: Callable[[int], Path], oracle: Oracle
) -> None:
    """Every residue of the length modulo the virtual block and 2P, prefill and decode in the same steps;
    then prefix hits."""
    with start(checkpoint_of(2), layout, block_size, interleave, max_num_batched_tokens=101) as llm:
        parallel, block = llm.engine.config.parallel, llm.engine.config.virtual_block_size
        pcp = parallel.prefill_context_parallel_size
        # 3 has no factor in common with blocks and ranks.
        lengths = list(range(1, 2 * pcp * block + 4, 3 if pcp * block > 32 else 1))
        assert {length % block for length in lengths} == set(range(block))
        assert {length % (2 * pcp) for length in lengths} == set(range(2 * pcp))
        random.Random(block_size).shuffle(lengths)
        arrivals = [i * 10 // len(lengths) for i in range(len(lengths))]
        check(llm, oracle, [oracle.prompt(length) for length in lengths], arrivals)

        first = oracle.prompt(3 * block + 5, seed=1)
        check(llm, oracle, [first], [0])
        shares = [block - 1, block, block + 1, 2 * block + block // 2, 3 * block + 5]
        seconds = [oracle.prompt(3 * block + 6, seed=n, start=first[:n]) for n in shares]
        cached = check(llm, oracle, seconds, [0] * len(seconds))
        assert cached == [shared // block * block for shared in shares]
