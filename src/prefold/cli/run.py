"""Runs requests through an engine, with progress and text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefold.cli.progress import Progress
from prefold.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from prefold.engine.engine import LLMEngine


@dataclass
class RunResult:
    """What came out, in the prompts' order, and how the engine got there.

    Attributes:
        outputs: one per prompt.
        prefill_ends: prompt tokens done after each step, up to the last prompt token.
        prefill_rank_tokens, prefill_rank_pairs: per PCP rank, when the last prompt was prefilled.
        seconds: from the first request to the last token.
    """

    outputs: list[RequestOutput]
    prefill_ends: list[int] = field(default_factory=list)
    prefill_rank_tokens: list[int] = field(default_factory=list)
    prefill_rank_pairs: list[int] = field(default_factory=list)
    seconds: float = 0.0


def run_requests(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    progress: Progress,
    on_text: Callable[[str], None] | None = None,
) -> RunResult:
    """Generate for all prompts at once on an engine that is otherwise idle.

    Args:
        engine: its metrics must be fresh: they are read as this run's.
        prompts: token ids.
        params: for every prompt.
        progress: told after every step; stopped before the first text.
        on_text: gets the text of the first sample piece by piece.

    Raises:
        ValueError: a prompt cannot be served; none was started then.
    """
    start = time.monotonic()
    ids = [str(i) for i in range(len(prompts))]
    for request_id, token_ids in zip(ids, prompts):
        engine.add_request(request_id, token_ids, params)
    latest: dict[str, RequestOutput] = {}
    result, shown = RunResult([]), ""
    progress.update(0, engine.metrics.num_prompt_tokens, 0)
    while engine.has_unfinished_requests:
        for output in engine.step():
            latest[output.request_id] = output
        _note_prefill(engine, result)
        generated = sum(len(sample.token_ids) for output in latest.values() for sample in output.outputs)
        progress.update(engine.metrics.num_prefill_tokens, engine.metrics.num_prompt_tokens, generated)
        if on_text is not None and ids[0] in latest:
            text = latest[ids[0]].outputs[0].text
            if len(text) > len(shown):
                progress.stop()
                on_text(text[len(shown) :])
                shown = text
    result.outputs = [latest[request_id] for request_id in ids]
    result.seconds = time.monotonic() - start
    return result


def _note_prefill(engine: LLMEngine, result: RunResult) -> None:
    """Remember how far the step brought the prompts, until they are done."""
    metrics = engine.metrics
    if result.prefill_ends and result.prefill_ends[-1] >= metrics.num_prompt_tokens:
        return
    result.prefill_ends.append(metrics.num_prefill_tokens)
    result.prefill_rank_tokens = list(metrics.rank_tokens)
    result.prefill_rank_pairs = list(metrics.rank_causal_pairs)
