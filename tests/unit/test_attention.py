"""The softmax kernel against float64, the LSE merge, and the segments that a rank walks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.lse import merge_
from prefold.attention.native_backend import NativeBackend
from prefold.attention.torch_backend import CAUSAL_ROW_BLOCK, KEY_BLOCK, ROW_BLOCK, SLACK, TorchBackend
from prefold.attention.walk import Run, Segment, others_segments, own_segments, prefix_segments
from prefold.distributed.pcp_layout import partition
from prefold.kernels import library
from prefold.kernels.dense import select_
from prefold.testing.dense import visible
from prefold.workspace import Workspace

torch.set_num_threads(1)

INF = math.inf


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator) * scale


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention. q [T, H, qk], k [Hkv, n, qk], v [Hkv, n, v], mask [T, n] True where a token sees
    a key -> out [T, H, v], 0 where nothing is seen, and lse [T, H]."""
    group = q.shape[1] // k.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hnd->thn", q.double(), keys) * scale
    scores = scores.masked_fill(~mask[:, None], -INF)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0)[..., None])
    return torch.einsum("thn,hnv->thv", weights, values), lse


BACKENDS = ("torch", *library.INSTRUCTION_SETS)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make_backend(request.param)


def make_backend(name: str) -> AttentionBackend:
    workspace = Workspace(poison=True)
    if name == "torch":
        return TorchBackend(workspace, torch.device("cpu"))
    available = library.instruction_sets()
    assert available, "the native library was not built: see setup.py"
    if name not in available:
        pytest.skip(f"{name}: not on this processor")
    return NativeBackend(workspace, instruction_set=name)


