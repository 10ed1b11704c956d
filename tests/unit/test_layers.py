"""Norms and linear layers on their own: dtypes, buffers, aliasing."""

import pytest
import torch
from torch.nn import functional as F

from prefold.layers.embedding import VocabParallel
from prefold.layers.linear import (
    CONVERT_ONCE_FROM,
    CONVERT_WEIGHT_FROM,
    ColumnParallelLinear,
    Env,
    GatedMLP,
    Linear,
    RowParallelLinear,
    multiply,
    prepared,
)
from prefold.layers.norm import ROWS_PER_PASS, RMSNorm
from prefold.limits import MLP_TILE, WIDENED_ROWS
from prefold.testing.threads import run_threads, single_rank
from prefold.workspace import Workspace

torch.set_num_threads(1)

EDGES = [n + d for n in (WIDENED_ROWS, CONVERT_WEIGHT_FROM, CONVERT_ONCE_FROM) for d in (-1, 0, 1)]


def env_of(weight=torch.float32, compute=torch.float32, group=None) -> Env:
    return Env(group or single_rank(), Workspace(poison=True), weight, compute, "cpu")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, *EDGES])
def test_matmul_of_any_two_dtypes(weight_dtype, compute, num_tokens: int):
    x, weight = normal(num_tokens, 32, dtype=compute), normal(24, 32, seed=1, dtype=weight_dtype)
    out = torch.full((num_tokens, 24), float("nan"), dtype=compute)
    env = env_of(weight_dtype, compute)
    result = multiply(x, prepared([weight], num_tokens, "w", env), out, env)
    assert result.data_ptr() == out.data_ptr()
    expected = x.double() @ weight.double().t()
    tolerance = 1e-5 if compute == torch.float32 else 5e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", [0, 1, ROWS_PER_PASS - 1, ROWS_PER_PASS, ROWS_PER_PASS + 1, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(num_tokens: int, dtype: torch.dtype):
    norm = RMSNorm(40, 1e-6, env_of(dtype, dtype))
    norm.weight.copy_(normal(40))
    x, residual = normal(num_tokens, 40, dtype=dtype), normal(num_tokens, 40, seed=1, dtype=dtype)

    def expected(values: torch.Tensor) -> torch.Tensor:
        return norm.weight * F.rms_norm(values.float(), (40,), eps=1e-6).to(dtype)

    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    close = {"rtol": tolerance, "atol": tolerance}
    out = torch.full_like(x, float("nan"))
    torch.testing.assert_close(norm(x, out=out), expected(x), **close)
    total, x_before = x + residual, x.clone()
    torch.testing.assert_close(norm(x, out=out, residual=residual), expected(total), **close)
    assert torch.equal(residual, total)
    assert torch.equal(x, x_before)
    assert norm(x, out=x) is x
    torch.testing.assert_close(x, expected(x_before), **close)


def test_rms_norm_of_part_of_a_row():
    norm = RMSNorm(8, 1e-6, env_of())
    norm.weight.fill_(1.0)
    x = normal(300, 20)
    before = x.clone()
    norm(x[:, 4:12], out=x[:, 4:12])
    torch.testing.assert_close(x[:, 4:12], F.rms_norm(before[:, 4:12], (8,), eps=1e-6))
    assert torch.equal(x[:, :4], before[:, :4])
    assert torch.equal(x[:, 12:], before[:, 12:])


def test_tiny_and_huge_rows_stay_finite():
    norm = RMSNorm(8, 1e-6, env_of())
    norm.weight.fill_(1.0)
    x = torch.tensor([0.0, 1e-30, 1e-10, 1e18])[:, None].repeat(1, 8)
    torch.testing.assert_close(norm(x, out=torch.empty_like(x)), F.rms_norm(x, (8,), eps=1e-6))


def test_results_share_the_buffer_of_their_role():
    env = env_of()
    first, second = Linear(8, 6, True, "a", env), Linear(8, 6, False, "a", env)
    other = Linear(8, 6, False, "b", env)
    for layer in (first, second, other):
        layer.weight.copy_(normal(6, 8))
    assert first.bias is not None
    first.bias.fill_(2.0)
    x = normal(3, 8)
    out = first(x)
    torch.testing.assert_close(out, x @ normal(6, 8).t() + 2.0)
    kept = out.clone()
    other(x)
    assert torch.equal(out, kept)
    assert second(x).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_then_row_parallel_is_one_mlp(size: int):
    """down(silu(gate) * up) with biases: the down bias is added once, not once per rank."""
    weights = {
        f"m.{name}_proj.{kind}": normal(*shape, seed=seed)
        for seed, (name, kind, shape) in enumerate(
            [
                ("gate", "weight", (16, 8)),
                ("up", "weight", (16, 8)),
                ("down", "weight", (8, 16)),
                ("gate", "bias", (16,)),
                ("up", "bias", (16,)),
                ("down", "bias", (8,)),
            ]
        )
    }
    x = normal(5, 8, seed=9)

    def rank_main(group):
        mlp = GatedMLP(8, 16, True, "out", env_of(group=group))
        wanted = list(mlp.weights("m"))
        assert {w.name: w.shape for w in wanted} == {k: tuple(v.shape) for k, v in weights.items()}
        for weight in wanted:
            for slices, destination in weight.parts:
                destination.copy_(weights[weight.name][slices])
        return mlp(x.clone()).clone()

    gate = F.linear(x, weights["m.gate_proj.weight"], weights["m.gate_proj.bias"])
    up = F.linear(x, weights["m.up_proj.weight"], weights["m.up_proj.bias"])
    expected = F.linear(F.silu(gate) * up, weights["m.down_proj.weight"], weights["m.down_proj.bias"])
    for result in run_threads(size, rank_main):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_sizes_that_tp_does_not_divide_are_our_mistake():
    def rank_main(group):
        env = env_of(group=group)
        with pytest.raises(AssertionError):
            ColumnParallelLinear(8, [7], False, "a", env)
        with pytest.raises(AssertionError):
            RowParallelLinear(7, 8, False, "a", env)

    run_threads(2, rank_main)


@pytest.mark.parametrize("num_tokens", [0, 1, MLP_TILE - 1, MLP_TILE, MLP_TILE + 1, 2 * MLP_TILE + 7])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_mlp_in_tiles(num_tokens: int, weight_dtype: torch.dtype):
    """The last tile may be short: its rows still meet the weights that were converted for all."""
    mlp = GatedMLP(8, 16, False, "out", env_of(weight_dtype))
    for seed, weight in enumerate(mlp.parameters()):
        weight.copy_(normal(*weight.shape, seed=seed))
    x = normal(num_tokens, 8, seed=9)
    gate, up = (x @ mlp.gate_up.weight.float().t()).chunk(2, dim=-1)
    expected = F.silu(gate) * up @ mlp.down.weight.float().t()
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, *EDGES, 3 * CONVERT_ONCE_FROM])
def test_logits_of_many_rows_convert_no_weight(num_tokens: int):
    env = env_of(torch.bfloat16, torch.float32)
    head = VocabParallel(50, 16, env)
    head.weight.copy_(normal(50, 16, seed=1))
    hidden = normal(num_tokens, 16, seed=2)
    torch.testing.assert_close(head.logits(hidden), hidden @ head.weight.float().t(), rtol=0, atol=1e-4)
    assert env.workspace.num_bytes == num_tokens * 50 * 4
