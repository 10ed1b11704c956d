"""Scheduler: one test per rule. The workers are a lambda; what they must see is in test_scheduler_fuzz."""

import pytest

from prefold.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig
from prefold.engine.scheduler import Scheduler
from prefold.request import Request, RequestStatus, SamplingParams
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats

B = 4


def make(
    budget: int = 64,
    seqs: int = 8,
    blocks: int = 64,
    max_model_len: int = 200,
    caching: bool = True,
    **sizes: int,
) -> Scheduler:
    """`sizes`: of ParallelConfig. The scheduler does not look at the model."""
    limits, cache = SchedulerConfig(seqs, budget, max_model_len), CacheConfig(B, blocks, caching)
    return Scheduler(EngineConfig(None, ParallelConfig(**sizes), cache, limits, RuntimeConfig()))


def add(
    s: Scheduler, name: str, prompt: int | list[int], max_tokens: int = 8, eos=(), seed=0, **params
) -> Request:
    """Queue a request; an int makes a prompt of that length which shares nothing with others."""
    if isinstance(prompt, int):
        prompt = [ord(name[0]) * 1000 + i for i in range(prompt)]
    request = Request(name, prompt, SamplingParams(**params), max_tokens, eos_token_ids=eos, seed=seed)
    s.add_request(request)
    return request


def answer(s: Scheduler, out: SchedulerOutput, tokens: dict[str, list[int]] | None = None):
    """Complete the step: requests past their prefill get token 7, or those given."""
    sampled = {
        name: [7]
        for name in out.num_scheduled_tokens
        if name in s.requests and s.requests[name].num_computed_tokens == s.requests[name].num_tokens
    }
    sampled.update(tokens or {})
    return s.update_from_output(out, ModelRunnerOutput(out.step_id, sampled, {}, {}, StepStats([], [])))


def step(s: Scheduler, tokens: dict[str, list[int]] | None = None) -> SchedulerOutput:
    out = s.schedule()
    answer(s, out, tokens)
    s.check_integrity()
    return out


def drain(s: Scheduler, limit: int = 500) -> None:
    for _ in range(limit):
        if not s.has_unfinished_requests:
            break
        step(s)
    assert not s.has_unfinished_requests
    assert s.kv.usage == 0.0


# -------------------------------------------------------------------- batches


def test_life_of_a_request():
    s = make()
    r = add(s, "a", [1, 2, 3, 4, 5], max_tokens=3, eos=(9,), seed=11)
    assert s.has_unfinished_requests
    out = s.schedule()
    (new,) = out.new_requests
    assert (new.request_id, new.token_ids, new.seed) == ("a", [1, 2, 3, 4, 5], 11)
    assert (new.num_prompt_tokens, new.num_prefill_tokens, new.num_computed_tokens) == (5, 5, 0)
    assert (new.eos_token_ids, len(new.block_ids)) == ((9,), 2)
    assert out.num_scheduled_tokens == {"a": 5}
    assert answer(s, out) == [(r, [7])]
    out = step(s)
    (cached,) = out.cached_requests
    assert (cached.new_token_ids, cached.new_block_ids, cached.num_computed_tokens) == ([7], [], 5)
    assert out.num_scheduled_tokens == {"a": 1}
    out = step(s)
    assert out.cached_requests[0].num_computed_tokens == 6
    assert (r.status, r.output_token_ids, r.stop_reason) == (RequestStatus.FINISHED_LENGTH, [7, 7, 7], None)
    assert not s.has_unfinished_requests
    assert s.kv.usage == 0.0
    assert step(s).finished_request_ids == [], "an empty step may not be run: it tells nothing"
    add(s, "b", 1)
    assert [step(s).finished_request_ids for _ in range(2)] == [["a"], []]


def test_decode_gets_a_new_block_exactly_when_it_needs_one():
    s = make()
    add(s, "a", 3, max_tokens=2 * B)
    step(s)
    grown = [len(step(s).cached_requests[0].new_block_ids) for _ in range(2 * B - 1)]
    assert grown == [0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 33, 72])
