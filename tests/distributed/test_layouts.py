"""Every layout gives the single rank's tokens, on ranks that are threads (see test_layouts_processes for
processes): all lengths, arrivals over time, chunks, prefix hits, preemption. Free KV and reused buffers
are poisoned."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prefold import SamplingParams
from prefold.engine.core import EngineMetrics
from prefold.engine.scheduler import Scheduler
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

LAYOUTS = [
    *("TP2", "TP4", "PCP2", "PCP3", "PCP4", "PCP8", "DP2 EP", "PP2", "PP3", "DP2"),
    *("TP2 PCP2", "PCP2 EP", "PCP3 EP", "PCP4 EP", "TP2 PCP2 EP", "PP2 PCP2", "PP2 TP2 PCP2"),
    *("DP2 PCP2 EP", "DP2 TP2 EP"),
    *("TP2 DCP2", "PCP2 DCP2", "PCP4 DCP2", "PCP4 DCP4", "TP2 PCP2 DCP4", "PP2 PCP2 DCP2 EP"),
]
"""Most tests run on all of these. PP3 needs three layers, all others run two."""

FEW = ["TP2", "PCP3", "PP2", "TP2 PCP2 DCP4", "PP2 PCP2 DCP2 EP", "DP2 PCP2 EP"]
"""For tests of what layouts have in common."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BLOCK_SIZE = 2
ENGINE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": 1000,
    "max_model_len": 600,
    "min_split_tokens": 1,
    "context_workspace_tokens": 32,
    "debug_poison": True,
}


def num_layers(layout: str) -> int:
    return 3 if "PP3" in layout else 2


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, checkpoint_of: Callable[[int], Path]) -> Iterator[ThreadLLM]:
    layout = request.param
    with ThreadLLM(str(checkpoint_of(num_layers(layout))), **ENGINE, **layout_options(layout)) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(llm: ThreadLLM, oracle_of: Callable[[int], Oracle]) -> Oracle:
    return oracle_of(llm.engine.config.model.num_layers)


def schedulers(llm: ThreadLLM) -> list[Scheduler]:
    return llm.engine.schedulers


def reset(llm: ThreadLLM) -> None:
    """Forget all prefixes; nobody may hold a block."""
    for scheduler in schedulers(llm):
        scheduler.check_integrity()
        assert scheduler.kv.pool.num_free_blocks == llm.engine.config.cache.num_blocks
        scheduler.reset_prefix_cache()


