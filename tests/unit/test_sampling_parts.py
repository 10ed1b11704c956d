"""Thresholds, noise and log-probabilities by themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.sampling.filters import filter_thresholds
from prefold.sampling.largest import first_largest, largest_values, sorted_values
from prefold.sampling.logprobs import compute_logprobs
from prefold.sampling.random_draw import draw_key, exponential_noise, race

torch.set_num_threads(1)


def thresholds(logits, min_p=0.0, top_k=0, top_p=1.0, **kwargs):
    logits = torch.as_tensor(np.asarray(logits, dtype=np.float32))
    n = len(logits)
    return filter_thresholds(
        logits,
        torch.full((n,), min_p, dtype=torch.float32),
        torch.full((n,), top_k, dtype=torch.int64),
        torch.full((n,), top_p, dtype=torch.float64),
        **kwargs,
    ).numpy()


def kept(logits, **kwargs):
    logits = np.asarray(logits, dtype=np.float32)
    return [np.flatnonzero(row >= t).tolist() for row, t in zip(logits, thresholds(logits, **kwargs))]


def test_top_k_counts_and_ties():
    row = [[0.0, -1.0, -1.0, -3.0, -2.0]]
    everything = [[0, 1, 2, 3, 4]]
    expected = {-1: everything, 0: everything, 1: [[0]], 2: [[0, 1, 2]], 3: [[0, 1, 2]], 4: [[0, 1, 2, 4]]}
    for top_k, tokens in (expected | {5: everything, 6: everything, 1000: everything}).items():
        assert kept(row, top_k=top_k) == tokens, top_k


def test_top_p_boundaries_and_ties():
    row = np.log([[0.4, 0.25, 0.2, 0.1, 0.05]]) - np.log(0.4)
    for top_p, count in [
        (1e-12, 1),
        (0.39, 1),
        (0.41, 2),
        (0.64, 2),
        (0.66, 3),
        (0.86, 4),
        (0.96, 5),
        (1.0, 5),
    ]:
        assert kept(row, top_p=top_p) == [list(range(count))], top_p
    assert kept([[0.0] * 6], top_p=1e-12) == [list(range(6))]
    assert kept([[0.0, -1.0, -1.0, -9.0]], top_p=0.7) == [[0, 1, 2]]


def test_top_p_sees_what_min_p_and_top_k_left():
    row = np.log([[0.4, 0.25, 0.2, 0.1, 0.05]]) - np.log(0.4)
    assert kept(row, top_k=2, top_p=0.6) == [[0]]  # 0.4 / 0.65 reaches 0.6
    assert kept(row, top_k=2, top_p=0.62) == [[0, 1]]
    assert kept(row, min_p=0.45, top_p=0.75) == [[0, 1]]  # 0.65 / 0.85 reaches 0.75
    assert kept(row, min_p=0.45, top_p=0.77) == [[0, 1, 2]]


def test_min_p_one_keeps_only_the_likeliest():
    assert kept([[0.0, -1e-6, 0.0, -5.0]], min_p=1.0) == [[0, 2]]


@settings(max_examples=100)
@given(data=st.data())
def test_the_number_of_candidates_changes_nothing(data):
    vocab_size = data.draw(st.integers(1, 40))
    grid = st.lists(st.integers(-12, 0), min_size=vocab_size, max_size=vocab_size)
    logits = np.array(data.draw(st.lists(grid, min_size=1, max_size=4)), dtype=np.float32) / 2
    logits -= logits.max(axis=1, keepdims=True)
    filters = {
        "min_p": data.draw(st.sampled_from([0.0, 0.1, 0.6])),
        "top_k": data.draw(st.integers(-1, vocab_size + 2)),
        "top_p": data.draw(st.floats(1e-6, 1.0)),
    }
    expected = thresholds(logits, **filters, num_candidates=vocab_size)
    for num_candidates in (1, 2, 5, 1000):
        assert (thresholds(logits, **filters, num_candidates=num_candidates) == expected).all()


def test_a_flat_distribution_falls_back_to_the_whole_vocabulary():
    row = -np.arange(1000, dtype=np.float32)[None] * 1e-4
    mass = np.exp(row[0].astype(np.float64)).cumsum()
    for top_p in (0.3, 0.9, 0.999):
        expected = int(np.searchsorted(mass, top_p * mass[-1])) + 1
        assert kept(row, top_p=top_p, num_candidates=64) == [list(range(expected))]


def test_noise_is_exponential_also_in_its_tails():
    key = torch.tensor([[draw_key(seed, 0)] for seed in range(50)])
    noise = exponential_noise(key, torch.arange(20_000)).double().numpy()
    assert noise.min() > 0.0
    for threshold in (1e-4, 1e-2, 0.5, 1.0, 3.0, 8.0):
        expected = noise.size * (1 - np.exp(-threshold))
        spread = np.sqrt(expected * np.exp(-threshold))
        assert abs((noise < threshold).sum() - expected) < 5 * spread, threshold
    smallest = noise.min(axis=1) * noise.shape[1]  # again Exp(1): the race over equal tokens
    assert 0.6 < smallest.mean() < 1.5


def test_a_race_is_the_same_when_few_tokens_are_left():
    """Noise belongs to the token id, so that leaving out the others changes nothing."""
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(0))
    seeds, steps = list(range(6)), [2] * 6
    allowed = torch.zeros(400, dtype=torch.bool)
    allowed[::50] = True
    sparse = race(logits.masked_fill(~allowed, -torch.inf), seeds, steps)
    dense = race(torch.where(allowed, logits, logits - 1e4), seeds, steps)
    assert torch.equal(sparse, dense)
    assert allowed[sparse].all()


def test_seeds_beyond_64_bits_and_negative_ones_are_taken_modulo():
    assert draw_key(-1, 0) == draw_key(2**64 - 1, 0)
    assert draw_key(2**64 + 5, 3) == draw_key(5, 3)
    assert len({draw_key(seed, step) for seed in range(30) for step in range(30)}) == 900


@settings(max_examples=100)
@given(data=st.data())
def test_logprobs_and_ranks(data):
    vocab_size = data.draw(st.integers(1, 12))
    m = data.draw(st.integers(0, 7))
    grid = st.lists(st.integers(-4, 4), min_size=vocab_size, max_size=vocab_size)
    logits = np.array([data.draw(grid) for _ in range(m)], dtype=np.float32).reshape(m, vocab_size)
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=m, max_size=m))
    k = data.draw(st.integers(0, vocab_size + 2))
    chunk = data.draw(st.sampled_from([1, vocab_size, 2 * vocab_size + 1, 10_000]))
    entries = compute_logprobs(torch.from_numpy(logits), torch.tensor(ids, dtype=torch.int64), k, chunk)
    assert len(entries) == m
    for row, token, entry in zip(logits.astype(np.float64), ids, entries, strict=True):
        order = sorted(range(vocab_size), key=lambda t: (-row[t], t))
        assert entry.token_ids == [token, *order[:k]]
        assert entry.ranks == [1 + order.index(token), *range(1, min(k, vocab_size) + 1)]
        reference = row - np.log(np.exp(row).sum())
        np.testing.assert_allclose(entry.logprobs, reference[entry.token_ids], atol=1e-5)


def test_logprobs_of_impossible_tokens_are_minus_infinity():
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    (entry,) = compute_logprobs(logits, torch.tensor([2]), 2)
    assert entry.token_ids == [2, 0, 1]
    assert entry.logprobs == [-np.inf, 0.0, -np.inf]
    assert entry.ranks == [3, 1, 2]


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_prompt_logprobs_of_many_positions(vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(33, vocab_size, generator=generator)
    ids = torch.randint(vocab_size, (33,), generator=generator)
    whole = compute_logprobs(logits, ids, 4)
    reference = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([e.logprobs[0] for e in whole]), reference)
    assert [e.token_ids for e in compute_logprobs(logits, ids, 4, 7 * vocab_size)] == [
        e.token_ids for e in whole
    ]


# --- the largest of a row ---------------------------------------------------------------------------


def test_largest_values_are_those_of_a_sort():
    """All counts of several vocabularies, with ties, -inf and vocabularies that no group size divides."""
    for vocab_size in (1, 2, 7, 64, 97, 331):
        logits = torch.randint(
            -40, 40, (3, vocab_size), generator=torch.Generator().manual_seed(vocab_size)
        ).float()
        logits[1, ::2] = -torch.inf
        want = logits.sort(dim=-1, descending=True).values
        assert torch.equal(sorted_values(logits), want)
        assert torch.equal(first_largest(logits), logits.argmax(dim=-1))
        for count in range(1, vocab_size + 1):
            assert torch.equal(largest_values(logits, count), want[:, :count]), (vocab_size, count)


def test_a_row_with_nan_says_where():
    logits = torch.tensor([[1.0, torch.nan, 3.0], [2.0, 5.0, 5.0]])
    assert first_largest(logits).tolist() == [1, 1]
