"""Fused kernels against torch in float64, on every instruction set that this machine has."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from prefold.kernels import fused, library

torch.set_num_threads(1)

SETS = library.instruction_sets()
SIZES = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 100)
"""Below, at and above the lengths of vectors."""


def strided(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random values whose rows lie apart, with NaN between them."""
    whole = torch.full((*shape[:-1], shape[-1] + 6), torch.nan, dtype=dtype)
    return whole[..., : shape[-1]].copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def check(values: torch.Tensor, exact: torch.Tensor, roundings: int) -> None:
    """`values` differ from `exact` by a few roundings of their dtype, and nothing was written beside them."""
    unit = torch.finfo(values.dtype).eps
    error = (values.double() - exact).abs()
    assert bool((error <= roundings * unit * exact.abs() + 1e-30).all()), (error / exact.abs()).max()


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], eps=1e-6) * weight.double()


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("from_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to_dtype", [torch.float32, torch.bfloat16])
def test_copy_rows(from_dtype: torch.dtype, to_dtype: torch.dtype, instruction_set: str) -> None:
    for size in SIZES:
        x, out = strided(5, size, dtype=from_dtype), strided(7, size, dtype=to_dtype, seed=1)
        expected = out.clone()
        rows, places = torch.tensor([4, 0, 2]), torch.tensor([1, 6, 0])
        expected[places] = x[rows].to(to_dtype)
        fused.copy_rows(x, out, rows, places, instruction_set)
        assert torch.equal(out, expected)
        whole = strided(5, size, dtype=to_dtype, seed=1)
        beside = whole.as_strided((5, 6), (size + 6, 1), size)
        fused.copy_rows(x, whole, instruction_set=instruction_set)
        assert torch.equal(whole, x.to(to_dtype))
        assert beside.isnan().all()


@pytest.mark.parametrize("is_native", sorted({False, library.is_available()}))
def test_put_rows(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by the kernel and by torch, and for dtypes that only torch serves."""
    monkeypatch.setattr(fused, "can_fuse", lambda x: is_native and x.dtype != torch.uint8)
    rows, places = torch.tensor([4, 0, 2]), torch.tensor([1, 6, 0])
    for dtypes in product((torch.float32, torch.bfloat16), repeat=2):
        x, out = strided(5, 18, dtype=dtypes[0]), torch.zeros(7, 18, dtype=dtypes[1])
        fused.put_rows(x, out, rows, places)
        assert torch.equal(out[places], x[rows].to(dtypes[1]))
        assert not out[2:6].any()
        fused.put_rows(x, out[:3], rows)
        assert torch.equal(out[:3], x[rows].to(dtypes[1]))
    stored = torch.zeros(7, 18, dtype=torch.uint8)
    fused.put_rows(torch.full((5, 18), 3, dtype=torch.uint8), stored, rows, places)
    assert stored.sum(1).tolist() == [54, 54, 0, 0, 0, 0, 54]


def test_convert_of_rows_heads_and_what_is_neither() -> None:
    for x, out in (
        (strided(3, 9), strided(3, 9, dtype=torch.bfloat16)),
        (torch.randn(3, 2, 9), torch.empty(3, 4, 9, dtype=torch.bfloat16)[:, 1:3]),
        (torch.randn(3, 4, 9)[:, :2, :8], torch.empty(3, 2, 8, dtype=torch.bfloat16)),
        (torch.randn(2, 3, 8).transpose(0, 1), torch.empty(3, 2, 8)),
        (torch.randn(3, 9).double(), torch.empty(3, 9)),
        (torch.randn(0, 9), torch.empty(0, 9)),
    ):
        assert fused.convert(x, out) is out
        assert torch.equal(out, x.to(out.dtype))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_add(dtype: torch.dtype, instruction_set: str) -> None:
    """As torch rounds it: after the multiplication, and after the addition."""
    for size in SIZES:
        bias = strided(1, size, dtype=dtype, seed=2)[0]
        for scale, added in ((1.0, None), (0.7, None), (1.0, bias), (0.7, bias)):
            x = strided(3, size, dtype=dtype)
            expected = x if scale == 1.0 else x * scale
            expected = expected.clone() if added is None else expected + added
            assert fused.scale_add_(x, scale, added, instruction_set) is x
            if scale != 1.0 and added is not None:  # one rounding less where both are one instruction
                check(x, expected.double(), 64 if dtype == torch.float32 else 0)
            else:
                assert torch.equal(x, expected)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_score(dtype: torch.dtype, instruction_set: str) -> None:
    """Also numbers of experts that are not multiples of four; a row's scores do not depend on other rows."""
    for size in (*SIZES, 1000):
        for num_experts in (1, 3, 4, 6, 9):
            x, weight = strided(5, size, dtype=dtype), torch.randn(num_experts, size)
            scores = fused.score(x, weight, torch.empty(5, num_experts), instruction_set)
            exact, most = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
            assert bool(((scores - exact).abs() <= 1e-6 * most).all())
            one = fused.score(x[2:3], weight, torch.empty(1, num_experts), instruction_set)
            assert torch.equal(one[0], scores[2])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype, instruction_set: str) -> None:
    for size in SIZES:
        x, residual = strided(3, size, dtype=dtype), strided(3, size, dtype=dtype, seed=1)
        weight, out = strided(1, size, dtype=dtype, seed=2)[0], strided(3, size, dtype=dtype)
        fused.rms_norm(x, weight, 1e-6, out, None, instruction_set)
        check(out, norm_of(x, weight), 4)
        total, before = x + residual, x.clone()
        fused.rms_norm(x, weight, 1e-6, out, residual, instruction_set)
        check(out, norm_of(total, weight), 4)
        assert torch.equal(residual, total)
        assert torch.equal(x, before)
        heads = strided(2, 5, size, dtype=dtype)[:, 1:4]
        exact = norm_of(heads, weight)
        fused.rms_norm(heads, weight, 1e-6, heads, None, instruction_set)
        check(heads, exact, 4)


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    x, angles = x.double(), angles[:, None].double()
    if interleaved:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.view_as_complex(angles.unflatten(-1, (-1, 2)))).flatten(-2)
    (first, second), (cosine, sine) = x.chunk(2, -1), angles.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate(dtype: torch.dtype, interleaved: bool, instruction_set: str) -> None:
    unit = torch.finfo(dtype).eps
    for dim in (2 * size for size in SIZES):
        x = strided(3, 4, dim, dtype=dtype)[:, 1:]
        angles = torch.randn(3, dim, generator=torch.Generator().manual_seed(1))
        exact, largest = turned(x, angles, interleaved), x.double().abs().max() * angles.abs().max()
        out = strided(3, 3, dim, dtype=dtype)
        fused.rotate(x, angles, out, interleaved, instruction_set)
        assert bool(((out.double() - exact).abs() <= 2 * unit * largest).all()), dim
        fused.rotate(x, angles, x, interleaved, instruction_set)
        assert torch.equal(x, out)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate(dtype: torch.dtype, instruction_set: str) -> None:
    for width in SIZES:
        gate_up = strided(3, 2 * width, dtype=dtype).mul_(4)
        gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -87.0, 300.0, 1e-20
        gate, up = gate_up.double().chunk(2, -1)
        exact, kept = F.silu(gate) * up, gate_up[:, width:].clone()
        check(fused.gate_(gate_up, instruction_set), exact, 4)
        assert torch.equal(gate_up[:, width:], kept)
    gate_up = torch.tensor([[-1e30, torch.inf, torch.nan, 1.0, 1.0, 1.0]])
    gated = fused.gate_(gate_up, instruction_set)[0]
    assert gated[0].abs() < 1e-6
    assert gated[1] == torch.inf
    assert gated[2].isnan()


