"""With KV in FP8 every kind of layout gives the tokens that one rank gives with it; ranks are threads.

Free KV and reused buffers are poisoned: bytes that are NaN in this format.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BLOCK_SIZE = 2
ENGINE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": 300,
    "max_model_len": 200,
    "context_workspace_tokens": 16,
    "debug_poison": True,
    "kv_cache_dtype": "fp8",
}

FP8_LEAD = 0.02
"""Rounding to 4 bits turns the last bit of a float32, in which layouts differ, into 2^-4 of an element now
and then, and log-probabilities move by more than rounding: a token must lead by this much."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("DeepseekV3ForCausalLM", {"num_hidden_layers": 2}),
    "gqa": ("Qwen3ForCausalLM", {"num_hidden_layers": 2}),
    "dsa": ("GlmMoeDsaForCausalLM", {}),
}

LAYOUTS = ["TP2", "PCP2", "PCP2 DCP2", "TP2 PCP2 DCP4", "PP2"]
CASES = [
    *(("mla", layout) for layout in LAYOUTS),
    *(("gqa", layout) for layout in ["TP2", "PCP2", "PCP2 DCP2", "TP4 PCP2 DCP4", "PP2"]),
    *(("dsa", layout) for layout in ["PCP2", "PCP2 DCP2"]),
]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    """Checkpoint and single rank of each model, made when first used."""
    root = tmp_path_factory.mktemp("fp8")

    class Made(dict):
        def __missing__(self, name: str) -> tuple[Path, Oracle]:
            architecture, overrides = MODELS[name]
            folder = make_checkpoint(architecture, root / name, vocab_size=300, **overrides)
            options = ENGINE | {"enable_prefix_caching": False, "skip_tokenizer_init": True}
            self[name] = (folder, Oracle(LLM(str(folder), threads_per_rank=1, **options), lead=FP8_LEAD))
            return self[name]

    return Made()


def check(llm: ThreadLLM, oracle: Oracle, prompts: Sequence[list[int]], arrivals: Sequence[int]) -> list[int]:
    """Compare all tokens; returns the cached tokens of each prompt."""
    outputs = generate_over_time(llm, prompts, GREEDY, arrivals)
    wrong = [
        f"{len(prompt)} tokens: {output.outputs[0].token_ids} is not {oracle(prompt)}"
        for prompt, output in zip(prompts, outputs, strict=True)
        if output.outputs[0].token_ids != oracle(prompt)
    ]
    assert not wrong, f"{len(wrong)} of {len(prompts)} prompts: {wrong[:5]}"
    return [output.metrics.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_length_chunks_and_prefixes(
    oracles: dict[str, tuple[Path, Oracle]], name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All residues of the length modulo the chunks of all blocks, prefill and decode in the same steps; then
    prompts in chunks off the blocks' edges; then prompts that share a prefix with earlier ones."""
    folder, oracle = oracles[name]
    with ThreadLLM(str(folder), min_split_tokens=1, **ENGINE, **layout_options(layout)) as llm:
        parallel = llm.engine.config.parallel
        pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
        lengths = range(1, 2 * pcp * BLOCK_SIZE * dcp + 2)
        check(llm, oracle, [oracle.prompt(length) for length in lengths], [i // 6 for i in lengths])

        for scheduler in llm.engine.schedulers:
            monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 13)
        chunked = [oracle.prompt(length, seed) for seed, length in enumerate([61, 3, 27], 20)]
        check(llm, oracle, chunked, [0, 0, 1])
        shared = [oracle.prompt(70 + i, seed=40 + i, start=chunked[0][:n]) for i, n in enumerate([9, 40])]
        cached = check(llm, oracle, shared, [0, 3])
        assert sum(cached) > 0