class Kernel:
    """A backend with one request's state, fed with pieces of one set of keys and values."""

    def __init__(
        self, backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        self.q, self.k, self.v, self.scale = q, k, v, scale
        self.backend = backend
        (self.state,) = self.backend.start([Queries(q, k.shape[0], v.shape[-1])], scale)
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
        qk_dim, num_keys = self.q.shape[-1], keys.stop - keys.start
        k = self.backend.keys(self.k.shape[0], num_keys, qk_dim)
        k[..., :qk_dim] = self.k[:, keys]
        selected = None
        if chosen is not None:
            numbers = torch.arange(num_keys).where(chosen, -1)
            selected = torch.empty(len(chosen), num_keys // 64 + 1, dtype=torch.int64)
            select_(numbers, 0, selected)
        self.backend.attend_(self.state, tokens, k, self.v[:, keys], causal, unseen, selected)
        square = visible(tokens.stop - tokens.start, num_keys, causal, unseen, chosen)
        assert not self.seen[tokens, keys].logical_and(square).any()
        self.seen[tokens, keys] |= square

    def check(self, tolerance: float = 2e-5) -> None:
        """Everything seen so far, against the oracle; uses the state up."""
        expected, expected_lse = oracle(self.q, self.k, self.v, self.scale, self.seen)
        lse = self.backend.lse(self.state)
        assert lse.shape == self.q.shape[:2]
        assert torch.equal(lse == -INF, expected_lse == -INF)
        finite = lse > -INF
        assert (lse - expected_lse)[finite].abs().max() < tolerance if finite.any() else True
        out = torch.full((*self.q.shape[:2], self.v.shape[-1]), math.nan)
        self.backend.finish(self.state, out)
        assert (out - expected).abs().max() < tolerance
        assert not out[~finite].any()


# ---------------------------------------------------------------- the kernel

# qk_dim, v_dim, heads, KV heads
SHAPES = [
    (32, 32, 2, 2),
    (40, 32, 4, 1),
    (64, 40, 2, 2),
    (24, 40, 4, 2),
    (80, 80, 1, 1),
    (96, 64, 2, 1),
    (128, 128, 2, 2),
    (192, 128, 2, 2),
    (256, 192, 1, 1),
    (576, 512, 3, 1),
]


@pytest.mark.parametrize(("qk_dim", "v_dim", "heads", "kv_heads"), SHAPES)
def test_kernel_of_every_length(
    backend: AttentionBackend, qk_dim: int, v_dim: int, heads: int, kv_heads: int
):
    for length in range(1, 71):
        q = random(length, heads, qk_dim, seed=length)
        k, v = random(kv_heads, length, qk_dim, seed=1), random(kv_heads, length, v_dim, seed=2)
        kernel = Kernel(backend, q, k, v, qk_dim**-0.5)
        kernel.attend(slice(0, length), slice(0, length), causal=True)
        kernel.check()
        num_queries = 1 + (7 * length) % 70
        rectangle = Kernel(backend, random(num_queries, heads, qk_dim, seed=3), k, v, qk_dim**-0.5)
        rectangle.attend(slice(num_queries // 3, num_queries), slice(0, length))
        rectangle.check()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "edges"),
    [
        (2, 2, [CAUSAL_ROW_BLOCK, ROW_BLOCK, KEY_BLOCK, KEY_BLOCK + CAUSAL_ROW_BLOCK]),
        # Rows are what is blocked, tokens times heads, so that blocks end within a head's tokens.
        (3, 1, [CAUSAL_ROW_BLOCK // 3, ROW_BLOCK // 3, KEY_BLOCK]),
        (130, 1, [2, ROW_BLOCK // 130]),
    ],
)
def test_kernel_around_its_block_sizes(
    backend: AttentionBackend, heads: int, kv_heads: int, edges: list[int]
):
    for length in (edge + i for edge in edges for i in (-1, 0, 1)):
        q, k = random(length, heads, 8), random(kv_heads, length, 8, seed=1)
        v = random(kv_heads, length, 4, seed=2)
        square = Kernel(backend, q, k, v, 0.3)
        square.attend(slice(0, length), slice(0, length), causal=True)
        square.check()
        rectangle = Kernel(backend, q[-140:], k, v, 0.3)
        rectangle.attend(slice(0, len(rectangle.q)), slice(0, length))
        rectangle.check()


def test_no_tokens_and_no_keys_change_nothing(backend: AttentionBackend):
    q, k, v = random(5, 2, 16), random(2, 6, 16), random(2, 6, 8)
    kernel = Kernel(backend, q, k, v, 0.25)
    kernel.attend(slice(0, 5), slice(0, 0))
    kernel.attend(slice(5, 5), slice(0, 6))
    kernel.attend(slice(2, 2), slice(0, 0), causal=True)
    kernel.attend(slice(1, 4), slice(2, 5))
    kernel.attend(slice(1, 4), slice(5, 5))
    kernel.check()
    Kernel(backend, q, k, v, 0.25).check()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_keys_that_a_token_does_not_see(backend: AttentionBackend, causal: bool, magnitude: float):
    """Few and many, in blocks of which a token sees nothing, and with tokens that see none at all."""
    for length in (1, 2, 5, 130, ROW_BLOCK // 2 + 1):
        num_keys = length if causal else KEY_BLOCK + 3
        q, k = random(length, 4, 8, scale=magnitude), random(2, num_keys, 8, seed=1, scale=magnitude)
        kernel = Kernel(backend, q, k, random(2, num_keys, 4, seed=2), 0.5)
        generator = torch.Generator().manual_seed(length)
        unseen = torch.randint(0, num_keys + 1, (length,), generator=generator).sort().values
        kernel.attend(slice(0, length), slice(0, num_keys), causal, unseen)
        kernel.check(2e-5 if magnitude == 1.0 else 1e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_tokens_see_the_keys_that_they_have_chosen(backend: AttentionBackend, causal: bool):
    """Many and none, after a block that all see and below one that begins later."""
    for length in (1, 2, 130, ROW_BLOCK // 2 + 1):
        num_keys = length if causal else KEY_BLOCK + 3
        q, k, v = random(length, 4, 8), random(2, num_keys + 9, 8, seed=1), random(2, num_keys + 9, 4, seed=2)
        kernel = Kernel(backend, q, k, v, 0.5)
        generator = torch.Generator().manual_seed(length)
        chosen = torch.rand(length, num_keys, generator=generator) < torch.linspace(1, -0.2, length)[:, None]
        unseen = None if causal else torch.arange(length) * 2
        kernel.attend(slice(0, length // 2), slice(num_keys, num_keys + 9))
        kernel.attend(slice(0, length), slice(0, num_keys), causal, unseen, chosen)
        kernel.check()


@given(
    starts=st.lists(st.integers(0, 39), max_size=6),
    first_tokens=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    magnitude=st.sampled_from([0.1, 1.0, 30.0]),
    name=st.sampled_from(BACKENDS),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=80)
def test_keys_may_come_in_any_pieces_and_order(
    starts: list[int], first_tokens: list[int], magnitude: float, name: str, order
):
    assume(name == "torch" or name in library.instruction_sets())
    backend = make_backend(name)
    q, k, v = random(10, 4, 16, scale=magnitude), random(2, 40, 16), random(2, 40, 8)
    kernel = Kernel(backend, q, k, v, 0.25)
    bounds = sorted({0, 40, *starts})
    pieces = list(zip(bounds, bounds[1:], first_tokens))
    order.shuffle(pieces)
    for start, end, first in pieces:
        kernel.attend(slice(first, 10), slice(start, end))
    kernel.check(tolerance=2e-5 * max(1.0, magnitude))


# Largest scores of consecutive tiles: what matters is how they lie to each other.
HEIGHTS = [
    [0.0, 30.0, 60.0, 90.0, 200.0],
    [200.0, 90.0, 60.0, 30.0, 0.0],
    [-SLACK + 1, SLACK - 1, -SLACK + 1],
    [-SLACK - 1, SLACK + 1, -SLACK - 1],
    [-500.0, -400.0, 300.0, -1000.0],
    [-90.0, -88.0, -45.0, -39.0, 0.0],
    [1000.0, -1000.0],
    [-1000.0, 1000.0],
    [0.0, 39.0, 78.0, 117.0, 156.0],
    [3e4, 2.9e4, 3.1e4],
]


@pytest.mark.parametrize("heights", HEIGHTS, ids=str)
@pytest.mark.parametrize("per_row", [False, True], ids=["all rows", "each row its own"])
def test_scores_of_any_size(backend: AttentionBackend, heights: Sequence[float], per_row: bool):
    """One element of q and k carries each tile's height; the others differ as usual."""
    tile, tokens = 5, 6
    q, k, v = random(tokens, 2, 9), random(2, tile * len(heights), 9), random(2, tile * len(heights), 4)
    q[..., 8] = 1.0
    if per_row:
        q[..., 8] = torch.linspace(-1.0, 1.0, tokens)[:, None]
    k[..., 8] = torch.tensor(heights).repeat_interleave(tile)
    kernel = Kernel(backend, q, k, v, 1.0)
    for i in range(len(heights)):
        kernel.attend(slice(0, tokens), slice(i * tile, (i + 1) * tile))
    # float32 scores of this size are rounded to about this much.
    kernel.check(tolerance=2e-5 + 4 * max(map(abs, heights)) * 2**-23)
    square = Kernel(backend, q[:tile], k[:, :tile], v[:, :tile], 1.0)
    square.attend(slice(0, tile), slice(0, tile), causal=True)
    square.check(tolerance=2e-5 + 4 * abs(heights[0]) * 2**-23)


def test_states_of_several_requests_do_not_touch(backend: AttentionBackend):
    sizes = [(3, 4, 1, 12, 8), (1, 4, 4, 9, 5), (7, 4, 2, 16, 16)]
    queries = [Queries(random(n, h, qk), kv, v_dim) for n, h, kv, qk, v_dim in sizes]
    inputs = [(random(kv, 11, qk), random(kv, 11, v_dim)) for _, _, kv, qk, v_dim in sizes]
    states = backend.start(queries, 0.2)
    for part in (slice(0, 4), slice(4, 11)):
        for state, x, (keys, values) in zip(states, queries, inputs):
            k = backend.keys(keys.shape[0], part.stop - part.start, keys.shape[2])
            k[..., : keys.shape[2]] = keys[:, part]
            backend.attend_(state, slice(0, x.q.shape[0]), k, values[:, part], False)
    for state, x, (keys, values) in zip(states, queries, inputs):
        out = torch.empty(*x.q.shape[:2], x.v_dim)
        backend.finish(state, out)
        everything = torch.ones(x.q.shape[0], 11, dtype=torch.bool)
        assert (out - oracle(x.q, keys, values, 0.2, everything)[0]).abs().max() < 1e-5


def test_values_may_be_a_view_of_the_keys(backend: AttentionBackend):
    """The absorbed form: values are the head of the keys, with the keys' strides."""
    q, latent = random(4, 3, 40), random(1, 30, 40)
    (state,) = backend.start([Queries(q, 1, 32)], 0.2)
    k = backend.keys(1, 30, 40)
    k[..., :40] = latent
    backend.attend_(state, slice(0, 4), k, k[..., :32], False)
    out = torch.empty(4, 3, 32)
    backend.finish(state, out)
    expected, _ = oracle(q, latent, latent[..., :32], 0.2, torch.ones(4, 30, dtype=torch.bool))
    assert (out - expected).abs().max() < 1e-5


# ---------------------------------------------------------------- merging by LSE

ROWS: dict[str, tuple[float, float]] = {
    "finite": (0.7, 1.5),
    "small": (-0.3, -200.0),
    "large": (0.2, 300.0),
    "empty": (0.0, -INF),
    "empty, uninitialised": (math.nan, -INF),
    "empty, infinite": (INF, -INF),
}
"""(output, lse) of a row."""


def merged(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """In float64; an output counts only where its row saw a key."""
    if a[1] == b[1] == -INF:
        return 0.0, -INF
    lse = np.logaddexp(a[1], b[1])
    parts = [out * math.exp(x - lse) for out, x in (a, b) if x > -INF]
    return sum(parts), lse


def test_merge_of_all_pairs_of_rows():
    """Each pair alone, and all pairs in one call."""
    pairs = [(a, b) for a in ROWS.values() for b in ROWS.values()]
    for group in ([pair] for pair in pairs), [pairs]:
        for batch in group:
            out, lse, part_out, part_lse = (
                torch.tensor([pair[side][what] for pair in batch]) for side in (0, 1) for what in (0, 1)
            )
            untouched = part_out.clone(), part_lse.clone()
            out = out.view(-1, 1, 1).repeat(1, 1, 3)
            part = part_out.view(-1, 1, 1).expand(-1, 1, 3)
            lse = lse.view(-1, 1)
            merge_(out, lse, part, part_lse.view(-1, 1))
            expected = torch.tensor([merged(a, b) for a, b in batch], dtype=torch.float64)
            assert torch.equal(lse[:, 0] == -INF, expected[:, 1] == -INF)
            assert torch.allclose(lse[:, 0].double(), expected[:, 1], rtol=1e-6)
            assert torch.allclose(out[:, 0].double(), expected[:, :1].expand(-1, 3), atol=1e-6)
            assert torch.equal(part_out.nan_to_num(), untouched[0].nan_to_num())
            assert torch.equal(part_lse, untouched[1])


@given(
    st.lists(st.sampled_from([*ROWS.values(), (1.0, 2.0), (-2.0, 1.9), (5.0, 0.0)]), min_size=3, max_size=7)
)
@settings(max_examples=100)
def test_merge_is_associative(rows: list[tuple[float, float]]):
    def tensors(row: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1, 1, 2), row[0]), torch.full((1, 1), row[1])

    def fold(items: Sequence[tuple[float, float]], from_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if len(items) == 1:
            return tensors(items[0])
        split = len(items) - 1 if from_left else 1
        out, lse = fold(items[:split], from_left)
        merge_(out, lse, *fold(items[split:], from_left))
        return out, lse

    left, right = fold(rows, True), fold(rows, False)
    assert torch.allclose(left[0], right[0], atol=1e-5)
    assert torch.allclose(left[1], right[1], rtol=1e-5)


def test_parts_of_an_attention_merge_to_the_whole(backend: AttentionBackend):
    q, k, v = random(6, 2, 16), random(2, 20, 16), random(2, 20, 8)
    seen = [slice(0, 7), slice(7, 8), slice(8, 20)]
    out, lse = torch.zeros(6, 2, 8), torch.full((6, 2), -INF)
    for i, keys in enumerate(seen):
        part = Kernel(backend, q, k, v, 0.25)
        part.attend(slice(2 * i, 6), keys)
        part_lse, part_out = part.backend.lse(part.state), torch.empty(6, 2, 8)
        part.backend.finish(part.state, part_out)
        merge_(out, lse, part_out, part_lse)
    whole = Kernel(backend, q, k, v, 0.25)
    for i, keys in enumerate(seen):
        whole.attend(slice(2 * i, 6), keys)
    assert torch.allclose(lse, whole.backend.lse(whole.state), atol=1e-5)
    expected = torch.empty(6, 2, 8)
    whole.backend.finish(whole.state, expected)
    assert torch.allclose(out, expected, atol=1e-5)


# ---------------------------------------------------------------- segments


def pairs_of(positions: Sequence[int], segments: Sequence[Segment]) -> Counter[tuple[int, int]]:
    """(query position, key position) pairs that the segments attend to, with their number."""
    pairs: Counter[tuple[int, int]] = Counter()
    for segment in segments:
        assert segment.start < segment.end
        if segment.causal:
            assert positions[segment.first_query] == segment.start
            square = range(segment.start, segment.end)
            pairs.update((q, k) for q in square for k in square if k <= q)
            later = positions[segment.first_query + len(square) :]
            pairs.update((q, k) for q in later for k in square)
        else:
            pairs.update(
                (q, k) for q in positions[segment.first_query :] for k in range(segment.start, segment.end)
            )
    return pairs


def check_segments(runs: Sequence[Run], num_computed: int) -> None:
    own, others = own_segments(runs), others_segments(runs, num_computed)
    positions = [p for run in runs for p in range(run.start, run.end)]
    context = [Segment(0, num_computed, 0)] if num_computed else []
    expected = Counter((q, k) for q in positions for k in range(q + 1))
    assert pairs_of(positions, [*context, *own, *others]) == expected
    assert [(s.start, s.end) for s in own] == [(run.start, run.end) for run in runs]
    for segment in others:
        assert not {*range(segment.start, segment.end)} & {*positions}
        assert segment.start >= num_computed


@given(
    num_computed=st.integers(0, 12),
    num_scheduled=st.integers(1, 40),
    size=st.integers(1, 16),
    min_split=st.integers(0, 32),
    offset=st.integers(0, 5),
)
@settings(max_examples=150)
def test_segments_cover_the_causal_pairs_of_the_partition(
    num_computed: int, num_scheduled: int, size: int, min_split: int, offset: int
):
    parts = partition(np.array([num_computed]), np.array([num_scheduled]), np.array([True]), size, min_split)
    covered = 0
    for rank in range(size):
        rows = parts.rows_of(rank)
        runs, start = [], offset
        for s, e in zip(parts.row_start[rows].tolist(), parts.row_end[rows].tolist()):
            runs.append(Run(s, e, start))
            start += e - s
        if runs:
            check_segments(runs, num_computed)
            covered += start - offset
    assert covered == num_scheduled


@given(st.lists(st.integers(1, 8), min_size=2, max_size=7), st.integers(0, 2), st.integers(0, 3))
@settings(max_examples=150)
def test_segments_of_any_runs(widths: list[int], computed_at: int, offset: int):
    """Runs with any gaps before, between and behind them, also none."""
    edges = np.cumsum([0, *widths]).tolist()
    num_computed = edges[min(computed_at, len(edges) - 2)]
    free = [e for e in edges if e >= num_computed]
    for i in range(len(free) - 1):
        check_segments([Run(free[i], free[i + 1], offset)], num_computed)
        for j in range(i + 1, len(free) - 1):
            first = Run(free[i], free[i + 1], offset)
            second = Run(free[j], free[j + 1], offset + first.end - first.start)
            check_segments([first, second], num_computed)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).map(sorted))
@settings(max_examples=100)
def test_prefixes_of_any_lengths(lengths: list[int]):
    """Each query sees its own number of keys, in segments that several queries share."""
    segments = prefix_segments(lengths)
    pairs = pairs_of(range(len(lengths)), segments)
    assert pairs == Counter((q, k) for q, length in enumerate(lengths) for k in range(length))
    assert sum(s.end - s.start for s in segments) == lengths[-1]
