"""The sampler against a plain numpy account of what each parameter means."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.request import SamplingParams
from prefold.sampling import sampler as sampler_module
from prefold.sampling.sampler import InvalidLogitsError, Sampler, SamplingMetadata, apply_processors

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0.0)
MASK64 = 2**64 - 1


def metadata(params, seeds=None, num_generated=None, prompts=None, outputs=None, eos=()):
    n = len(params)
    prompts, outputs = (
        [np.array(ids, dtype=np.int32) for ids in all_ids or [[]] * n] for all_ids in (prompts, outputs)
    )
    return SamplingMetadata(
        request_ids=[f"request-{row}" for row in range(n)],
        params=params,
        seeds=list(range(n)) if seeds is None else seeds,
        num_generated=[len(o) for o in outputs] if num_generated is None else num_generated,
        tokens=lambda row: (prompts[row], outputs[row]),
        eos_token_ids=[eos] * n,
    )


def sample(logits, params, **kwargs):
    logits = torch.as_tensor(np.asarray(logits, dtype=np.float32)).clone()
    return Sampler(logits.shape[1])(logits, metadata(params, **kwargs)).token_ids.tolist()


# --- what the parameters mean, one token at a time ------------------------------------------------


def processed_row(row, p, prompt, output, num_generated, eos):
    """Logits after bias, min_tokens and penalties."""
    values = [float(value) for value in row]
    for token, bias in (p.logit_bias or {}).items():
        values[token] += bias
    if num_generated < p.min_tokens:
        for token in {*eos, *p.stop_token_ids}:
            if token < len(values):
                values[token] = -np.inf
    for token in range(len(values)):
        if token in prompt or token in output:
            good = values[token] > 0
            values[token] = (
                values[token] / p.repetition_penalty if good else values[token] * p.repetition_penalty
            )
        count = list(output).count(token)
        values[token] -= count * p.frequency_penalty + (p.presence_penalty if count else 0.0)
    return np.array(values)


def kept_tokens(values, p):
    """Tokens left by min_p, top_k, top_p, and how close (in mass) the decision was."""
    scaled = (values - values.max()) / p.temperature
    weight = np.exp(scaled)
    margin = np.inf
    kept = {t for t in range(len(values)) if weight[t] >= p.min_p}
    if p.min_p > 0:
        margin = (
            min(margin, *(abs(w / p.min_p - 1) for w in weight if w < 1)) if (weight < 1).any() else margin
        )
    if 0 < p.top_k < len(values):
        kth = sorted((scaled[t] for t in range(len(values))), reverse=True)[p.top_k - 1]
        kept = {t for t in kept if scaled[t] >= kth}
    if p.top_p < 1:
        total, mass, nucleus = sum(weight[t] for t in kept), 0.0, []
        for token in sorted(kept, key=lambda t: -scaled[t]):
            if mass >= p.top_p * total:
                break
            mass += weight[token]
            margin = min(margin, abs(mass / total - p.top_p))
            nucleus.append(token)
        kept = {t for t in kept if scaled[t] >= min(scaled[u] for u in nucleus)}
    return kept, margin


def mix(value):
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & MASK64
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & MASK64
    return value ^ value >> 31


def race_scores(values, temperature, seed, step):
    key = mix((mix(seed & MASK64) + (step + 1) * 0x9E3779B97F4A7C15) & MASK64)
    scores = []
    for token, value in enumerate(values):
        bits = mix((key + (token + 1) * 0x9E3779B97F4A7C15) & MASK64) & (2**63 - 1)
        noise = -np.log1p(-(bits + 0.5) / 2**63)
        scores.append((value - max(values)) / temperature - np.log(noise))
    return np.array(scores)


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 9, 100]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 7), st.sampled_from([-5.0, 0.5, 4.0]), max_size=3),
    seed=st.none(),
    max_tokens=st.none(),
)


@settings(max_examples=150)
@given(data=st.data())
def test_a_mixed_batch_does_what_its_parameters_say(data):
    vocab_size = 8
    n = data.draw(st.integers(1, 6))
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    # A coarse grid makes ties, which finer logits would never show.
    grid = st.lists(st.integers(-6, 6), min_size=vocab_size, max_size=vocab_size)
    logits = np.array([data.draw(grid) for _ in range(n)], dtype=np.float32) / 2
    params = [data.draw(params_strategy) for _ in range(n)]
    prompts = [data.draw(ids) for _ in range(n)]
    outputs = [data.draw(ids) for _ in range(n)]
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=n, max_size=n))
    buffer = torch.from_numpy(logits.copy())
    meta = metadata(params, seeds=seeds, prompts=prompts, outputs=outputs, eos=(1,))
    result = Sampler(vocab_size)(buffer, meta)
    assert (buffer.numpy() == logits).all(), "the caller's logits were modified"
    apply_processors(buffer, meta)
    for row, p in enumerate(params):
        step = len(outputs[row])
        expected = processed_row(logits[row], p, prompts[row], outputs[row], step, (1,))
        np.testing.assert_allclose(buffer[row].numpy(), expected, rtol=1e-5, atol=1e-5)
        token = int(result.token_ids[row])
        if p.is_greedy:
            assert expected[token] >= expected.max() - 1e-5
            assert token == int(buffer[row].numpy().argmax())
            continue
        # Ties and near-boundaries are judged on the float32 values that the sampler saw.
        values = buffer[row].numpy().astype(np.float64)
        kept, margin = kept_tokens(values, p)
        if margin < 1e-5:
            continue
        scores = race_scores(values, p.temperature, seeds[row], step)
        best = max(scores[t] for t in kept)
        assert token in kept
        assert scores[token] > best - 1e-4


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, presence_penalty=0.1)])
def test_greedy_takes_the_lowest_id_among_equals(params):
    for vocab_size in (1, 2, 5, 33, 1000, 4099):
        logits = np.zeros((3, vocab_size))
        logits[1, vocab_size // 2 :] = 1.0
        logits[2, -1] = 1.0
        assert sample(logits, [params] * 3) == [0, vocab_size // 2, vocab_size - 1]


def test_greedy_ignores_filters_and_seeds():
    p = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    logits = np.random.default_rng(0).normal(size=(5, 50))
    assert sample(logits, [p] * 5, seeds=[9] * 5) == logits.astype(np.float32).argmax(1).tolist()


def test_no_rows():
    output = Sampler(10)(torch.empty(0, 10), metadata([]))
    assert output.token_ids.shape == (0,)
    assert output.token_ids.dtype == torch.int64
    assert output.logprobs == []


# --- draws ----------------------------------------------------------------------------------------


def chi_square_ok(counts, probabilities):
    """Far above what chance gives; seeds are fixed, so the verdict is too."""
    expected = np.asarray(probabilities) * sum(counts)
    assert all(c == 0 for c, e in zip(counts, expected) if e == 0)
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected) if e > 0)
    degrees = sum(e > 0 for e in expected) - 1
    return statistic < degrees + 4 * np.sqrt(2 * degrees) + 4


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2},
     {"top_k": 6, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3}, {"top_k": 1}],
)  # fmt: skip
@pytest.mark.parametrize("varied", ["seeds", "steps"])
def test_tokens_are_drawn_with_their_probabilities(kwargs, varied):
    n, vocab_size = 4000, 12
    row = np.random.default_rng(1).normal(scale=1.5, size=vocab_size)
    p = SamplingParams(**kwargs)
    seeds, steps = list(range(100, 100 + n)), [3] * n
    if varied == "steps":
        seeds, steps = [77] * n, list(range(n))
    tokens = sample(np.tile(row, (n, 1)), [p] * n, seeds=seeds, num_generated=steps)
    kept, _ = kept_tokens(row.astype(np.float32).astype(np.float64), p)
    weights = np.array([np.exp(v / p.temperature) if t in kept else 0.0 for t, v in enumerate(row)])
    assert chi_square_ok(np.bincount(tokens, minlength=vocab_size), weights / weights.sum())


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (2**32, 0)])
def test_draws_of_neighbouring_seeds_and_steps_are_independent(shift):
    n, vocab_size = 6000, 4
    logits = np.zeros((n, vocab_size))
    p = [SamplingParams()] * n
    seeds, steps = list(range(n)), [i % 7 for i in range(n)]
    first = sample(logits, p, seeds=seeds, num_generated=steps)
    second = sample(
        logits, p, seeds=[s + shift[0] for s in seeds], num_generated=[s + shift[1] for s in steps]
    )
    pairs = np.bincount(np.array(first) * vocab_size + np.array(second), minlength=vocab_size**2)
    assert chi_square_ok(pairs, np.full(vocab_size**2, vocab_size**-2))


@settings(max_examples=60)
@given(data=st.data())
def test_a_draw_does_not_depend_on_the_batch(data):
    vocab_size = 40
    n = data.draw(st.integers(2, 12))
    logits = np.random.default_rng(data.draw(st.integers(0, 1000))).normal(size=(n, vocab_size)) * 3
    params = [data.draw(params_strategy) for _ in range(n)]
    outputs = [data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=4)) for _ in range(n)]
    seeds = data.draw(st.lists(st.integers(-5, 2**64), min_size=n, max_size=n))
    together = sample(logits, params, seeds=seeds, outputs=outputs, eos=(3,))
    order = data.draw(st.permutations(range(n)))[: data.draw(st.integers(1, n))]

    def pick(values):
        return [values[row] for row in order]

    some = sample(logits[order], pick(params), seeds=pick(seeds), outputs=pick(outputs), eos=(3,))
    assert some == pick(together)


def test_a_draw_does_not_depend_on_chunks(monkeypatch):
    logits = np.random.default_rng(5).normal(size=(9, 64))
    params = [SamplingParams(top_p=0.9 - 0.05 * i) if i % 3 else SamplingParams() for i in range(9)]
    expected = sample(logits, params)
    for elements in (1, 64, 65, 3 * 64, 8 * 64):
        monkeypatch.setattr(sampler_module, "DRAW_ELEMENTS", elements)
        assert sample(logits, params) == expected


def test_one_ulp_of_noise_does_not_change_draws():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(300, 2000)).astype(np.float32)
    noisy = np.where(
        rng.random(logits.shape) < 0.5,
        np.nextafter(logits, np.float32(9)),
        np.nextafter(logits, np.float32(-9)),
    )
    params = [SamplingParams(top_p=0.95) if row % 2 else SamplingParams() for row in range(300)]
    assert sample(noisy, params) == sample(logits, params)


def test_tiny_temperatures_and_huge_logits_stay_finite():
    logits = [[3e38, -3e38, 0.0, 1.0], [-3e38, -1e38, -np.inf, -2e38], [1.0, 1.0 + 1e-6, 0.5, -1.0]]
    assert sample(logits, [SamplingParams(temperature=1e-5, top_p=0.9)] * 3)[:2] == [0, 1]


# --- min_tokens, errors ---------------------------------------------------------------------------


def test_min_tokens_suppresses_end_and_stop_tokens_until_reached():
    p = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[1, 99], logit_bias={0: 5.0})
    logits = [[9.0, 8.0, 7.0]] * 4
    outputs = [[], [2], [2, 2], [2, 2, 2]]
    assert sample(logits, [p] * 4, outputs=outputs, eos=(0,)) == [2, 2, 0, 0]


@pytest.mark.parametrize("vocab_size", [18, 50, 5000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("p", [GREEDY, SamplingParams(), SamplingParams(presence_penalty=1.0, min_tokens=1)])
def test_broken_logits_name_their_request(value, p, vocab_size):
    logits = np.zeros((3, vocab_size))
    logits[1, 17] = value
    with pytest.raises(InvalidLogitsError, match=r"'request-1': largest logit (nan|inf)") as error:
        sample(logits, [GREEDY, p, GREEDY])
    assert error.value.request_ids == ["request-1"]


def test_nothing_left_to_sample_is_an_error():
    p = SamplingParams(min_tokens=1, stop_token_ids=[0, 1])
    with pytest.raises(InvalidLogitsError, match="'request-0': largest logit -inf"):
        sample(np.zeros((1, 2)), [p])


def test_rows_without_an_error_can_be_sampled_again():
    p = SamplingParams(temperature=0.0, logit_bias={0: 1.0})
    logits = torch.tensor([[0.0, 1.5], [0.0, torch.nan], [1.0, 1.5]])
    with pytest.raises(InvalidLogitsError):
        Sampler(2)(logits, metadata([p] * 3))
    assert Sampler(2)(logits[[0, 2]], metadata([p] * 2)).token_ids.tolist() == [1, 0]


def test_nan_in_a_suppressed_token_is_still_an_error():
    p = SamplingParams(temperature=0.0, min_tokens=1)
    with pytest.raises(InvalidLogitsError):
        sample([[0.0, np.nan]], [p], eos=(1,))


# --- logprobs -------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 20)).astype(np.float32)
    params = [
        SamplingParams(logprobs=3, temperature=0.2, logit_bias={5: 50.0}),
        GREEDY,
        SamplingParams(logprobs=0, temperature=0.0, repetition_penalty=2.0),
        SamplingParams(logprobs=20, top_k=1, seed=1),
    ]
    output = Sampler(20)(torch.from_numpy(logits.copy()), metadata(params, prompts=[[1, 2]] * 4))
    reference = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    assert output.logprobs[1] is None
    for row, count in ((0, 3), (2, 0), (3, 20)):
        entry = output.logprobs[row]
        assert entry is not None
        order = np.argsort(-logits[row], kind="stable")
        token = int(output.token_ids[row])
        assert entry.token_ids == [token, *order[:count]]
        np.testing.assert_allclose(entry.logprobs, reference[row][entry.token_ids], atol=1e-5)
        assert entry.ranks == [1 + int((logits[row] > logits[row, token]).sum()), *range(1, count + 1)]
    assert int(output.token_ids[0]) == 5
    assert output.logprobs[0].ranks[0] > 1
