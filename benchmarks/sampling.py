"""Sampling of a step: CPU time per row, by what is asked for, rows and vocabulary.

    python benchmarks/sampling.py [seconds per table, 20]

`pass` is one of torch's passes over the logits (their largest): greedy rows cannot do without. One thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rates import best_seconds

from prefold.request import SamplingParams
from prefold.sampling.sampler import Sampler, SamplingMetadata

PROMPT, GENERATED = 1024, 256
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top-k, top-p, min-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05),
    "greedy, penalties": SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.1),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


def metadata(params: SamplingParams, num_rows: int, vocab_size: int) -> SamplingMetadata:
    tokens = np.random.default_rng(0).integers(0, vocab_size, (num_rows, PROMPT + GENERATED))
    return SamplingMetadata(
        request_ids=[str(row) for row in range(num_rows)],
        params=[params] * num_rows,
        seeds=range(num_rows),
        num_generated=[GENERATED] * num_rows,
        prompt_token_ids=list(tokens[:, :PROMPT]),
        output_token_ids=list(tokens[:, PROMPT:]),
        eos_token_ids=[(0,)] * num_rows,
    )


def main(seconds: float = 20.0) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for vocab_size in (49_152, 151_936):
        sampler = Sampler(vocab_size)
        for num_rows in (1, 16, 256):
            # As a model's are: few likely tokens, many unlikely ones.
            logits = torch.randn(num_rows, vocab_size) * 2.5
            tasks: dict[str, Callable[[], object]] = {"pass": partial(torch.amax, logits, 1)}
            for name, params in KINDS.items():
                tasks[name] = partial(sampler, logits, metadata(params, num_rows, vocab_size))
            best = best_seconds(tasks, seconds)
            print(f"vocabulary {vocab_size}, {num_rows} rows: us per row, and passes over the logits")
            for name, took in best.items():
                print(f"  {name:20} {took / num_rows * 1e6:8.1f} {took / best['pass']:8.1f}", flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