def check(
    llm: ThreadLLM,
    oracle: Oracle,
    prompts: Sequence[list[int]],
    arrivals: Sequence[int] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> list[int]:
    """Generate for all prompts, at once or over time, and compare; returns the cached tokens of each."""
    arrivals = [0] * len(prompts) if arrivals is None else arrivals
    outputs = generate_over_time(llm, prompts, GREEDY, arrivals, after_step)
    wrong = [
        f"{len(prompt)} tokens: {output.outputs[0].token_ids} is not {oracle(prompt)}"
        for prompt, output in zip(prompts, outputs, strict=True)
        if output.outputs[0].token_ids != oracle(prompt)
    ]
    assert not wrong, f"{len(wrong)} of {len(prompts)} prompts: {wrong[:5]}"
    return [output.metrics.num_cached_tokens for output in outputs]


def all_residues(llm: ThreadLLM) -> range:
    """Lengths with every residue modulo the chunks of all blocks, 2 * P * B * D, and a few more."""
    parallel, block_size = llm.engine.config.parallel, llm.engine.config.cache.block_size
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    return range(1, 2 * pcp * block_size * dcp + 4)


def spread(count: int, steps: int = 10) -> list[int]:
    """Arrivals of `count` prompts over that many steps."""
    return [i * steps // count for i in range(count)]


def limit_steps(llm: ThreadLLM, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Let a step of a replica hold that many tokens."""
    for scheduler in schedulers(llm):
        monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", tokens)


def test_every_length_over_time(llm: ThreadLLM, oracle: Oracle) -> None:
    """Prefill and decode share steps. The order is random, so that neighbours vary."""
    reset(llm)
    lengths = list(all_residues(llm))
    random.Random(0).shuffle(lengths)
    check(llm, oracle, [oracle.prompt(length) for length in lengths], spread(len(lengths)))


def test_alone(llm: ThreadLLM, oracle: Oracle) -> None:
    """One request at a time: most ranks have no rows in decode, some none in prefill."""
    reset(llm)
    last = all_residues(llm)[-1]
    for length in (1, 2, last):
        check(llm, oracle, [oracle.prompt(length)])


def test_batches_of_mixed_lengths(llm: ThreadLLM, oracle: Oracle) -> None:
    """All at once: equal ones, short ones, long ones beside short ones."""
    pcp = llm.engine.config.parallel.prefill_context_parallel_size
    for lengths in ([96, 40, 96, *[1] * 9], [*[2] * 5, *range(1, 2 * pcp), 1, 3, 64, 33]):
        reset(llm)
        check(llm, oracle, [oracle.prompt(length, seed) for seed, length in enumerate(lengths, 1)])


def test_chunked_prefill(llm: ThreadLLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end off the blocks' edges, and contexts exceed the workspace of 32 tokens."""
    reset(llm)
    limit_steps(llm, monkeypatch, 19)
    lengths = [1, 5, 39, 78]
    check(llm, oracle, [oracle.prompt(length, seed) for seed, length in enumerate(lengths, 20)], [0, 0, 0, 2])


@pytest.mark.parametrize("llm", FEW, indirect=True)
@pytest.mark.parametrize("budget", [1, 2, 7])
def test_small_chunks(llm: ThreadLLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    reset(llm)
    limit_steps(llm, monkeypatch, budget)
    lengths = [1, 2 * budget + 1, 9]
    check(llm, oracle, [oracle.prompt(length, seed) for seed, length in enumerate(lengths, 30)], [0, 0, 2])


def test_prefix_hits(llm: ThreadLLM, oracle: Oracle) -> None:
    """At, below and above each of the first virtual blocks, and far beyond the workspace."""
    reset(llm)
    block = llm.engine.config.virtual_block_size
    total = 6 * block + 45
    first = oracle.prompt(total, seed=40)
    check(llm, oracle, [first])
    shares = sorted(
        {
            *(1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1),
            *(5 * block + 1, 6 * block + 44, 6 * block + 45),
        }
    )
    seconds = [oracle.prompt(total + i % 2, seed=41 + i, start=first[:n]) for i, n in enumerate(shares)]
    cached = check(llm, oracle, seconds)
    for shared, second, hit in zip(shares, seconds, cached):
        # At least the last token is computed again.
        expected = min(shared, len(second) - 1) // block * block
        if len(schedulers(llm)) == 1:
            assert hit == expected, (shared, hit)
        else:  # a replica that has less of the prefix may be the faster one
            assert hit % block == 0, (shared, hit)
            assert hit <= expected, (shared, hit)
    assert sum(cached) > 0


def test_preemption(llm: ThreadLLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are thrown out after many steps, in prefill and in decode."""
    reset(llm)
    limit_steps(llm, monkeypatch, 24)
    prompts = [oracle.prompt(length, seed) for seed, length in enumerate([50, 7, 33], 60)]
    rng = random.Random(0)
    preempted: list[str] = []

    def throw_out(step: int) -> None:
        for scheduler in schedulers(llm):
            running = [request.request_id for request in scheduler.running]
            if running and len(preempted) < 8:
                # Without its prefix the victim computes everything again.
                scheduler.reset_prefix_cache()
                # What a step in flight computes stays.
                victims = rng.sample(running, len(running))
                preempted.extend(next(([v] for v in victims if scheduler.preempt(v)), []))
            scheduler.check_integrity()

    check(llm, oracle, prompts, [0, 1, 2], throw_out)
    stages = llm.engine.config.parallel.pipeline_parallel_size
    assert len(preempted) >= (8 if stages == 1 else 4)


@pytest.mark.parametrize("llm", FEW, indirect=True)
def test_too_few_blocks(llm: ThreadLLM, oracle: Oracle) -> None:
    """The cache runs out in decode: the scheduler itself preempts."""
    reset(llm)
    block = llm.engine.config.virtual_block_size
    needed = -(-(40 + GREEDY.max_tokens) // block)
    held = []
    for scheduler in schedulers(llm):
        pool = scheduler.kv.pool
        held.append((pool, pool.allocate(pool.num_free_blocks - 2 * needed)))
    try:
        prompts = [oracle.prompt(37 + i % 4, seed=70 + i) for i in range(5 * len(held))]
        outputs = generate_over_time(llm, prompts, GREEDY, [0] * len(prompts))
    finally:
        for pool, blocks in held:
            pool.free(blocks)
    assert [output.outputs[0].token_ids for output in outputs] == [oracle(prompt) for prompt in prompts]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs(
    llm: ThreadLLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Restored from all ranks, in order, also when the prompt comes in chunks."""
    reset(llm)
    limit_steps(llm, monkeypatch, 31)
    prompt = oracle.prompt(45, seed=80)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True)
    expected = oracle.llm.generate(prompt, params)[0].prompt_logprobs
    actual = llm.generate(prompt, params)[0].prompt_logprobs
    assert actual is not None
    assert expected is not None
    assert len(actual) == len(expected) == len(prompt)
    assert actual[0] is None
    for ours, theirs in zip(actual[1:], expected[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert list(ours) == list(theirs)
        for token in theirs:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_sampled_tokens_do_not_depend_on_the_layout(llm: ThreadLLM, oracle: Oracle) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=3, max_tokens=8, ignore_eos=True)
    prompt = oracle.prompt(21, seed=90)
    expected = [o.token_ids for o in oracle.llm.generate(prompt, params)[0].outputs]
    assert [o.token_ids for o in llm.generate(prompt, params)[0].outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_rank_tokens_are_balanced(llm: ThreadLLM, oracle: Oracle) -> None:
    """One prompt: PCP ranks of its replica compute token sums that differ by at most 1."""
    reset(llm)
    llm.engine.core.metrics = EngineMetrics()
    llm.generate(oracle.prompt(501, seed=95), SamplingParams(temperature=0.0, max_tokens=1))
    pcp = llm.engine.config.parallel.prefill_context_parallel_size
    counts, others = llm.engine.metrics.rank_tokens[:pcp], llm.engine.metrics.rank_tokens[pcp:]
    assert sum(counts) == 501
    assert not any(others)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    folder = str(make_checkpoint(architecture, tmp_path, vocab_size=300))
    with ThreadLLM(folder, **ENGINE) as one:
        oracle = Oracle(one)
        prompts = [oracle.prompt(length, seed=3) for length in range(1, 20)]
        for layout in ("TP2 PCP2", "PP2 PCP2 DCP2 EP"):
            with ThreadLLM(folder, **ENGINE, **layout_options(layout)) as four:
                check(four, oracle, prompts, spread(len(prompts)))
