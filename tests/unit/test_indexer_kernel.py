"""The native indexer against float64 and sorting, on every instruction set that this machine has."""

from __future__ import annotations

import itertools

import pytest
import torch

from prefold.attention.backend import IndexQueries
from prefold.attention.row_format import PlainFormat
from prefold.attention.selection import AllTokens, KeySelector
from prefold.attention.walk import rows_of
from prefold.kernels import indexer, library
from prefold.workspace import Workspace

torch.set_num_threads(1)


@pytest.fixture(params=library.INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    available = library.instruction_sets()
    assert available, "the native library was not built: see setup.py"
    if request.param not in available:
        pytest.skip(f"{request.param}: not on this processor")
    return request.param


def padded(*shape: int, dtype: torch.dtype = torch.float32, whole_numbers: bool = False) -> torch.Tensor:
    """Random values whose rows lie apart, with NaN between them."""
    whole = torch.full((*shape[:-1], shape[-1] + 3), torch.nan, dtype=dtype)
    values = torch.randint(-2, 3, shape).float() if whole_numbers else torch.randn(shape)
    return whole[..., : shape[-1]].copy_(values)


def best_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    limits: list[int],
    topk: int,
    tiles: list[int],
    instruction_set: str,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and positions of the best of keys at positions first, first + 1, ..., which come in tiles.
    Query i sees the first limits[i] of them."""
    candidates = torch.full((2, len(q), indexer.capacity(topk)), 77, dtype=torch.int32)
    best = indexer.TopKeys(q, weights, torch.tensor(limits) + first, topk, candidates, instruction_set)
    for start, end in itertools.pairwise((0, *tiles, len(keys))):
        best.add(keys[start:end], first + start)
    orders, positions = best.finish()
    scores = torch.where(orders < 0, orders ^ 0x7FFFFFFF, orders).view(torch.float32)
    return scores.clone(), positions.clone()


def expected(scores: list[float], topk: int, first: int = 0) -> list[int]:
    """Positions of the highest scores, of equal ones the first, ascending; then ABSENT."""
    best = sorted(sorted(range(len(scores)), key=lambda key: (-scores[key], key))[:topk])
    return [first + key for key in best] + [indexer.ABSENT] * (topk - len(best))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_selection(instruction_set: str, dtype: torch.dtype) -> None:
    """All keys are selected, so that each score shows; keys of every number up to three panels' edges."""
    torch.manual_seed(0)
    for num_keys in (*range(1, 71), 95, 96, 97, 143, 144, 145):
        heads, dim = 1 + num_keys % 11, (32, 40, 64, 80, 96, 128, 1, 17)[num_keys % 8]
        q, weights = padded(3, heads, dim), padded(3, heads)
        keys = padded(num_keys, dim, dtype=dtype)
        limits = [num_keys, (num_keys + 1) // 2, 0]
        tiles = [num_keys // 3, num_keys // 2]
        scores, positions = best_keys(q, weights, keys, limits, num_keys, tiles, instruction_set, 5)
        for i, limit in enumerate(limits):
            assert positions[i].tolist() == [*range(5, 5 + limit)] + [indexer.ABSENT] * (num_keys - limit)
            products = q[i].double() @ keys[:limit].double().T
            exact = weights[i].double() @ products.relu()
            magnitude = weights[i].double().abs() @ (q[i].double().abs() @ keys[:limit].double().abs().T)
            error = (scores[i, :limit].double() - exact).abs()
            assert bool((error <= 40 * 2**-24 * magnitude).all()), (num_keys, heads, dim)


@pytest.mark.parametrize("topk", [1, 2, 15, 16, 17, 64])
def test_of_equal_scores_the_first_positions_win(instruction_set: str, topk: int) -> None:
    """Small whole numbers: sums are exact, and scores of 0 and of equal value are common."""
    torch.manual_seed(topk)
    for count in (topk, topk + 1, 2 * topk + 65, 333, 700):
        keys = padded(count, 4, whole_numbers=True)
        q, weights = padded(5, 3, 4, whole_numbers=True), padded(5, 3, whole_numbers=True)
        limits = [count, count - 1, max(0, count - 47), count // 2, min(count, topk)]
        _, positions = best_keys(q, weights, keys, limits, topk, [count // 3, count // 2], instruction_set)
        for i, limit in enumerate(limits):
            scores = (weights[i] @ (q[i] @ keys[:limit].T).relu()).tolist()
            assert positions[i].tolist() == expected(scores, topk), (count, limit)


def test_scores_that_rise_fall_and_do_not_change(instruction_set: str) -> None:
    """Each key is better than all before, worse, or equal, with signs, zeros and infinities."""
    count, topk = 600, 37
    rising = torch.arange(count) - count / 2
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, -1e-40, 3e38, -3e38]).repeat(count // 8)
    for values in (rising, -rising, torch.zeros(count), -torch.zeros(count), special, special.flip(0)):
        # One head per sign, because relu hides what is negative.
        q, weights = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, -1.0]])
        scores, positions = best_keys(q, weights, values[:, None], [count], topk, [100], instruction_set)
        wanted = expected(values.tolist(), topk)
        assert positions[0].tolist() == wanted
        assert torch.equal(scores[0], values[wanted])


def test_a_score_has_the_same_bits_in_any_tile(instruction_set: str) -> None:
    torch.manual_seed(0)
    q, weights, keys = torch.randn(3, 32, 128), torch.rand(3, 32), torch.randn(300, 128).bfloat16()
    whole, _ = best_keys(q, weights, keys, [300] * 3, 300, [], instruction_set)
    for start in (1, 5, 47, 48, 49, 200):
        tiles = [start, min(start + 70, 300)]
        parts, _ = best_keys(q, weights, keys, [300] * 3, 300, tiles, instruction_set)
        assert torch.equal(whole, parts)
        moved, _ = best_keys(q[1:2], weights[1:2], keys[start:], [300], 300 - start, [], instruction_set)
        assert torch.equal(whole[1, start:], moved[0])


def test_the_selector_selects_the_same_with_and_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, because torch's scores may differ in the last bit."""
    torch.manual_seed(0)
    index = IndexQueries(torch.randint(-2, 3, (200, 4, 8)).float(), torch.randint(-2, 3, (200, 4)).float())
    keys = torch.randint(-2, 3, (220, 8)).bfloat16()
    source, selected = rows_of(keys, 0, PlainFormat(8, keys.dtype)), []
    for is_native in (True, False):
        monkeypatch.setattr(library, "is_available", lambda is_native=is_native: is_native)
        ranks = torch.full((200, 20), -1)
        selector = KeySelector(20, 50, Workspace(poison=True))
        selector.select(index, torch.arange(20, 220), source, AllTokens(), ranks)
        selected.append(ranks.sort(dim=1).values)
    assert torch.equal(*selected)


def test_what_the_kernel_is_not_for() -> None:
    q = torch.ones(1, 2, 8)
    assert indexer.can_select(q, torch.bfloat16)
    assert not indexer.can_select(q.bfloat16(), torch.bfloat16)
    assert not indexer.can_select(q, torch.float16)
