"""Sparse attention on every layout: the single rank's tokens, for prompts below, at and above index_topk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefold import LLM
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.sparse_oracle import ENGINE, TOPK, SparseOracle, check
from prefold.testing.thread_executor import ThreadLLM

torch.set_num_threads(1)

LAYOUTS = [
    *("PCP3", "PCP4 EP", "TP2 PCP2 EP", "DP2 PCP2 EP"),
    *("TP2 DCP2", "PCP4 DCP2", "TP2 PCP2 DCP4 EP", "PP2 PCP2 DCP2"),
]
BLOCK_SIZE = ENGINE["block_size"]


@pytest.fixture(scope="module")
def folder(sparse_oracle_of: Callable[[int], tuple[Path, SparseOracle]]) -> Path:
    return sparse_oracle_of(3)[0]


@pytest.fixture(scope="module")
def oracle(sparse_oracle_of: Callable[[int], tuple[Path, SparseOracle]]) -> SparseOracle:
    return sparse_oracle_of(3)[1]


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[ThreadLLM]:
    with ThreadLLM(str(folder), **ENGINE, **layout_options(request.param)) as engine:
        yield engine


def reset(llm: ThreadLLM, monkeypatch: pytest.MonkeyPatch, budget: int | None = None) -> None:
    """Forget all prefixes; `budget`: tokens of a step."""
    for scheduler in llm.engine.schedulers:
        scheduler.reset_prefix_cache()
        if budget is not None:
            monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", budget)


def test_every_length_over_time(
    llm: ThreadLLM, oracle: SparseOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All residues of the chunks of all blocks, and all lengths around index_topk."""
    reset(llm, monkeypatch)
    pcp = llm.engine.config.parallel.prefill_context_parallel_size
    lengths = list(range(1, TOPK + 2 * pcp * BLOCK_SIZE + 1))
    random.Random(0).shuffle(lengths)
    arrivals = [i * 10 // len(lengths) for i in range(len(lengths))]
    check(llm, oracle, [oracle.prompt(length) for length in lengths], arrivals)


@pytest.mark.parametrize("budget", [5, 33])
def test_chunked_prefill(
    llm: ThreadLLM, oracle: SparseOracle, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Chunks of which some see all keys, some select, and some do both."""
    reset(llm, monkeypatch, budget)
    lengths = [1, TOPK - 1, TOPK, TOPK + 1, budget + 30]
    prompts = [oracle.prompt(length, seed) for seed, length in enumerate(lengths, 20)]
    check(llm, oracle, prompts, [0, 0, 0, 2, 3])


def test_prefix_hits(llm: ThreadLLM, oracle: SparseOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts below, at and above index_topk come from the cache."""
    reset(llm, monkeypatch)
    first = oracle.prompt(90, seed=40)
    check(llm, oracle, [first], [0])
    shares = [2, TOPK - 2, TOPK, TOPK + 1, 50, 89]
    seconds = [oracle.prompt(90 + i % 2, seed=41 + i, start=first[:n]) for i, n in enumerate(shares)]
    cached = check(llm, oracle, seconds, [0] * len(seconds))
    if len(llm.engine.schedulers) == 1:
        block = llm.engine.config.virtual_block_size
        assert cached == [n // block * block for n in shares]
    else:  # a replica that has less of the prefix may be the faster one
        assert sum(cached) > 0


def test_batches_of_mixed_lengths(
    llm: ThreadLLM, oracle: SparseOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset(llm, monkeypatch)
    for lengths in ([70, 20, 70], [17] * 5, [1, 3, 50, 2, 64, 1, 33]):
        prompts = [oracle.prompt(length, seed) for seed, length in enumerate(lengths, 1)]
        check(llm, oracle, prompts, [0] * len(prompts))


@pytest.mark.parametrize("layout", ["TP2 PCP2", "PP3 PCP2 EP"])
def test_deepseek_v32(layout: str, tmp_path: Path) -> None:
    """An indexer in every layer: so every layer can begin a stage."""
    folder = make_checkpoint("DeepseekV32ForCausalLM", tmp_path, vocab_size=300)
    oracle = SparseOracle(folder, **ENGINE)
    with ThreadLLM(str(folder), **ENGINE, **layout_options(layout)) as llm:
        prompts = [oracle.prompt(length, seed=3) for length in (*range(12, 24), 70)]
        check(llm, oracle, prompts, [i // 2 for i in range(len(prompts))])


def test_preemption(llm: ThreadLLM, oracle: SparseOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is thrown out in prefill, below and above index_topk, and in decode."""
    reset(llm, monkeypatch, budget=24)
    prompts = [oracle.prompt(length, seed) for seed, length in enumerate([50, 7, 33], 60)]
    thrown_out = 0

    def throw_out(step: int) -> None:
        nonlocal thrown_out
        for scheduler in llm.engine.schedulers:
            if step % 3 == 1 and scheduler.running and thrown_out < 5:
                scheduler.reset_prefix_cache()
                thrown_out += scheduler.preempt(scheduler.running[step % len(scheduler.running)].request_id)

    outputs = generate_over_time(llm, prompts, oracle.params, [0, 1, 2], throw_out)
    assert [output.outputs[0].token_ids for output in outputs] == [oracle(prompt) for prompt in prompts]
    assert thrown_out >= 3


def test_ties_are_broken_alike(tmp_path: Path) -> None:
    """Two index heads: the scores of many keys are exactly 0, more than a query may select."""
    folder = make_checkpoint(
        "GlmMoeDsaForCausalLM", tmp_path, vocab_size=300, num_hidden_layers=1, index_n_heads=2,
        indexer_types=["full"], index_topk=6,
    )  # fmt: skip
    oracle = SparseOracle(folder, **ENGINE)
    prompts = [oracle.prompt(length, seed=3) for length in (*range(20, 30), 80)]
    for layout, tile, way in (
        *(("TP2", 4, "auto"), ("PCP3", 1024, "auto"), ("PCP2 DCP2", 4, "query"), ("PCP2 DCP2", 4, "kv")),
        *(("TP2 DCP2", 1024, "kv"), ("TP2 PCP2 DCP4", 1024, "query")),
    ):
        options = ENGINE | {"context_workspace_tokens": tile, "max_num_batched_tokens": 21}
        options |= {"context_attention": way}
        with ThreadLLM(str(folder), **options, **layout_options(layout)) as llm:
            check(llm, oracle, prompts, [i // 2 for i in range(len(prompts))])


def test_without_scores_the_first_keys_are_selected(tmp_path: Path) -> None:
    """Weights of 0: all scores are equal, so that every selection is the first index_topk keys."""
    folder = make_checkpoint(
        "GlmMoeDsaForCausalLM", tmp_path, vocab_size=300, num_hidden_layers=2, index_topk=6
    )
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("indexer.weights_proj.weight"):
                tensors[name].zero_()
        save_file(tensors, path, metadata={"format": "pt"})
    options = {"threads_per_rank": 1, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    oracle = Oracle(LLM(str(folder), **ENGINE, **options))
    prompts = [oracle.prompt(length, seed=3) for length in (*range(3, 25), 80)]
    for layout, way in (("PCP3", "local"), ("PCP2 DCP2", "query"), ("TP2 PCP2 DCP4", "kv")):
        options = ENGINE | {"cp_kv_cache_interleave_size": 2, "max_num_batched_tokens": 21}
        options |= {"context_attention": way}
        with ThreadLLM(str(folder), **options, **layout_options(layout)) as llm:
            check(llm, oracle, prompts, [i // 2 for i in range(len(prompts))])