@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 33, 73])
def test_prefill_is_cut_by_the_budget(budget: int, length: int):
    s = make(budget=budget)
    r = add(s, "a", length)
    chunks = []
    while r.num_output_tokens == 0:
        out = step(s)
        chunks.append(out.num_scheduled_tokens["a"])
        assert not any(c.new_token_ids for c in out.cached_requests)
    assert chunks == [budget] * (length // budget) + [length % budget] * (length % budget > 0)
    drain(s)


@pytest.mark.parametrize("pcp", [1, 2, 3, 8])
def test_budget_is_per_rank(pcp: int):
    s = make(budget=5, prefill_context_parallel_size=pcp)
    add(s, "a", 60)
    assert step(s).total_num_scheduled_tokens == 5 * pcp


def test_decode_tokens_count_and_come_before_prefills():
    s = make(budget=8)
    add(s, "a", 4)
    add(s, "b", 3)
    assert step(s).num_scheduled_tokens == {"a": 4, "b": 3}
    add(s, "c", 20)
    add(s, "d", 2)
    outs = [step(s).num_scheduled_tokens for _ in range(4)]
    assert outs == [
        {"a": 1, "b": 1, "c": 6},
        {"a": 1, "b": 1, "c": 6},
        {"a": 1, "b": 1, "c": 6},
        {"a": 1, "b": 1, "c": 2, "d": 2},
    ]
    assert list(outs[-1]) == ["a", "b", "c", "d"]


def test_at_most_max_num_seqs_run():
    s = make(seqs=2)
    for name in "abc":
        add(s, name, 4, max_tokens=3)
    assert [list(step(s).num_scheduled_tokens) for _ in range(4)] == [["a", "b"]] * 3 + [["c"]]


def test_nobody_overtakes_a_request_that_waits_for_blocks():
    s = make(blocks=6)
    add(s, "a", 3 * B, max_tokens=B)
    step(s)
    add(s, "big", 5 * B, max_tokens=2)
    add(s, "small", 1, max_tokens=1)
    outs = [list(step(s).num_scheduled_tokens) for _ in range(4)]
    assert outs == [["a"], ["a"], ["a"], ["big", "small"]]


def test_empty_step():
    out = make().schedule()
    assert (out.total_num_scheduled_tokens, out.new_requests, out.cached_requests) == (0, [], [])


# -------------------------------------------------------------------- prefix cache


def test_second_prompt_computes_only_its_own_part():
    s = make()
    a = add(s, "a", list(range(10)))
    step(s)
    b = add(s, "b", [*range(8), 50, 51])
    out = step(s)
    assert out.num_scheduled_tokens == {"a": 1, "b": 2}
    assert out.new_requests[0].num_computed_tokens == 8
    assert out.new_requests[0].block_ids[:2] == s.kv.block_ids(a)[:2]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    drain(s)


def test_equal_prompts_are_computed_once():
    """The second waits a step, and so does who is behind it: nobody overtakes."""
    s = make()
    prompt = list(range(9))
    a, b = add(s, "a", prompt), add(s, "b", prompt)
    add(s, "other", [50, 51])
    assert step(s).num_scheduled_tokens == {"a": 9}
    assert step(s).num_scheduled_tokens == {"a": 1, "b": 1, "other": 2}
    assert s.kv.block_ids(b)[:2] == s.kv.block_ids(a)[:2]
    assert b.num_cached_tokens == 8
    drain(s)


def test_who_shares_a_prompt_in_chunks_waits_for_it():
    s = make(budget=6)
    a, b = add(s, "a", list(range(17))), add(s, "b", [*range(16), 60, 61])
    steps = [step(s).num_scheduled_tokens for _ in range(4)]
    assert steps == [{"a": 6}, {"a": 6}, {"a": 5}, {"a": 1, "b": 2}]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 16)
    drain(s)


