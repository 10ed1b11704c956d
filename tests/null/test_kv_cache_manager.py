"""KVCacheManager: cached prefixes, all-or-nothing allocation, what may be found when."""

import pytest

from prefold.engine import kv_cache_manager
from prefold.engine.kv_cache_manager import KVCacheManager
from prefold.request import Request, SamplingParams

B = 4


def request(tokens: list[int], name: str = "r", **params) -> Request:
    return Request(name, tokens, SamplingParams(**params), max_tokens=8)


def compute(kv: KVCacheManager, r: Request) -> int:
    """Admit a request and compute all its tokens in one step; tokens found in the cache."""
    num_cached = kv.admit(r)
    assert num_cached is not None
    r.num_computed_tokens = r.num_tokens
    kv.cache_full_blocks([r])
    return num_cached


def cached_after(prompt: list[int], second: list[int], **params) -> int:
    """Tokens of `second` that are found after `prompt` was computed and its request has gone."""
    kv = KVCacheManager(32, B, True)
    first = request(prompt)
    compute(kv, first)
    kv.free(first)
    again = request(second, **params)
    num_cached = kv.admit(again)
    assert num_cached is not None
    kv.check_integrity([again])
    return num_cached


@pytest.mark.parametrize("length", range(1, 4 * B + 3))
def test_equal_prompt_hits_whole_blocks_and_leaves_a_token_to_compute(length: int):
    prompt = list(range(length))
    num_cached = cached_after(prompt, prompt)
    assert num_cached % B == 0
    assert length - B <= num_cached < length


@pytest.mark.parametrize("common", [0, 1, B - 1, B, B + 1, 2 * B, 3 * B - 1, 3 * B])
def test_common_prefix_hits_only_its_whole_blocks(common: int):
    first = list(range(3 * B + 1))
    second = first[:common] + [99] * (4 * B - common)
    assert cached_after(first, second) == common // B * B


def test_prompt_logprobs_need_every_position():
    prompt = list(range(3 * B))
    assert cached_after(prompt, prompt) == 2 * B
    assert cached_after(prompt, prompt, prompt_logprobs=0) == 0


def test_blocks_of_a_prompt_logprobs_request_serve_others():
    kv = KVCacheManager(32, B, True)
    compute(kv, request(list(range(9)), prompt_logprobs=1))
    assert compute(kv, request(list(range(9)), "s")) == 2 * B


def test_disabled_cache_finds_nothing():
    kv = KVCacheManager(32, B, False)
    prompt = list(range(3 * B))
    assert [compute(kv, request(prompt, "a")), compute(kv, request(prompt, "b"))] == [0, 0]


@pytest.mark.parametrize("length", range(1, 3 * B + 2))
def test_blocks_being_written_are_the_next_ones_of_an_equal_prompt(length: int):
    """What the scheduler compares to let the second prompt wait for the first."""
    kv, tokens = KVCacheManager(32, B, True), list(range(length))
    first, second = request(tokens, "a"), request(tokens, "b")
    kv.admit(first)
    first.num_computed_tokens = length
    being_written = kv.hashes_being_written(first)
    assert len(being_written) == length // B
    shareable = (length - 1) // B
    assert kv.next_block_hash(second) == (being_written[0] if shareable else None)
    kv.cache_full_blocks([first])
    assert kv.hashes_being_written(first) == []
    assert kv.next_block_hash(second) is None
    assert len(kv.find_cached_prefix(second)) == shareable


def test_who_may_not_share_has_no_next_block():
    prompt = list(range(3 * B))
    assert KVCacheManager(32, B, False).next_block_hash(request(prompt)) is None
    assert KVCacheManager(32, B, True).next_block_hash(request(prompt, prompt_logprobs=0)) is None


def test_block_is_found_only_once_it_is_computed():
    kv = KVCacheManager(32, B, True)
    first, second = request(list(range(3 * B + 1)), "a"), request(list(range(3 * B + 1)), "b")
    kv.admit(first)
    table, before = kv.block_ids(first), 0
    for computed, found in [(B - 1, 0), (B, 1), (2 * B + 1, 2), (3 * B + 1, 3)]:
        first.num_computed_tokens = computed
        assert kv.find_cached_prefix(second) == table[:before]
        kv.cache_full_blocks([first])
        assert kv.find_cached_prefix(second) == table[:found]
        before = found


def test_sharing_counts_blocks_once():
    kv = KVCacheManager(5, B, True)
    prompt = list(range(3 * B + 1))
    a, b = request(prompt, "a"), request(prompt, "b")
    compute(kv, a)
    assert compute(kv, b) == 3 * B
    assert kv.block_ids(a)[:3] == kv.block_ids(b)[:3]
    assert kv.usage == 1.0
    kv.check_integrity([a, b])
    kv.free(a)
    kv.check_integrity([b])
    assert kv.pool.num_free_blocks == 1
    kv.free(b)
    kv.check_integrity([])
    assert kv.usage == 0.0


