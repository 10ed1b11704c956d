"""A run that computes in bfloat16 beside transformers in bfloat16: errors against the weights in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from prefold import SamplingParams
from prefold.kernels import library
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import layout_options
from prefold.testing.reference import Reference
from prefold.testing.thread_executor import ThreadLLM

torch.set_num_threads(1)

LENGTH, NUM_TOKENS = 230, 9
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20, prompt_logprobs=20
)
ENGINE = {
    "block_size": 8,
    "num_blocks": 100,
    "max_model_len": 256,
    "max_num_batched_tokens": 96,
    "min_split_tokens": 1,
    "debug_poison": True,
    "compute_dtype": "bfloat16",
}


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize("pairs", [False, True])
def test_errors_are_those_of_transformers_in_bfloat16(
    architecture: str, pairs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, with one rank and PCP 2; with and without products of bfloat16 pairs, where there are."""
    monkeypatch.setattr(library, "has_fast_pairs", lambda: pairs and library.has_pairs())
    options: dict[str, Any] = {"sliding_window": 50} if architecture.startswith("Mistral") else {}
    folder = make_checkpoint(architecture, tmp_path, dtype="bfloat16", num_hidden_layers=2, **options)
    prompt = [random.Random(1).randrange(3, 320) for _ in range(LENGTH)]
    exact, theirs = Reference(folder), Reference(folder, dtype=torch.bfloat16)
    for layout in ("TP1", "PCP2"):
        with ThreadLLM(str(folder), **ENGINE, **(layout_options(layout) if layout != "TP1" else {})) as llm:
            (output,) = llm.generate([prompt], GREEDY)
        assert output.prompt_logprobs is not None
        tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert entries is not None
        assert len(tokens) == len(entries) == NUM_TOKENS
        sequence = [prompt + tokens]
        expected, approximate = (x.judge(sequence)[0].logits.log_softmax(-1) for x in (exact, theirs))
        own, others = [], []
        for entry, wanted, rounded in zip([*output.prompt_logprobs[1:], *entries], expected, approximate):
            assert entry is not None
            ids = list(entry)
            logprobs = torch.tensor([entry[i].logprob for i in ids])
            own.append((logprobs - wanted[ids]).abs().max())
            others.append((rounded[ids] - wanted[ids]).abs().max())
        # Medians: a token whose routing flips is far off in any low precision. Both are rounded to the same
        # dtype at about as many places.
        limit = 1.5 * torch.stack(others).median()
        assert torch.stack(own).median() < limit, layout
        assert torch.stack(own[-NUM_TOKENS:]).median() < 2 * limit, layout