def test_nobody_waits_for_a_block_it_cannot_share():
    s = make()
    add(s, "a", list(range(B)))  # a whole block, but its last token's logits are needed
    add(s, "b", list(range(B)))
    assert step(s).num_scheduled_tokens == {"a": B, "b": B}


@pytest.mark.parametrize("length", range(1, 3 * B + 2))
def test_wholly_cached_prompt_computes_at_least_one_token(length: int):
    s = make()
    add(s, "a", list(range(length)), max_tokens=1)
    step(s)
    add(s, "b", list(range(length)), max_tokens=1)
    assert 1 <= step(s).num_scheduled_tokens["b"] <= B


def test_generated_blocks_are_found_too():
    s = make()
    a = add(s, "a", 3, max_tokens=10)
    drain(s)
    add(s, "b", [*a.all_token_ids, 1, 2])
    assert step(s).new_requests[0].num_computed_tokens == 12


def test_reset_prefix_cache():
    s = make()
    add(s, "a", list(range(9)), max_tokens=1)
    drain(s)
    s.reset_prefix_cache()
    add(s, "b", list(range(9)), max_tokens=1)
    assert step(s).new_requests[0].num_computed_tokens == 0


# -------------------------------------------------------------------- preemption


def test_last_admitted_yields_and_returns_with_all_its_tokens():
    s = make(blocks=4, caching=False)
    add(s, "a", 2 * B, max_tokens=2 * B)
    b = add(s, "b", B, max_tokens=2 * B)
    waiting = add(s, "c", 1, max_tokens=1)
    assert list(step(s).num_scheduled_tokens) == ["a", "b", "c"]
    assert waiting.status.is_finished
    out = step(s)  # a and b both want a block: one is left
    assert list(out.num_scheduled_tokens) == ["a"]
    assert out.finished_request_ids == ["c", "b"]
    assert (b.status, b.num_preemptions, b.num_computed_tokens) == (RequestStatus.PREEMPTED, 1, 0)
    add(s, "d", 1)
    while b.status is not RequestStatus.RUNNING:
        out = step(s)
    (new, behind) = out.new_requests
    assert (new.request_id, behind.request_id) == ("b", "d")
    assert (new.token_ids, new.num_prompt_tokens, new.num_prefill_tokens) == (b.all_token_ids[:5], B, B + 1)
    drain(s)
    assert b.num_output_tokens == 2 * B


