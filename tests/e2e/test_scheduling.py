"""Whatever the scheduler does with a request, its tokens are those of transformers.

Chunked prefill, prefix hits, preemption at every step, requests that come and go. The expected
tokens come from `tiny.cases`; books are checked after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from prefold import LLM, SamplingParams
from prefold.request import RequestOutput
from prefold.testing.reference import Case

BUDGETS = [1, 2, 7, 16, 33, 72]
LENGTHS = [1, 2, 7, 15, 16, 17, 40, 101]


def greedy(num_tokens: int = 16, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected(cases: Sequence[Case]) -> list[list[int]]:
    return [case.tokens for case in cases]


def step_through(
    llm: LLM,
    cases: Sequence[Case],
    arrivals: Sequence[int] | None = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> dict[str, RequestOutput]:
    """Request i = cases[i] arrives before step `arrivals[i]`; checks all books after every step."""
    engine, outputs, step = llm.engine, {}, 0
    coming = sorted(enumerate(arrivals or [0] * len(cases)), key=lambda item: item[1])
    while coming or engine.has_unfinished_requests:
        while coming and coming[0][1] <= step:
            i, _ = coming.pop(0)
            engine.add_request(str(i), cases[i].prompt, greedy(len(cases[i].tokens)), stream=False)
        if engine.has_unfinished_requests:
            outputs |= {output.request_id: output for output in engine.step()}
            engine.scheduler.check_integrity()
            after_step(step)
            engine.scheduler.check_integrity()
        step += 1
    pool = engine.scheduler.kv.pool
    assert pool.num_free_blocks == pool.num_blocks
    return outputs


def assert_as_expected(outputs: Mapping[str, RequestOutput], cases: Sequence[Case]) -> None:
    assert {i: o.outputs[0].token_ids for i, o in outputs.items()} == {
        str(i): case.tokens for i, case in enumerate(cases)
    }


# ---------------------------------------------------------------- chunked prefill


@pytest.fixture(scope="module")
def cases(tiny) -> list[Case]:
    return tiny.cases(LENGTHS)


@pytest.fixture(scope="module")
def whole_logprobs(tiny, cases: list[Case]) -> list[list[float]]:
    """Per case, the log-probability of each prompt token, from a prefill in one step."""
    llm = tiny.llm(max_num_batched_tokens=1000, debug_poison=False)
    return [prompt_logprobs(output) for output in llm.generate(prompts(cases), greedy(prompt_logprobs=0))]


def prompts(cases: Sequence[Case]) -> list[list[int]]:
    return [case.prompt for case in cases]


def prompt_logprobs(output: RequestOutput) -> list[float]:
    entries = output.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(output.prompt_token_ids)
    return [entry[token].logprob for entry, token in zip(entries[1:], output.prompt_token_ids[1:]) if entry]


@pytest.mark.parametrize("budget", BUDGETS)
def test_chunked_prefill(tiny, cases: list[Case], whole_logprobs: list[list[float]], budget: int):
    llm = tiny.llm(max_num_batched_tokens=budget, enable_prefix_caching=False)
    outputs = llm.generate(prompts(cases), greedy(prompt_logprobs=0))
    assert tokens_of(outputs) == expected(cases)
    for output, whole in zip(outputs, whole_logprobs, strict=True):
        assert prompt_logprobs(output) == pytest.approx(whole, abs=1e-4)
    if budget > 2:
        # Alone, the chunks end at multiples of the budget.
        for case in cases[-2:]:
            before = llm.engine.metrics.num_steps
            assert tokens_of(llm.generate(case.prompt, greedy())) == [case.tokens]
            assert llm.engine.metrics.num_steps - before == -(-len(case.prompt) // budget) + 15


# ---------------------------------------------------------------- prefix hits


def continuing(shared: list[int], tail: int, differs_from: int | None):
    """Draws a prompt that begins with `shared` and goes on with `tail` other tokens."""

    def draw(rng: random.Random) -> list[int]:
        rest = [rng.randrange(320) for _ in range(tail)]
        if rest and rest[0] == differs_from:
            rest[0] = (rest[0] + 1) % 320
        return shared + rest

    return draw


@pytest.mark.parametrize(("block_size", "budget"), [(1, 3), (2, 1000), (4, 3), (4, 1000), (16, 1000)])
def test_prefix_hits(tiny, block_size: int, budget: int):
    size, num_tokens = block_size, 8
    first, aligned = tiny.cases([5 * size + 3, 4 * size], num_tokens=num_tokens, seed=block_size)
    lengths = sorted({1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size} - {0})
    shared = [(n, tail) for n in lengths for tail in (1, size, 2 * size + 1)]
    draws = [continuing(first.prompt[:n], tail, first.prompt[n]) for n, tail in shared]
    # A second turn: prompt, answer, and then more; and a prompt cut short inside the first.
    draws += [continuing(first.prompt + first.tokens, 3, None), continuing(first.prompt[:-1], 0, None)]
    shared += [(len(first.prompt) + num_tokens - 1, 4), (len(first.prompt) - 1, 0)]
    later = tiny.cases(draws, num_tokens=num_tokens, seed=block_size)

    for together in (False, True):
        llm = tiny.llm(block_size=size, max_num_batched_tokens=budget)
        for case in (first, aligned):
            outputs = llm.generate([case.prompt], greedy(num_tokens))
            assert tokens_of(outputs) == [case.tokens]
            assert outputs[0].metrics.num_cached_tokens == 0
        batches = [later] if together else [[case] for case in later]
        outputs = [o for batch in batches for o in llm.generate(prompts(batch), greedy(num_tokens))]
        assert tokens_of(outputs) == expected(later)
        for (num_shared, _), case, output in zip(shared, later, outputs, strict=True):
            # Whole blocks only, and the last token is always computed.
            hit = min(num_shared, len(case.prompt) - 1) // size * size
            if together:
                assert output.metrics.num_cached_tokens >= hit
            else:
                assert output.metrics.num_cached_tokens == hit
        # The whole prompt is cached, with and without a token beyond the last full block.
        for case in (first, aligned):
            (output,) = llm.generate(case.prompt, greedy(num_tokens))
            assert output.outputs[0].token_ids == case.tokens
            assert output.metrics.num_cached_tokens == (len(case.prompt) - 1) // size * size
        llm.engine.scheduler.check_integrity()


def test_prompt_logprobs_do_not_use_the_cache(tiny, cases: list[Case], whole_logprobs: list[list[float]]):
    llm = tiny.llm()
    for _ in range(2):
        (output,) = llm.generate(cases[-1].prompt, greedy(prompt_logprobs=0))
        assert output.metrics.num_cached_tokens == 0
        assert prompt_logprobs(output) == pytest.approx(whole_logprobs[-1], abs=1e-4)
    (output,) = llm.generate(cases[-1].prompt, greedy())
    assert output.metrics.num_cached_tokens == 100


# ---------------------------------------------------------------- preemption


@pytest.fixture(scope="module")
def pair(tiny) -> list[Case]:
    """With a budget of 5 the first takes 3 steps of prefill, the second ends its own in the middle of one."""
    return tiny.cases([13, 9], num_tokens=6, seed=3)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("victims", [("0",), ("1",), ("0", "1")], ids=str)
def test_preemption_at_every_step(tiny, pair: list[Case], prefix_caching: bool, victims: tuple[str, ...]):
    """Each run preempts once, after another step; the last prefill step and all decode steps included."""
    llm = tiny.llm(max_num_batched_tokens=5, enable_prefix_caching=prefix_caching)
    scheduler = llm.engine.scheduler
    preempted_after: set[str] = set()
    for at in range(100):
        scheduler.reset_prefix_cache()
        before = llm.engine.metrics.num_steps
        hit: list[str] = []

        def preempt(step: int, at: int = at, hit: list[str] = hit) -> None:
            if step == at:
                hit += [victim for victim in victims if scheduler.preempt(victim)]

        outputs = step_through(llm, pair, after_step=preempt)
        assert_as_expected(outputs, pair)
        assert {i: o.metrics.num_preemptions for i, o in outputs.items()} == {
            i: int(i in hit) for i in outputs
        }
        preempted_after.update(f"{victim} after step {at}" for victim in hit)
        if at >= llm.engine.metrics.num_steps - before:
            break
    # Request 0 runs from step 0, ends its prefill in step 2 and its 6 tokens in step 7.
    if "0" in victims:
        assert {f"0 after step {at}" for at in range(7)} <= preempted_after
    if "1" in victims:
        assert {f"1 after step {at}" for at in range(2, 9)} <= preempted_after


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_after_every_step_of_one_run(tiny, prefix_caching: bool):
    cases = tiny.cases([1, 6, 21, 40], num_tokens=8, seed=4)
    llm = tiny.llm(enable_prefix_caching=prefix_caching)
    scheduler = llm.engine.scheduler

    def preempt_all(step: int) -> None:
        for request in list(scheduler.running):
            scheduler.preempt(request.request_id)

    outputs = step_through(llm, cases, after_step=preempt_all)
    assert_as_expected(outputs, cases)
    assert {output.metrics.num_preemptions for output in outputs.values()} == {7}


def test_preempted_request_keeps_its_logprobs(tiny, pair: list[Case]):
    params = greedy(6, prompt_logprobs=2, logprobs=2)
    llm = tiny.llm(max_num_batched_tokens=5)
    (alone,) = llm.generate(pair[0].prompt, params)
    for at in range(8):
        llm.engine.add_request("again", pair[0].prompt, params, stream=False)
        for step in range(100):
            outputs = llm.engine.step()
            if outputs:
                break
            if step == at:
                assert llm.engine.scheduler.preempt("again")
        for ours, theirs in (
            (outputs[0].prompt_logprobs, alone.prompt_logprobs),
            (outputs[0].outputs[0].logprobs, alone.outputs[0].logprobs),
        ):
            assert len(ours) == len(theirs)
            for entry, other in zip(ours, theirs):
                assert (entry and list(entry)) == (other and list(other))
                assert [p.logprob for p in (entry or {}).values()] == pytest.approx(
                    [p.logprob for p in (other or {}).values()], abs=1e-4
                )


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [6, 1000])
def test_a_pool_too_small_for_all(tiny, prefix_caching: bool, budget: int):
    cases = tiny.cases([5, 12, 1, 8, 7, 11, 4, 9], seed=5)
    llm = tiny.llm(
        num_blocks=12,
        max_model_len=49,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
    )
    outputs = step_through(llm, cases)
    assert_as_expected(outputs, cases)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 3


# ---------------------------------------------------------------- requests come and go


@pytest.mark.parametrize("name", ["v2", "v3", "glm"])
@pytest.mark.parametrize("budget", [16, 1000])
def test_prefill_and_decode_of_eight_requests_mix(tiny, name: str, budget: int):
    cases = tiny.cases([1, 30, 7, 64, 2, 16, 40, 5], name, seed=6)
    llm = tiny.llm(name, max_num_batched_tokens=budget)
    outputs = step_through(llm, cases, arrivals=[0, 0, 1, 3, 3, 4, 8, 12])
    assert_as_expected(outputs, cases)
    for case in cases:
        llm.engine.scheduler.reset_prefix_cache()
        assert tokens_of(llm.generate(case.prompt, greedy())) == [case.tokens]


def test_seats_are_used_again(tiny):
    """More requests than max_num_seqs: rows of the request states change hands."""
    cases = tiny.cases([9, 1, 20, 3, 14, 2, 6, 5], num_tokens=5, seed=7)
    llm = tiny.llm(max_num_seqs=2, max_num_batched_tokens=8)
    assert_as_expected(step_through(llm, cases), cases)


def test_abort_at_every_step_leaves_the_others_alone(tiny, pair: list[Case]):
    llm = tiny.llm(max_num_batched_tokens=5)
    for at in range(8):
        llm.engine.scheduler.reset_prefix_cache()
        aborted: list[RequestOutput | None] = []

        def abort(step: int, at: int = at, aborted: list = aborted) -> None:
            if step == at:
                aborted.append(llm.engine.abort_request("0"))

        outputs = step_through(llm, pair, after_step=abort)
        (output,) = aborted
        if output is None:
            assert outputs["0"].outputs[0].token_ids == pair[0].tokens
        else:
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids == pair[0].tokens[: max(0, at - 1)]
            assert "0" not in outputs
        assert outputs["1"].outputs[0].token_ids == pair[1].tokens
