"""Every layout of TP x PCP gives the single rank's tokens: all lengths, batches, chunks, prefix
hits, preemption. The ranks of a layout are started once; free KV and reused buffers are poisoned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.testing.checkpoints import make_checkpoint

LAYOUTS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (1, 3), (1, 8)]
BLOCK_SIZE = 2
VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENGINE = {
    "block_size": BLOCK_SIZE,
    "num_blocks": 2000,
    "max_model_len": 1000,
    "threads_per_rank": 1,
    "skip_tokenizer_init": True,
    "min_split_tokens": 1,
    "context_workspace_tokens": 32,
    "debug_poison": True,
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3"), vocab_size=VOCAB)


class Oracle:
    """Tokens of one rank, each prompt alone and computed whole."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._llm = LLM(str(checkpoint), **ENGINE, enable_prefix_caching=False)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self._llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
            assert len(self._known[key]) == GREEDY.max_tokens
        return self._known[key]


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"tp{layout[0]}_pcp{layout[1]}")
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    tp, pcp = request.param
    with LLM(str(checkpoint), tensor_parallel_size=tp, prefill_context_parallel_size=pcp, **ENGINE) as engine:
        yield engine


def pcp_size(llm: LLM) -> int:
    return llm.engine.config.parallel.prefill_context_parallel_size


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.kv.pool.num_free_blocks == ENGINE["num_blocks"]
    return [output.outputs[0].token_ids for output in outputs]


def test_every_length_alone(llm: LLM, oracle: Oracle) -> None:
    for length in range(1, 4 * pcp_size(llm) * BLOCK_SIZE + 4):
        prompt = prompt_of(length)
        assert generate(llm, [prompt]) == [oracle(prompt)], length


def test_batches_of_mixed_lengths(llm: LLM, oracle: Oracle) -> None:
    short = list(range(1, 2 * pcp_size(llm)))
    for lengths in ([256, 40, 256], [1] * 9, short, [1, 3, 100, 2, 64, 1, 33]):
        prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths, 1)]
        assert generate(llm, prompts) == [oracle(prompt) for prompt in prompts], lengths


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 33])
def test_chunked_prefill(llm: LLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(llm.engine.scheduler, "max_num_scheduled_tokens", budget)
    llm.engine.scheduler.reset_prefix_cache()
    lengths = [1, 5, 2 * budget + 1, 40]
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths, 20)]
    assert generate(llm, prompts) == [oracle(prompt) for prompt in prompts]


@pytest.mark.parametrize("shared", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 24, 60])
def test_prefix_hits(llm: LLM, oracle: Oracle, shared: int) -> None:
    llm.engine.scheduler.reset_prefix_cache()
    first = prompt_of(60, seed=40)
    generate(llm, [first])
    second = first[:shared] + prompt_of(60 - shared, seed=41)
    output = llm.generate(second, GREEDY)[0]
    assert output.outputs[0].token_ids == oracle(second)
    # At least the last token is computed again.
    assert output.metrics.num_cached_tokens == min(shared, 59) // BLOCK_SIZE * BLOCK_SIZE


def test_preemption(llm: LLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is thrown out after every step, in prefill and in decode."""
    monkeypatch.setattr(llm.engine.scheduler, "max_num_scheduled_tokens", 24)
    prompts = [prompt_of(length, seed) for seed, length in enumerate([50, 7, 33], 60)]
    engine, rng, finished = llm.engine, random.Random(0), {}
    for index, prompt in enumerate(prompts):
        engine.add_request(f"preempted-{index}", prompt, GREEDY, stream=False)
    preemptions = 0
    while engine.has_unfinished_requests:
        for output in engine.step():
            finished[output.request_id] = output.outputs[0].token_ids
        running = list(engine.scheduler.running)
        if running and preemptions < 12:
            # Without its prefix the victim computes everything again.
            engine.scheduler.reset_prefix_cache()
            preemptions += engine.scheduler.preempt(rng.choice(running).request_id)
        engine.scheduler.check_integrity()
    assert preemptions == 12
    assert [finished[f"preempted-{i}"] for i in range(3)] == [oracle(prompt) for prompt in prompts]


def test_prompt_logprobs(llm: LLM, oracle: Oracle) -> None:
    """Restored from all ranks, in order, also when the prompt comes in chunks."""
    prompt = prompt_of(45, seed=80)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, ignore_eos=True)
    expected = oracle._llm.generate(prompt, params)[0].prompt_logprobs
    actual = llm.generate(prompt, params)[0].prompt_logprobs
    assert actual is not None
    assert expected is not None
    assert len(actual) == len(prompt)
    assert actual[0] is None
    for position in range(1, len(prompt)):
        ours, theirs = actual[position], expected[position]
        assert ours is not None
        assert theirs is not None
        assert list(ours) == list(theirs)
        for token in theirs:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_sampled_tokens_do_not_depend_on_the_layout(llm: LLM, oracle: Oracle) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=3, max_tokens=8, ignore_eos=True)
    prompt = prompt_of(21, seed=90)
    expected = [o.token_ids for o in oracle._llm.generate(prompt, params)[0].outputs]
    assert [o.token_ids for o in llm.generate(prompt, params)[0].outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_rank_tokens_are_balanced(llm: LLM) -> None:
    """One prompt: PCP ranks compute token sums that differ by at most 1."""
    before = list(llm.engine.metrics.rank_tokens)
    prompt = prompt_of(501, seed=95)
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    counts = [after - b for after, b in zip(llm.engine.metrics.rank_tokens, before, strict=True)]
    assert len(counts) == pcp_size(llm)
    assert sum(counts) == 501
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    folder = str(make_checkpoint(architecture, tmp_path, vocab_size=VOCAB))
    prompts = [prompt_of(length, seed=3) for length in range(1, 36)]
    with LLM(folder, **ENGINE) as one:
        expected = generate(one, prompts)
    with LLM(folder, tensor_parallel_size=2, prefill_context_parallel_size=2, **ENGINE) as four:
        assert generate(four, prompts) == expected
