"""An oracle for models with sparse attention, and how tests of layouts ask it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefold.engine.llm import LLM
from prefold.testing.exactness import LEAD, Oracle, generate_over_time
from prefold.testing.reference import KEY_TIE, Reference

TOPK = 16
"""Of the tiny checkpoints."""

ENGINE: dict[str, Any] = {
    "block_size": 2,
    "num_blocks": 1000,
    "max_model_len": 600,
    "min_split_tokens": 1,
    "context_workspace_tokens": 12,
    "debug_poison": True,
}
"""Small steps, so that short prompts have many of them."""


class SparseOracle(Oracle):
    """Its prompts also avoid keys that an indexer scores so alike that rounding may choose.

    Args:
        plain: the same checkpoint without quantised weights, if `folder` has such.
        options: of the single rank.
    """

    def __init__(self, folder: Path, plain: Path | None = None, **options: Any) -> None:
        single = {"threads_per_rank": 1, "skip_tokenizer_init": True, "enable_prefix_caching": False}
        super().__init__(LLM(str(folder), **(options | single)))
        self._reference = Reference(plain or folder)

    def _ask(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        is_new = tuple(prompt) not in self._known
        tokens, lead = super()._ask(prompt)
        if is_new and lead >= LEAD:
            (judgement,) = self._reference.judge([[*prompt, *tokens]])
            if judgement.margin < KEY_TIE:
                self._known[tuple(prompt)] = (tokens, 0.0)
        return self._known[tuple(prompt)]


def check(llm: LLM, oracle: Oracle, prompts: Sequence[list[int]], arrivals: Sequence[int]) -> list[int]:
    """Compare all tokens with the oracle's; returns the cached tokens of each prompt."""
    outputs = generate_over_time(llm, prompts, oracle.params, arrivals)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle(prompt), len(prompt)
    return [output.metrics.num_cached_tokens for output in outputs]
