"""Grouped-query attention on every kind of layout gives the single rank's tokens; ranks are threads.

The single rank is compared with transformers in e2e/test_transformers. Free KV and reused buffers are
poisoned.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.config import ParallelConfig
from prefold.distributed.layouts import is_legal
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BLOCK_SIZE = 2
ENGINE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": 600,
    "max_model_len": 400,
    "min_split_tokens": 1,
    "context_workspace_tokens": 16,
    "debug_poison": True,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Everything that may differ between layers and heads, 2 KV heads.
    "qwen3": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "moe": ("Qwen3MoeForCausalLM", {}),
    "window": ("MistralForCausalLM", {"sliding_window": 11}),
    "some windows": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
}

CASES = [
    *(("qwen3", layout) for layout in ("TP2", "TP4", "PCP2", "PCP4", "TP2 PCP2", "PP2 PCP2")),
    *(("qwen3", layout) for layout in ("PCP2 DCP2", "PCP4 DCP2", "TP4 DCP2", "TP4 PCP2 DCP4", "TP8 DCP4")),
    *(("smollm3", layout) for layout in ("PP2 PCP2", "TP4 PCP2 DCP2")),
    *(("moe", layout) for layout in ("PCP2 EP", "TP2 PCP2", "TP4 PCP2 DCP4 EP")),
    *(("window", layout) for layout in ("PCP2", "PCP4", "TP4 PCP2", "PP2 PCP2")),
    *(("some windows", layout) for layout in ("PCP3", "TP2 PCP2")),
]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    """Checkpoint and single rank of each model, made when first used."""
    root = tmp_path_factory.mktemp("gqa")

    class Made(dict):
        def __missing__(self, name: str) -> tuple[Path, Oracle]:
            architecture, overrides = MODELS[name]
            folder = make_checkpoint(
                architecture, root / name, vocab_size=300, num_hidden_layers=2, **overrides
            )
            options = ENGINE | {"enable_prefix_caching": False, "skip_tokenizer_init": True}
            del options["min_split_tokens"]
            self[name] = (folder, Oracle(LLM(str(folder), threads_per_rank=1, **options)))
            return self[name]

    return Made()


def check(llm: ThreadLLM, oracle: Oracle, prompts: Sequence[list[int]], arrivals: Sequence[int]) -> None:
    for scheduler in llm.engine.schedulers:
        scheduler.check_integrity()
    outputs = generate_over_time(llm, prompts, GREEDY, arrivals)
    wrong = [
        f"{len(prompt)} tokens: {output.outputs[0].token_ids} is not {oracle(prompt)}"
        for prompt, output in zip(prompts, outputs, strict=True)
        if output.outputs[0].token_ids != oracle(prompt)
    ]
    assert not wrong, f"{len(wrong)} of {len(prompts)} prompts: {wrong[:5]}"


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_length_chunks_and_prefixes(
    oracles: dict[str, tuple[Path, Oracle]], name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All residues of the length modulo the chunks of all blocks, prefill and decode in the same steps; then
    prompts in chunks off the blocks' edges; then prompts that share a prefix with earlier ones."""
    folder, oracle = oracles[name]
    with ThreadLLM(str(folder), **ENGINE, **layout_options(layout)) as llm:
        parallel = llm.engine.config.parallel
        pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
        residues = 2 * pcp * BLOCK_SIZE * dcp
        # 3 has no factor in common with them: these are all residues, too.
        lengths = list(range(1, residues + 4)) if residues <= 32 else list(range(1, 128, 3))
        random.Random(0).shuffle(lengths)
        arrivals = [i * 8 // len(lengths) for i in range(len(lengths))]
        check(llm, oracle, [oracle.prompt(length) for length in lengths], arrivals)

        for scheduler in llm.engine.schedulers:
            monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 13)
        chunked = [oracle.prompt(length, seed) for seed, length in enumerate([70, 3, 27, 41], 20)]
        check(llm, oracle, chunked, [0, 0, 1, 2])
        shared = [oracle.prompt(80 + i, seed=40 + i, start=chunked[0][:n]) for i, n in enumerate([9, 40, 70])]
        check(llm, oracle, shared, [0, 0, 3])


@pytest.mark.parametrize("way", ["local", "sliced"])
def test_replicated_contexts_in_every_way(oracles: dict[str, tuple[Path, Oracle]], way: str) -> None:
    """Also with windows, where queries stay whatever is asked for."""
    for name in ("qwen3", "some windows"):
        folder, oracle = oracles[name]
        with ThreadLLM(str(folder), **ENGINE, **layout_options("PCP2"), context_attention=way) as llm:
            first = oracle.prompt(60, seed=60)
            check(llm, oracle, [first], [0])
            again = [oracle.prompt(61 + i, seed=61 + i, start=first[:58]) for i in range(4)]
            check(llm, oracle, again, [0, 0, 1, 2])


@pytest.mark.parametrize("layout", ["PCP2 DCP2", "TP4 DCP2", "TP4 PCP2 DCP4"])
@pytest.mark.parametrize("way", ["query", "kv"])
def test_sharded_contexts_in_every_way(
    oracles: dict[str, tuple[Path, Oracle]], way: str, layout: str
) -> None:
    folder, oracle = oracles["qwen3"]
    with ThreadLLM(str(folder), **ENGINE, **layout_options(layout), context_attention=way) as llm:
        first = oracle.prompt(60, seed=60)
        check(llm, oracle, [first], [0])
        again = [oracle.prompt(61 + i, seed=61 + i, start=first[:58]) for i in range(4)]
        check(llm, oracle, again, [0, 0, 1, 2])


def test_the_layouts_are_those_that_are_legal(oracles: dict[str, tuple[Path, Oracle]]) -> None:
    """With 2 KV heads a group of TP 4 shares each over 2 ranks, and no more."""
    for name, layout, legal in (
        ("qwen3", "TP2 DCP2", False),
        ("qwen3", "TP4 DCP2", True),
        ("qwen3", "TP4 DCP4", False),
        ("qwen3", "TP8 DCP4", True),
        ("window", "PCP2 DCP2", False),
    ):
        model = oracles[name][1].llm.engine.config.model
        assert is_legal(model, ParallelConfig(**layout_options(layout))) == legal, (name, layout)
