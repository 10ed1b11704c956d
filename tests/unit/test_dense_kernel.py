"""Dense attention of bfloat16 inputs against float64, its errors beside torch's kernel, and its threads."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.attention.backend import Queries
from prefold.attention.native_backend import NativeBackend
from prefold.kernels import dense, library
from prefold.testing.dense import visible
from prefold.workspace import Workspace

torch.set_num_threads(1)

PAIRED = (dense.PAIRS, dense.TILES, dense.EMULATED_TILES)
"""What rounds exponentials to bfloat16."""

SETS = (*library.INSTRUCTION_SETS, *PAIRED)
BF16 = torch.bfloat16


def available() -> tuple[str, ...]:
    """What can be tested here: all that can be used, and emulated tiles."""
    return (*dense.instruction_sets(), *((dense.EMULATED_TILES,) if library.has_pairs() else ()))


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    assert library.instruction_sets(), "the native library was not built: see setup.py"
    if request.param not in available():
        pytest.skip(f"{request.param}: not on this processor")
    return request.param


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(BF16)


def words_of(chosen: torch.Tensor) -> torch.Tensor:
    """[n, keys] bool -> the words of `dense.attend_`, with one more per row, and ones behind the last key."""
    num_tokens, num_keys = chosen.shape
    bits = torch.ones(num_tokens, num_keys // 64 + 2, 64, dtype=torch.int64)
    bits.flatten(1)[:, :num_keys] = chosen
    words = (bits << torch.arange(64)).sum(-1)
    assert words.dtype == torch.int64
    return torch.cat((words, torch.full((num_tokens, 1), -1)), dim=1)[:, :-1]


def choose(num_tokens: int, num_keys: int, share: float, seed: int) -> torch.Tensor:
    """Random [tokens, keys]; every seventh token has chosen nothing, and runs of keys are chosen by none."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_tokens, num_keys, generator=generator) < share
    chosen[3::7] = False
    start, end = torch.randint(0, num_keys + 1, (2,), generator=generator).sort().values.tolist()
    chosen[:, start:end] = False
    return chosen


