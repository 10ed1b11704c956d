"""The single rank against transformers: log-probabilities of whole prompts, greedy tokens."""

from __future__ import annotations

import random

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.request import Logprob, RequestOutput
from prefold.testing.reference import LOGIT_TIE, ROUTER_TIE, Judgement

MODELS = [
    "v2",
    "v2-no-q-lora",
    "v3",
    "v3-no-q-lora",
    "glm",
    "kimi-k2",
    "glm-flash",
    "minicpm3",
    "v32",
    "glm-dsa",
]
GQA_MODELS = ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "smollm3"]
BLOCK_SIZE = 16
# Every length to 40, then up to 600 every length modulo the block size.
LENGTHS = [*range(1, 41), *range(41, 600, 37), 600]
ALONE = [1, 17, 600]
TOLERANCE = 1e-4

ALL_LOGPROBS = SamplingParams(
    temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=20, prompt_logprobs=20
)


def engine(tiny, name: str) -> LLM:
    return tiny.llm(name, block_size=BLOCK_SIZE, max_num_batched_tokens=4000, num_blocks=2000)


def error(entry: dict[int, Logprob], logprobs: torch.Tensor) -> float:
    """Largest difference between an entry's log-probabilities and transformers' `logprobs` [vocab]."""
    ids = list(entry)
    ours = torch.tensor([entry[i].logprob for i in ids])
    return float((ours - logprobs[ids]).abs().max())


def check(output: RequestOutput, judgement: Judgement) -> bool:
    """Compare every position of a request; False, with nothing compared, where rounding decides."""
    prompt, sample = output.prompt_token_ids, output.outputs[0]
    preferred, lead = judgement.prefers(len(prompt))
    if judgement.margin < ROUTER_TIE or lead < LOGIT_TIE:
        return False
    assert sample.token_ids == preferred, len(prompt)
    assert len(sample.token_ids) == ALL_LOGPROBS.max_tokens
    entries = output.prompt_logprobs
    assert entries is not None
    assert sample.logprobs is not None
    assert entries[0] is None
    assert len(entries) == len(prompt)
    logprobs = judgement.logits.log_softmax(-1)
    chosen = (prompt + sample.token_ids)[1:]
    for position, entry in enumerate([*entries[1:], *sample.logprobs]):
        assert entry is not None
        assert next(iter(entry)) == chosen[position]
        assert len(entry) >= 20
        assert error(entry, logprobs[position]) < TOLERANCE, (len(prompt), position)
    return True


@pytest.mark.parametrize("name", MODELS + GQA_MODELS)
def test_logprobs_and_greedy_tokens_of_every_length(tiny, name: str):
    llm, reference, rng = engine(tiny, name), tiny.reference(name), random.Random(1)
    # Where only projections, sizes, routers or the layers with an indexer differ, a third of
    # the lengths will do.
    alike = ("no-q-lora", "llama", "qwen2", "kimi-k2", "glm-flash", "minicpm3")
    alike += ("v2", "glm", "v32", "qwen3-moe")
    missing = LENGTHS[::3] if name.endswith(alike) else list(LENGTHS)
    for _ in range(12):
        prompts = [tiny.random_prompt(length)(rng) for length in missing]
        outputs = llm.generate(prompts, ALL_LOGPROBS)
        sequences = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
        judgements = reference.judge(sequences)
        missing = [len(o.prompt_token_ids) for o, j in zip(outputs, judgements) if not check(o, j)]
        if not missing:
            break
    assert not missing, "these lengths found no prompt away from ties"


@pytest.mark.parametrize("name", MODELS + GQA_MODELS)
def test_greedy_tokens_equal_transformers_loop_with_its_cache(tiny, name: str):
    llm, reference = engine(tiny, name), tiny.reference(name)
    for case in tiny.cases(ALONE, name, seed=2):
        assert reference.greedy(case.prompt, len(case.tokens)) == case.tokens
        (output,) = llm.generate(case.prompt, ALL_LOGPROBS)
        assert output.outputs[0].token_ids == case.tokens
        assert check(output, *reference.judge([case.prompt + case.tokens]))
        assert len(set(case.tokens)) > 4, "a checkpoint whose greedy tokens do not vary tests little"