def test_nothing_is_admitted_in_a_step_that_preempts():
    s = make(blocks=4)
    prompt = list(range(2 * B))
    add(s, "a", prompt, max_tokens=8)
    step(s)
    add(s, "b", prompt, max_tokens=8)
    assert step(s).num_scheduled_tokens == {"a": 1, "b": B}
    out = step(s)  # b lacks a block and yields, but could return at once on top of a's blocks
    assert list(out.num_scheduled_tokens) == ["a"]
    assert (out.finished_request_ids, out.new_requests) == (["b"], [])
    assert step(s).new_requests[0].num_computed_tokens == 2 * B


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("at", range(12))
def test_forced_preemption_at_any_step_keeps_the_output(at: int, budget: int, caching: bool):
    """Token i of the output is 100 + i, as if the model counted: it must count right through."""
    s = make(budget=budget, caching=caching)
    r = add(s, "a", 10, max_tokens=7)
    for i in range(40):
        if i == at:
            running = r.status is RequestStatus.RUNNING
            computed = r.num_computed_tokens
            assert s.preempt("a") is running
            s.check_integrity()
        if not s.has_unfinished_requests:
            break
        out = s.schedule()
        for new in out.new_requests:
            if r.num_preemptions:
                assert out.finished_request_ids == ["a"]
                assert new.num_prefill_tokens == len(new.token_ids) == r.num_tokens
                assert new.num_computed_tokens == (min(computed, r.num_tokens - 1) // B * B if caching else 0)
        done = r.num_computed_tokens == r.num_tokens
        answer(s, out, {"a": [100 + r.num_output_tokens]} if done else None)
    assert r.output_token_ids == [100 + i for i in range(7)]
    assert r.status is RequestStatus.FINISHED_LENGTH
    assert s.kv.usage == 0.0


def test_preempting_what_does_not_run():
    s = make()
    add(s, "a", 3)
    assert s.preempt("a") is False
    assert s.preempt("unknown") is False
    out = s.schedule()
    assert s.preempt("a") is False, "it is in flight"
    answer(s, out)
    assert s.preempt("a") is True


def test_preempted_goes_to_the_front():
    s = make(seqs=2)
    for name in "abc":
        add(s, name, 4)
    step(s)
    s.preempt("a")
    s.preempt("b")
    assert [r.request_id for r in s.waiting] == ["b", "a", "c"]


def test_resumed_request_keeps_its_first_hit_count():
    s = make()
    r = add(s, "a", 9)
    step(s)
    s.preempt("a")
    assert step(s).new_requests[0].num_computed_tokens == 8
    assert r.num_cached_tokens == 0


def test_prompt_logprobs_are_recomputed_after_preemption():
    s = make()
    add(s, "a", 9, prompt_logprobs=1)
    step(s)
    s.preempt("a")
    assert step(s).new_requests[0].num_computed_tokens == 0


# -------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("params", "eos", "sampled", "output", "status", "reason"),
    [
        ({}, (9,), [1, 9], [1, 9], "stop", None),
        ({}, (8, 9), [8], [8], "stop", None),
        ({"ignore_eos": True}, (9,), [9, 9, 1, 1], [9, 9, 1, 1], "length", None),
        ({"stop_token_ids": [5]}, (9,), [1, 5], [1, 5], "stop", 5),
        ({"stop_token_ids": [9], "ignore_eos": True}, (9,), [1, 9], [1, 9], "stop", 9),
        ({"stop_token_ids": [5], "min_tokens": 3}, (9,), [5, 9, 5], [5, 9, 5], "stop", 5),
        ({"min_tokens": 4}, (9,), [9, 9, 9, 9], [9, 9, 9, 9], "stop", None),
        ({}, (), [1, 2, 3, 4], [1, 2, 3, 4], "length", None),
    ],
)
def test_stop_conditions(params, eos, sampled, output, status, reason):
    s = make()
    r = add(s, "a", 3, max_tokens=4, eos=eos, **params)
    for token_id in sampled:
        assert not r.status.is_finished
        step(s, {"a": [token_id]})
    assert (r.output_token_ids, r.status.value, r.stop_reason) == (output, status, reason)
    assert not s.has_unfinished_requests


def test_tokens_sampled_beyond_the_end_are_cut():
    s = make()
    r = add(s, "a", 3, max_tokens=4, eos=(9,))
    out = s.schedule()
    assert answer(s, out, {"a": [1, 9, 2]}) == [(r, [1, 9])]
    assert r.output_token_ids == [1, 9]


def test_max_model_len_ends_a_request_even_without_max_tokens_left():
    s = make(max_model_len=10)
    r = add(s, "a", 7, max_tokens=100)
    drain(s)
    assert (r.num_tokens, r.status) == (10, RequestStatus.FINISHED_LENGTH)


def test_finish_from_outside_frees_at_once_between_steps():
    s = make()
    r = add(s, "a", 9)
    step(s)
    assert s.finish_requests(["a", "unknown"], RequestStatus.FINISHED_STOPPED, "\n\n") == [r]
    assert (r.status.value, r.stop_reason, s.kv.usage) == ("stop", "\n\n", 0.0)
    add(s, "b", 1)
    assert step(s).finished_request_ids == ["a"]


# -------------------------------------------------------------------- abort