def test_admission_is_all_or_nothing():
    kv = KVCacheManager(4, B, True)
    a = request(list(range(2 * B)), "a")
    compute(kv, a)
    big = request(list(range(100, 100 + 3 * B)), "b")
    assert kv.admit(big) is None
    assert kv.block_ids(big) == []
    kv.check_integrity([a, big])
    kv.free(a)
    assert kv.admit(big) == 0


def test_free_blocks_of_the_hit_itself_are_not_counted_as_room():
    # 4 blocks: 2 are cached and free, 1 is free, 1 is in use. Hit 2 + 2 new does not fit.
    kv = KVCacheManager(4, B, True)
    a, other = request(list(range(2 * B)), "a"), request([7], "other")
    compute(kv, a)
    kv.admit(other)
    kv.free(a)
    assert kv.pool.num_free_blocks == 3
    b = request(list(range(4 * B)), "b")
    assert kv.admit(b) is None
    kv.check_integrity([b, other])
    assert kv.admit(request(list(range(3 * B)), "c")) == 2 * B


@pytest.mark.parametrize("start", range(1, 2 * B + 2))
@pytest.mark.parametrize("more", range(1, 2 * B + 2))
def test_allocate_extends_to_the_asked_length(start: int, more: int):
    kv = KVCacheManager(5, B, True)
    r = request(list(range(start)))
    kv.admit(r)
    before = kv.block_ids(r)
    new = kv.allocate(r, start + more)
    assert new is not None
    assert kv.block_ids(r) == before + new
    assert len(before + new) == kv.blocks_for(start + more)
    assert kv.allocate(r, 5 * B + 1) is None
    assert kv.block_ids(r) == before + new


def test_tail_is_evicted_before_the_head():
    kv = KVCacheManager(4, B, True)
    a = request(list(range(3 * B)), "a")
    compute(kv, a)
    kv.free(a)
    b = request([50] * (B + 1), "b")
    kv.admit(b)
    kv.free(b)
    assert len(kv.find_cached_prefix(request(list(range(4 * B)), "c"))) == 2


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    calls = []
    original = kv_cache_manager.hash_block
    monkeypatch.setattr(
        kv_cache_manager, "hash_block", lambda parent, tokens: calls.append(1) or original(parent, tokens)
    )
    kv = KVCacheManager(8, B, True)
    r = request(list(range(3 * B)))
    for _ in range(3):
        kv.find_cached_prefix(r)
        compute(kv, r)
        kv.free(r)
        r.num_computed_tokens = 0
    assert len(calls) == 3


def test_preempted_request_finds_its_own_blocks():
    kv = KVCacheManager(8, B, True)
    r = request(list(range(3 * B + 1)))
    compute(kv, r)
    kv.free(r)
    r.num_computed_tokens = 0
    kv.check_integrity([r])
    assert kv.admit(r) == 3 * B


def test_reset_drops_old_context_for_good():
    kv = KVCacheManager(16, B, True)
    a = request(list(range(2 * B)), "a")
    compute(kv, a)
    kv.reset_prefix_cache()
    probe = request(list(range(4 * B)), "probe")
    assert kv.find_cached_prefix(probe) == []
    # The first block is computed anew by someone else: the old request's next block must not chain to it.
    a.all_token_ids += range(2 * B, 3 * B)
    kv.allocate(a, 3 * B)
    a.num_computed_tokens = 3 * B
    kv.cache_full_blocks([a])
    compute(kv, request(list(range(2 * B)), "b"))
    assert len(kv.find_cached_prefix(probe)) == 2
    kv.free(a)
    a.num_computed_tokens = 0
    assert compute(kv, a) == 2 * B, "after a preemption it computes anew and shares again"
    assert len(kv.find_cached_prefix(probe)) == 3


def test_distrusted_blocks_are_found_by_nobody():
    kv = KVCacheManager(32, B, True)
    first, bad = request(list(range(2 * B))), request(list(range(3 * B)), "bad")
    compute(kv, first)
    assert compute(kv, bad) == 2 * B
    kv.distrust(bad)
    kv.check_integrity([first, bad])
    kv.free(bad)
    kv.check_integrity([first])
    again = request(list(range(3 * B)), "again")
    assert compute(kv, again) == 0
    kv.check_integrity([first, again])
    assert len(kv.find_cached_prefix(request(list(range(3 * B + 1)), "probe"))) == 3
    kv.distrust(request([1], "unknown"))


def test_statistics_count_admitted_requests():
    kv = KVCacheManager(6, B, True)
    a = request(list(range(2 * B)), "a")
    assert kv.prefix_cache_stats.hit_rate == 0.0
    compute(kv, a)
    compute(kv, request(list(range(3 * B)), "b"))
    assert kv.admit(request(list(range(100, 100 + 6 * B)), "c")) is None
    stats = kv.prefix_cache_stats
    assert (stats.num_requests, stats.num_query_tokens, stats.num_hit_tokens) == (2, 5 * B, 2 * B)
    assert stats.hit_rate == pytest.approx(0.4)


def test_check_integrity_names_requests_that_are_gone():
    kv = KVCacheManager(4, B, True)
    a = request([1, 2], "a")
    kv.admit(a)
    with pytest.raises(AssertionError, match=r"gone.*'a'"):
        kv.check_integrity([])