GROUPS = ((1, 1, False), (4, 2, True), (4, 1, False), (2, 1, True))


def routed(
    logits: torch.Tensor, bias: torch.Tensor | None, softmax: bool, groups, normalised: bool, top_k: int
):
    """[n, experts] float64: the chosen ones' weights."""
    scores = logits.double().softmax(-1) if softmax else logits.double().sigmoid()
    choice = scores if bias is None else scores + bias.double()
    grouped = choice.unflatten(-1, (groups[0], -1))
    best_two = grouped.topk(min(2, grouped.shape[-1])).values
    by_group = best_two.sum(-1) if groups[2] else best_two[..., 0]
    kept = torch.zeros_like(by_group).scatter(1, by_group.topk(groups[1]).indices, 1.0).bool()
    choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = choice.topk(top_k).indices
    weights = torch.zeros_like(scores).scatter(1, ids, scores.gather(1, ids))
    return weights / weights.sum(-1, keepdim=True) * 2.5 if normalised else weights * 2.5


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("groups", GROUPS)
def test_route(groups: tuple[int, int, bool], instruction_set: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for experts, top_k, softmax, biased in ((8, 3, True, False), (20, 4, False, True), (256, 8, False, True)):
        logits = torch.randn(50, experts, generator=generator)
        bias = torch.randn(experts, generator=generator) if biased else None
        weights, ids = torch.empty(50, top_k), torch.empty(50, top_k, dtype=torch.int64)
        if top_k > experts // groups[0] * groups[1]:
            continue
        fused.route(logits, bias, weights, ids, softmax, groups, biased, 2.5, instruction_set)
        dense = torch.zeros(50, experts).scatter(1, ids, weights)
        exact = routed(logits, bias, softmax, groups, biased, top_k)
        torch.testing.assert_close(dense.double(), exact, rtol=1e-5, atol=0)


def test_route_of_equals_and_of_no_numbers() -> None:
    weights, ids = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int64)
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0, 2.0], [torch.nan] * 6])
    fused.route(logits, None, weights, ids, True, (1, 1, False), True, 1.0)
    assert ids.tolist() == [[1, 3, 4], [0, 1, 2]]
    assert weights[1].isnan().all()


@pytest.mark.parametrize("instruction_set", SETS)
def test_experts_are_the_weighted_sum_of_mlps(instruction_set: str) -> None:
    held, hidden, width, first, rows = 5, 72, 40, 2, 7
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(held, 2 * width, hidden, generator=generator).bfloat16()
    down = torch.randn(held, hidden, width, generator=generator).bfloat16()
    x, out, weights = strided(rows, hidden), strided(rows, hidden, seed=1), strided(rows, 3, seed=2)
    ids = torch.stack([torch.randperm(held + 4, generator=generator)[:3] for _ in range(rows)])
    exact, magnitude = out.double(), out.double().abs()
    for row in range(rows):
        for weight, expert in zip(weights[row].double(), ids[row] - first):
            if 0 <= expert < held:
                gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
                summands = down[expert].double() * (F.silu(gate) * up) * weight
                exact[row] += summands.sum(1)
                magnitude[row] += summands.abs().sum(1)
    fused.experts_(out, x, weights, ids, first, gate_up, down, instruction_set)
    assert bool(((out.double() - exact).abs() <= 1e-5 * magnitude).all())
    gate, up = (x.double() @ gate_up[1].double().t()).chunk(2, -1)
    exact = (F.silu(gate) * up) @ down[1].double().t()
    mlp = fused.gated_mlp(x, gate_up[1], down[1], strided(rows, hidden), instruction_set)
    torch.testing.assert_close(mlp.double(), exact, rtol=1e-4, atol=1e-3)
