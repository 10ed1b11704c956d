"""Sparse attention over KV shards of several block sizes and interleaves, and with quantised weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prefold import LLM
from prefold.testing.exactness import layout_options
from prefold.testing.quantized import dequantized_checkpoint, quantize_checkpoint
from prefold.testing.sparse_oracle import ENGINE, TOPK, SparseOracle, check
from prefold.testing.thread_executor import ThreadLLM

torch.set_num_threads(1)

FORMAT = "modelopt-nvfp4"


@pytest.fixture(scope="module")
def folder(sparse_oracle_of: Callable[[int], tuple[Path, SparseOracle]]) -> Path:
    return sparse_oracle_of(2)[0]


@pytest.fixture(scope="module")
def oracle(sparse_oracle_of: Callable[[int], tuple[Path, SparseOracle]]) -> SparseOracle:
    return sparse_oracle_of(2)[1]


@pytest.mark.parametrize(
    ("layout", "block_size", "interleave", "way"),
    [
        *(("PCP2 DCP2", 2, 1, "query"), ("PCP2 DCP2", 2, 2, "kv"), ("PCP4 DCP4", 2, 1, "kv")),
        *(("PCP4 DCP4", 2, 2, "query"), ("TP2 PCP2 DCP4", 2, 2, "query"), ("PCP4 DCP2", 4, 2, "query")),
        *(("TP2 DCP2", 4, 2, "query"), ("TP2 DCP2", 2, 1, "kv")),
    ],
)
def test_every_residue(
    layout: str, block_size: int, interleave: int, way: str, folder: Path, oracle: SparseOracle
) -> None:
    """Every length modulo 2PBD, in steps that hold prefill and decode, chunks with and without a choice;
    then hits on prefixes of 1, 2, ... virtual blocks."""
    options = ENGINE | {"block_size": block_size, "max_num_batched_tokens": 37}
    options |= {"cp_kv_cache_interleave_size": interleave, "context_attention": way}
    with ThreadLLM(str(folder), **options, **layout_options(layout)) as llm:
        parallel, block = llm.engine.config.parallel, llm.engine.config.virtual_block_size
        period = 2 * parallel.prefill_context_parallel_size * block
        lengths = list(range(TOPK - 8, TOPK - 8 + period))
        random.Random(period).shuffle(lengths)
        prompts = [oracle.prompt(length) for length in lengths]
        check(llm, oracle, prompts, [i * 8 // len(lengths) for i in range(len(lengths))])

        first = oracle.prompt(5 * block + 1, seed=1)
        check(llm, oracle, [first], [0])
        shares = [n * block for n in range(1, 6)]
        seconds = [oracle.prompt(5 * block + n % 3, seed=n, start=first[:n]) for n in shares]
        cached = check(llm, oracle, seconds, [0] * len(seconds))
        assert cached == [min(shared, (len(p) - 1) // block * block) for shared, p in zip(shares, seconds)]


@pytest.mark.parametrize("layout", ["PCP2 DCP2", "PCP4 DCP2", "TP2 PCP2 DCP4"])
def test_ranks_without_tokens(layout: str, folder: Path, oracle: SparseOracle) -> None:
    """A short tail after a cached prefix is whole on one rank, and its queries visit the others' shards."""
    options = ENGINE | {"min_split_tokens": 40, "context_attention": "query"}
    first = oracle.prompt(81, seed=1)
    tails = [oracle.prompt(length, seed=2, start=first[:80]) for length in (82, 83, 86)]
    with ThreadLLM(str(folder), **options, **layout_options(layout)) as llm:
        assert check(llm, oracle, [first, *tails], [0, 10, 20, 30])[1:] == [80] * 3


@pytest.fixture(scope="module")
def quantised(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_checkpoint(folder, tmp_path_factory.mktemp("nvfp4"), FORMAT)


@pytest.fixture(scope="module")
def quantised_oracle(quantised: Path, tmp_path_factory: pytest.TempPathFactory) -> SparseOracle:
    """The single rank on the quantised weights; prompts are judged on what they stand for."""
    return SparseOracle(
        quantised, dequantized_checkpoint(quantised, tmp_path_factory.mktemp("plain"), FORMAT)
    )


@pytest.mark.parametrize("layout", ["TP1 PCP4 EP", "TP2 PCP2 EP", "TP1 PCP4 DCP4 EP"])
def test_nvfp4(layout: str, quantised: Path, quantised_oracle: SparseOracle) -> None:
    oracle = quantised_oracle
    with ThreadLLM(str(quantised), **ENGINE, **layout_options(layout)) as llm:
        prompts = [oracle.prompt(length, seed=3) for length in (*range(12, 22), 50, 70)]
        check(llm, oracle, prompts, [i // 2 for i in range(len(prompts))])


def test_nvfp4_on_processes(quantised: Path, quantised_oracle: SparseOracle) -> None:
    """With the real collectives."""
    options = ENGINE | {"threads_per_rank": 1, "skip_tokenizer_init": True, "max_num_batched_tokens": 40}
    with LLM(str(quantised), **options, **layout_options("PCP4 DCP4 EP")) as llm:
        prompts = [quantised_oracle.prompt(length, seed=3) for length in (12, 17, 50, 70)]
        check(llm, quantised_oracle, prompts, [0, 0, 1, 3])
