"""Whether a layout computes what one rank computes: layouts by name, an oracle, requests over time."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from prefold.engine.llm import LLM
from prefold.request import RequestOutput, SamplingParams

AXES = {
    "TP": "tensor_parallel_size",
    "PCP": "prefill_context_parallel_size",
    "DCP": "decode_context_parallel_size",
    "PP": "pipeline_parallel_size",
    "DP": "data_parallel_size",
}

LEAD = 1e-3
"""An oracle's prompts avoid tokens whose log-probabilities are closer than this: rounding may choose."""


def layout_options(name: str) -> dict[str, Any]:
    """Engine options of a layout, as people write it.

    >>> layout_options("PP2 PCP4 EP")
    {'pipeline_parallel_size': 2, 'prefill_context_parallel_size': 4, 'enable_expert_parallel': True}
    """
    options: dict[str, Any] = {}
    for word in name.split():
        match = re.fullmatch(r"(TP|PCP|DCP|PP|DP)(\d+)", word)
        if match is None and word != "EP":
            raise ValueError(
                f"{word!r} in layout {name!r} is not EP or one of {', '.join(AXES)} and a number"
            )
        if match is None:
            options["enable_expert_parallel"] = True
        else:
            options[AXES[match[1]]] = int(match[2])
    return options


class Oracle:
    """Greedy tokens of one rank, each prompt alone and computed whole.

    Args:
        llm: the single rank, without prefix cache.
        num_tokens: to generate for each prompt.
        lead: see LEAD.
    """

    def __init__(self, llm: LLM, num_tokens: int = 8, lead: float = LEAD) -> None:
        self.llm = llm
        self._lead = lead
        self.params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self._asked = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
        self._known: dict[tuple[int, ...], tuple[list[int], float]] = {}

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that follow `prompt`."""
        return self._ask(prompt)[0]

    def prompt(self, length: int, seed: int = 0, start: Sequence[int] = ()) -> list[int]:
        """`length` tokens that begin with `start` and whose continuation does not depend on rounding."""
        vocab_size = self.llm.engine.config.model.vocab_size
        for attempt in range(60):
            rng = random.Random(f"{length}/{seed}/{attempt}")
            tail = [rng.randrange(vocab_size) for _ in range(length - len(start))]
            prompt = [*start, *tail]
            if self._ask(prompt)[1] >= self._lead:
                return prompt
        raise AssertionError(f"every prompt of {length} tokens that was tried ends near a tie")

    def _ask(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        """(tokens, smallest lead of one over the next likely)."""
        key = tuple(prompt)
        if key not in self._known:
            sample = self.llm.generate(list(prompt), self._asked)[0].outputs[0]
            assert len(sample.token_ids) == self._asked.max_tokens
            leads = []
            for entry in sample.logprobs or ():
                best = sorted((one.logprob for one in entry.values()), reverse=True)
                leads.append(best[0] - best[1])
            self._known[key] = (sample.token_ids, min(leads))
        return self._known[key]


def generate_over_time(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    arrivals: Sequence[int],
    after_step: Callable[[int], None] | None = None,
) -> list[RequestOutput]:
    """Outputs in the prompts' order. `arrivals[i]`: the engine step before which prompt i arrives.

    Args:
        after_step: called with the number of steps done.
    """
    engine, finished = llm.engine, {}
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    waiting = sorted(range(len(prompts)), key=lambda i: arrivals[i])
    steps = 0
    while waiting or engine.has_unfinished_requests:
        while waiting and (arrivals[waiting[0]] <= steps or not engine.has_unfinished_requests):
            i = waiting.pop(0)
            engine.add_request(f"arrival-{i}", prompts[i], each[i], stream=False)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        steps += 1
        if after_step is not None:
            after_step(steps)
    return [finished[f"arrival-{i}"] for i in range(len(prompts))]
