"""Sparse attention with a mask for the first queries: the tokens are those without, on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from prefold.attention import sparse
from prefold.config import MLAConfig
from prefold.testing.exactness import generate_over_time, layout_options
from prefold.testing.sparse_oracle import ENGINE, TOPK, SparseOracle
from prefold.testing.thread_executor import ThreadLLM

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(sparse_oracle_of: Callable[[int], tuple[Path, SparseOracle]]) -> Path:
    return sparse_oracle_of(3)[0]


@pytest.fixture(scope="module")
def oracle(sparse_oracle_of: Callable[[int], tuple[Path, SparseOracle]]) -> SparseOracle:
    """Too small for masks to pay: without any."""
    return sparse_oracle_of(3)[1]


@pytest.mark.parametrize(
    ("layout", "way", "level"),
    [
        *(("TP1", "auto", 90), ("PCP3", "auto", 37), ("TP2 PCP2 EP", "auto", 90), ("PCP4 DCP2", "kv", 37)),
        *(("TP2 DCP2", "query", 37), ("PP2 PCP2 DCP2", "kv", 90)),
    ],
)
def test_masks(
    layout: str,
    way: str,
    level: int,
    folder: Path,
    oracle: SparseOracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries up to a position have masks. Chunks with and without any; contexts that were cached by others,
    too; more keys than a word has bits."""
    asked = []

    def num_masked(mla: MLAConfig, num_heads: int, runs: Iterable[tuple[int, int]]) -> int:
        count = sum(max(min(end, level) - start, 0) for start, end in runs)
        asked.append(count)
        return count

    monkeypatch.setattr(sparse, "num_masked", num_masked)
    options = ENGINE | {"context_attention": way, "max_num_batched_tokens": 23}
    first = oracle.prompt(89, seed=1)
    prompts = [first, *(oracle.prompt(length, seed=2) for length in (TOPK, TOPK + 1, 40, 70))]
    prompts += [oracle.prompt(140, seed=3, start=first[:start]) for start in (TOPK + 3, 50, 88)]
    with ThreadLLM(str(folder), **options, **layout_options(layout)) as llm:
        outputs = generate_over_time(llm, prompts, oracle.params, [0, 0, 0, 1, 2, 30, 31, 31])
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == oracle(prompt), len(prompt)
        assert sum(output.metrics.num_cached_tokens for output in outputs) > 0
    assert max(asked) > 1