def test_abort_waiting_is_no_news_for_the_workers():
    s = make()
    r = add(s, "a", 9)
    assert s.abort_request("a") is r
    assert s.abort_request("a") is None
    assert r.status is RequestStatus.FINISHED_ABORTED
    assert step(s).finished_request_ids == []


def test_abort_of_a_preempted_request_is_told_once():
    s = make()
    add(s, "a", 9)
    step(s)
    s.preempt("a")
    s.abort_request("a")
    add(s, "b", 1)
    assert [step(s).finished_request_ids for _ in range(2)] == [["a"], []]


@pytest.mark.parametrize("budget", [4, 64])
def test_abort_in_flight_ignores_output_and_frees_after_the_step(budget: int):
    s = make(budget=budget)
    r, other = add(s, "a", 4), add(s, "b", 9)
    step(s)
    out = s.schedule()
    used = s.kv.usage
    s.abort_requests(["a"])
    s.check_integrity()
    assert s.kv.usage == used
    events = answer(s, out, {"a": [3]})
    s.check_integrity()
    assert [request for request, _ in events] == ([other] if budget == 64 else [])
    assert r.num_output_tokens == 1
    assert s.kv.usage < used
    assert step(s).finished_request_ids == ["a"]
    drain(s)


def test_id_of_a_request_aborted_in_flight_may_be_used_again():
    s = make()
    add(s, "a", 4)
    out = s.schedule()
    s.abort_request("a")
    again = add(s, "a", 6)
    s.check_integrity()
    assert answer(s, out, {"a": [3]}) == []
    assert again.num_output_tokens == 0
    out = step(s)
    assert out.finished_request_ids == ["a"]
    assert [new.token_ids for new in out.new_requests] == [again.all_token_ids[:6]]


# -------------------------------------------------------------------- bad input and misuse


def test_request_that_can_never_fit_is_refused_with_numbers():
    s = make(blocks=5, max_model_len=100)
    add(s, "fits", 13, max_tokens=8)  # 20 slots: the last token needs none
    message = r"may need 21 tokens .*14 prompt tokens, max_tokens=8.*6 blocks of 4 tokens.*has 5.*num_blocks"
    with pytest.raises(ValueError, match=message):
        add(s, "a", 14, max_tokens=8)
    drain(s)


def test_max_model_len_bounds_the_need_for_blocks():
    s = make(blocks=5, max_model_len=21)
    add(s, "a", 3, max_tokens=1000)
    drain(s)


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (0, 1, "'a' has an empty prompt"),
        (1, -1, "max_tokens=-1"),
        (10, 1, "the prompt has 10 tokens.*max_model_len=10"),
    ],
)
def test_bad_requests(length: int, max_tokens: int, message: str):
    s = make(max_model_len=10)
    with pytest.raises(ValueError, match=message):
        add(s, "a", length, max_tokens)
    assert not s.has_unfinished_requests
    add(s, "a", 9, 1)


def test_ids_are_unique_among_the_living():
    s = make()
    add(s, "a", 3, max_tokens=1)
    with pytest.raises(ValueError, match="'a' is in use"):
        add(s, "a", 3)
    drain(s)
    add(s, "a", 3)


@pytest.mark.parametrize("limit", ["seqs", "budget", "max_model_len"])
def test_limits_below_one_are_refused(limit: str):
    with pytest.raises(ValueError, match=r"max_.*=0 must be at least 1"):
        make(**{limit: 0})


def test_steps_alternate():
    s = make()
    add(s, "a", 3)
    out = s.schedule()
    with pytest.raises(AssertionError, match="before the last step's"):
        s.schedule()
    wrong = ModelRunnerOutput(out.step_id + 1, {"a": [1]}, {}, {}, StepStats([], []))
    with pytest.raises(AssertionError, match="mixed up"):
        s.update_from_output(out, wrong)
    with pytest.raises(AssertionError, match="no token was sampled"):
        s.update_from_output(out, ModelRunnerOutput(out.step_id, {}, {}, {}, StepStats([], [])))