class Attention:
    """One request's queries, and what they have seen of keys and values, [heads, n, dim] each."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, instruction_set: str | None
    ) -> None:
        self.q, self.k, self.v, self.scale = q, k, v, scale
        self.backend = NativeBackend(Workspace(poison=True), q.dtype, instruction_set)
        (self.state,) = self.backend.start([Queries(q, k.shape[0], v.shape[2])], scale)
        self.seen = torch.zeros(q.shape[0], k.shape[1], dtype=torch.bool)

    def attend(
        self,
        tokens: slice,
        keys: slice,
        causal: bool = False,
        unseen: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
    ) -> None:
        """chosen: [tokens, keys] bool."""
        num_keys = keys.stop - keys.start
        k = self.backend.keys(len(self.k), num_keys, self.k.shape[2])
        v = self.backend.values(len(self.v), num_keys, self.v.shape[2])
        self.backend.attend_(
            self.state,
            tokens,
            k.copy_(self.k[:, keys]),
            v.copy_(self.v[:, keys]),
            causal,
            unseen,
            None if chosen is None else words_of(chosen),
        )
        self.seen[tokens, keys] |= visible(tokens.stop - tokens.start, num_keys, causal, unseen, chosen)

    def result(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """out [n, heads, v_dim] and lse [n, heads]; uses the state up."""
        lse = self.backend.lse(self.state)
        out = torch.full((*self.q.shape[:2], self.v.shape[2]), math.nan, dtype=dtype)
        self.backend.finish(self.state, out)
        return out, lse

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In float64: out, lse, sums of weight * |value|, and the largest sums of |q_i * k_i| * scale of any
        token and head."""
        group = self.q.shape[1] // len(self.k)
        q, k, v = (x.double() for x in (self.q, *(x.repeat_interleave(group, 0) for x in (self.k, self.v))))
        scores = torch.einsum("thd,hnd->thn", q, k) * self.scale
        scores = scores.masked_fill(~self.seen[:, None], -math.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        out, size = (torch.einsum("thn,hnv->thv", weights, x) for x in (v, v.abs()))
        largest = torch.einsum("thd,hnd->thn", q.abs(), k.abs()).amax(-1) * self.scale
        return out, lse, size, largest

    def check(self, instruction_set: str) -> None:
        """Weights have the relative error of scores' roundings, and with pairs that of bfloat16 (2^-8) and
        the exponential's 7.5e-5. It is in sums of weights, and again in those of values."""
        expected, expected_lse, size, largest = self.exact()
        out, lse = self.result()
        each = 16 * 2**-24 * (1 + largest) + (2**-8 + 1e-4 if instruction_set in PAIRED else 1e-6)
        assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
        seen = lse > -math.inf
        assert not out[~seen].any()
        assert ((lse - expected_lse).abs() <= 1.01 * each)[seen].all()
        assert ((out - expected).abs() <= 2.02 * each[..., None] * size + 1e-30).all()


# qk_dim, v_dim, heads, KV heads. Odd ones end within a pair.
SHAPES = [
    (32, 32, 2, 2),
    (64, 64, 4, 1),
    (41, 37, 2, 1),
    (40, 16, 3, 1),
    (80, 96, 1, 1),
    (192, 128, 1, 1),
    (256, 48, 6, 2),
    (576, 512, 2, 1),
]


@pytest.mark.parametrize(("qk_dim", "v_dim", "heads", "kv_heads"), SHAPES)
def test_every_length(instruction_set: str, qk_dim: int, v_dim: int, heads: int, kv_heads: int):
    k, v = random(kv_heads, 120, qk_dim, seed=1), random(kv_heads, 120, v_dim, seed=2)
    for length in range(1, 71, 1 if instruction_set in PAIRED else 3):
        q = random(length, heads, qk_dim, seed=length)
        attention = Attention(q, k[:, : length + 50], v[:, : length + 50], qk_dim**-0.5, instruction_set)
        attention.attend(slice(0, length), slice(0, length), causal=True)
        attention.attend(slice(length // 3, length), slice(length, length + 7 * length % 50))
        attention.check(instruction_set)


@pytest.mark.parametrize("heads", [1, 3])
def test_around_blocks_of_rows_and_keys(instruction_set: str, heads: int):
    for edge in (8, 16, 32, 48, 96, 192, 384, 480):
        for length in (edge - 1, edge, edge + 1):
            q, k, v = random(length, heads, 8), random(1, length, 8, seed=1), random(1, length, 6, seed=2)
            attention = Attention(q, k, v, 0.3, instruction_set)
            attention.attend(slice(0, length), slice(0, length), causal=True)
            attention.check(instruction_set)


@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_keys_that_tokens_do_not_see(instruction_set: str, magnitude: float):
    """Blocks that a token sees in part, from any key on, or not at all; scores of up to 1,000s."""
    for length in (1, 2, 9, 130, 400):
        q, k, v = (
            random(length, 2, 8, scale=magnitude),
            random(1, 500, 8, seed=1, scale=magnitude),
            random(1, 500, 5),
        )
        attention = Attention(q, k, v, 0.5, instruction_set)
        generator = torch.Generator().manual_seed(length)
        for start, end, causal in ((0, length, True), (length, 500, False)):
            unseen = torch.randint(0, end - start + 1, (length,), generator=generator).sort().values
            attention.attend(slice(0, length), slice(start, end), causal, unseen)
        attention.check(instruction_set)


@pytest.mark.parametrize(("qk_dim", "v_dim", "heads", "kv_heads"), SHAPES)
def test_chosen_keys(instruction_set: str, qk_dim: int, v_dim: int, heads: int, kv_heads: int):
    k, v = random(kv_heads, 180, qk_dim, seed=1), random(kv_heads, 180, v_dim, seed=2)
    for length in range(1, 71, 3):
        q, rest = random(length, heads, qk_dim, seed=length), length + 37 * length % 107
        attention = Attention(q, k[:, :rest], v[:, :rest], qk_dim**-0.5, instruction_set)
        chosen = choose(length, rest, (0.02, 0.3, 0.97)[length % 9 // 3], length)
        attention.attend(slice(0, length), slice(0, length), True, None, chosen[:, :length])
        part = slice(length // 3, length)
        attention.attend(part, slice(length, rest), False, None, chosen[part, length:])
        attention.check(instruction_set)


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_chosen_keys_around_blocks(instruction_set: str, heads: int):
    for edge in (8, 32, 48, 64, 96, 128, 384, 448, 768):
        for num_keys in (edge - 1, edge, edge + 1):
            length = num_keys if heads == 1 else 30
            q = random(length, heads, 8)
            k, v = random(1, num_keys, 8, seed=1), random(1, num_keys, 6, seed=2)
            attention = Attention(q, k, v, 0.3, instruction_set)
            unseen = torch.arange(length) * num_keys // (2 * length)
            chosen = choose(length, num_keys, 0.2, edge)
            attention.attend(slice(0, length), slice(0, num_keys), heads == 1, unseen, chosen)
            attention.check(instruction_set)


def test_keys_that_are_not_chosen_leave_no_trace(instruction_set: str):
    """However high their scores; also in a token's first block, where the reference is set."""
    q, k, v = random(5, 2, 16), random(1, 900, 16), random(1, 900, 16)
    chosen = choose(5, 900, 0.3, 1)
    chosen[1, :500] = False
    nobodys = ~chosen.any(0)
    assert nobodys.any()
    results = []
    for number in (1.0, 1e18):
        k[0, nobodys], v[0, nobodys] = number, number
        attention = Attention(q, k, v, 0.5, instruction_set)
        attention.attend(slice(0, 5), slice(0, 900), False, None, chosen)
        results.append(attention.result())
    for one, other in zip(*results):
        assert torch.equal(one, other)
    every, plain = (Attention(q, k, v, 0.5, instruction_set) for _ in range(2))
    every.attend(slice(0, 5), slice(0, 900), False, None, torch.ones(5, 900, dtype=torch.bool))
    plain.attend(slice(0, 5), slice(0, 900))
    for one, other in zip(every.result(), plain.result()):
        assert torch.equal(one, other)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_bits_of_indices(data: st.DataObject):
    num_rows, num_indices = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 40))
    num_words, first = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([0, 1, 63, 64, 1 << 30]))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    numbers = st.one_of(st.integers(-2, 2), st.integers(first - 3, first + 64 * num_words + 3))
    drawn = [
        data.draw(st.lists(numbers, min_size=num_indices, max_size=num_indices)) for _ in range(num_rows)
    ]
    indices = torch.tensor(drawn, dtype=dtype).view(num_rows, num_indices)
    apart = torch.full((num_rows, num_indices + 1), first, dtype=dtype)
    apart[:, :num_indices] = indices
    selected = torch.full((num_rows, num_words + 2), 5)
    dense.select_(apart[:, :num_indices], first, selected[:, :num_words])
    expected = (indices[:, :, None] == first + torch.arange(64 * num_words)).any(1)
    bits = (selected[:, :num_words, None] >> torch.arange(64)) & 1
    assert torch.equal(bits.flatten(1).bool(), expected)
    assert (selected[:, num_words:] == 5).all()


@pytest.mark.parametrize("masked", [False, True])
def test_more_keys_than_are_packed_at_a_time(instruction_set: str, masked: bool):
    length, num_keys = 401, 1205
    q, k, v = random(length, 1, 576), random(1, num_keys, 576, seed=1), random(1, num_keys, 512, seed=2)
    attention = Attention(q, k, v, 576**-0.5, instruction_set)
    chosen = choose(length, num_keys, 0.5, 3) if masked else None
    for tokens, keys, causal in (
        (slice(0, 401), slice(0, 401), True),
        (slice(300, 401), slice(401, 1205), False),
    ):
        attention.attend(tokens, keys, causal, None, None if chosen is None else chosen[tokens, keys])
    attention.check(instruction_set)


def test_minus_infinity_is_a_score(instruction_set: str):
    q, k, v = random(3, 1, 16).abs(), random(1, 70, 16), random(1, 70, 16)
    k[0, :50] = -math.inf
    first = Attention(q, k, v, 0.5, instruction_set)
    first.attend(slice(0, 3), slice(0, 50))
    first.attend(slice(0, 2), slice(50, 70))
    only = Attention(q, k, v, 0.5, instruction_set)
    only.attend(slice(0, 2), slice(50, 70))
    for one, other in zip(first.result(), only.result()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("qk_dim", "heads", "kv_heads"), [(64, 4, 1), (128, 1, 1), (192, 1, 1)])
def test_errors_are_not_larger_than_those_of_torchs_kernel(
    dtype: torch.dtype, qk_dim: int, heads: int, kv_heads: int
):
    length, shape = 512, (kv_heads, 512, qk_dim)
    q, k, v = random(length, heads, qk_dim), random(*shape, seed=1), random(*shape, seed=2)
    if dtype == torch.float32:
        q, k, v = (x.float() + 2**-10 * random(*x.shape, seed=3) for x in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    theirs = kernel(q.transpose(0, 1)[None], k[None], v[None], 0.0, True)[0][0].transpose(0, 1)
    # Of torch's vector length: shorter vectors have longer sums.
    best = library.instruction_sets()[-1]
    for instruction_set in {best, *(one for one in available() if one in PAIRED and dtype == BF16)}:
        attention = Attention(q, k, v, qk_dim**-0.5, instruction_set)
        attention.attend(slice(0, length), slice(0, length), causal=True)
        expected, ours = attention.exact()[0], attention.result(dtype)[0]
        own, other = ((x.double() - expected).square().mean().sqrt() for x in (ours, theirs))
        assert own <= other, (instruction_set, own, other)


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_threads_do_not_change_a_bit(heads: int, dtype: torch.dtype):
    """Heads that go round and that do not, causal squares of several blocks, few rows and many."""
    sets = [one for one in available() if one in PAIRED and dtype == BF16] or [None]
    for (length, num_keys), instruction_set in product(((300, 300), (1, 900), (97, 130)), sets):
        q, k, v = (
            random(*s).to(dtype) for s in ((length, heads, 64), (heads, num_keys, 64), (heads, num_keys, 48))
        )
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            attention = Attention(q, k, v, 0.125, instruction_set)
            attention.attend(slice(0, length), slice(0, num_keys), causal=length == num_keys)
            results.append(attention.result())
        torch.set_num_threads(1)
        for one in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(one, results[0]))


def test_pairs_of_nothing_are_refused():
    q = torch.zeros(1, 1, 4)
    sums = torch.zeros(1, 1)
    with pytest.raises(AssertionError):
        dense.attend_(q, q, q, q, sums, sums, slice(0, 1), 1, 1.0, False, None, dense.PAIRS)
