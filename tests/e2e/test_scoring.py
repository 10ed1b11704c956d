"""max_tokens=0: a prompt is scored, and nothing is generated."""

from __future__ import annotations

import pytest

from prefold import LLM, SamplingParams
from prefold.testing.reference import Case

LIMIT = 40
SCORE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    """Its blocks hold one token less than max_model_len: the last one is never computed."""
    return tiny.llm(max_model_len=LIMIT + 1, num_blocks=LIMIT // 4, max_num_batched_tokens=7)


@pytest.fixture(scope="module")
def case(tiny) -> Case:
    return tiny.cases([LIMIT + 1], num_tokens=1, seed=3)[0]


def test_every_length_up_to_max_model_len(llm: LLM, case: Case):
    (whole,) = llm.generate(case.prompt, SCORE)
    assert len(whole.prompt_logprobs) == LIMIT + 1 == llm.engine.config.scheduler.max_model_len
    pool = llm.engine.scheduler.kv.pool
    for length in range(1, LIMIT + 2):
        before = llm.engine.metrics.rank_tokens[0]
        (output,) = llm.generate(case.prompt[:length], SCORE)
        assert llm.engine.metrics.rank_tokens[0] - before == max(1, length - 1)
        (sample,) = output.outputs
        assert (sample.token_ids, sample.text, sample.finish_reason) == ([], "", "length")
        assert output.finished
        assert output.metrics.ttft_s is None
        assert output.prompt_token_ids == case.prompt[:length]
        assert output.prompt_logprobs[0] is None
        for ours, theirs in zip(output.prompt_logprobs[1:], whole.prompt_logprobs[1:length], strict=True):
            assert list(ours) == list(theirs)
            for token in theirs:
                assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
        assert pool.num_free_blocks == pool.num_blocks
    with pytest.raises(ValueError, match=r"42 prompt tokens \+ max_tokens=0 exceed max_model_len=41"):
        llm.generate([*case.prompt, 5], SCORE)


def test_the_scores_are_those_of_a_request_that_generates(llm: LLM, case: Case):
    prompt = case.prompt[:LIMIT]
    generating = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    expected = llm.generate(prompt, generating)[0].prompt_logprobs
    actual = llm.generate([prompt, prompt[:9]], SCORE)
    for output in actual:
        for ours, theirs in zip(output.prompt_logprobs[1:], expected[1:]):
            assert {t: p.logprob for t, p in ours.items()} == pytest.approx(
                {t: p.logprob for t, p in theirs.items()}, abs=1e-4
            )
    with pytest.raises(ValueError, match=r"41 prompt tokens \+ max_tokens=1"):
        llm.generate(case.prompt, generating)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 8, 9])
def test_without_logprobs_it_fills_the_prefix_cache(llm: LLM, case: Case, length: int):
    llm.engine.scheduler.reset_prefix_cache()
    warm = SamplingParams(max_tokens=0, n=2)
    for _ in range(2):
        (output,) = llm.generate(case.prompt[:length], warm)
        assert [s.finish_reason for s in output.outputs] == ["length"] * 2
        assert [s.token_ids for s in output.outputs] == [[], []]
    (output,) = llm.generate(case.prompt[:LIMIT], SamplingParams(temperature=0.0, max_tokens=1))
    assert output.metrics.num_cached_tokens == (length - 1) // 4 * 4
    llm.engine.scheduler.check_integrity()


def test_a_preempted_one_is_scored_again(llm: LLM, case: Case):
    expected = llm.generate(case.prompt, SCORE)[0].prompt_logprobs
    llm.engine.add_request("a", case.prompt, SCORE)
    for _ in range(3):
        llm.engine.step()
    assert llm.engine.scheduler.preempt("a")
    outputs = []
    while llm.engine.has_unfinished_requests:
        outputs = llm.engine.step()
    assert outputs[0].prompt_logprobs == expected
