"""Routers against transformers' on many inputs, experts against a loop over tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from prefold.config import MoEConfig
from prefold.layers.experts import experts_in
from prefold.layers.linear import Env
from prefold.layers.moe import MoE, Router
from prefold.limits import MLP_TILE
from prefold.testing.threads import run_threads, single_rank
from prefold.workspace import Workspace

torch.set_num_threads(1)

HIDDEN = 24


def env_of(group=None, dtype=torch.float32, compute=torch.float32) -> Env:
    return Env(group or single_rank(), Workspace(poison=True), dtype, compute, "cpu")


def moe_of(method: str, experts: int, top_k: int, n_group: int, topk_group: int, norm: bool) -> MoEConfig:
    scoring = "sigmoid" if method == "noaux_tc" else "softmax"
    return MoEConfig(experts, top_k, 16, 1, n_group, topk_group, scoring, method, norm, 1.7)


def reference_router(moe: MoEConfig, router: Router) -> torch.nn.Module:
    config = SimpleNamespace(
        num_experts_per_tok=moe.top_k,
        num_experts=moe.num_experts,
        num_local_experts=moe.num_experts,
        hidden_size=HIDDEN,
        routed_scaling_factor=moe.routed_scaling_factor,
        topk_method=moe.topk_method,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
        norm_topk_prob=moe.norm_topk_prob,
    )
    reference = (DeepseekV3TopkRouter if moe.topk_method == "noaux_tc" else DeepseekV2TopkRouter)(config)
    reference.weight.data.copy_(router.weight)
    if router.bias is not None:
        reference.e_score_correction_bias.copy_(router.bias)
    return reference


@pytest.mark.parametrize(
    "moe",
    [
        moe_of("greedy", 8, 3, 1, 1, False),
        moe_of("group_limited_greedy", 8, 3, 4, 2, False),
        moe_of("group_limited_greedy", 12, 4, 3, 1, False),
        moe_of("noaux_tc", 8, 3, 1, 1, True),
        moe_of("noaux_tc", 8, 3, 4, 2, True),
        moe_of("noaux_tc", 16, 5, 2, 1, False),
        moe_of("noaux_tc", 16, 8, 4, 2, True),
    ],
    ids=str,
)
def test_router_equals_transformers(moe: MoEConfig):
    generator = torch.Generator().manual_seed(0)
    router = Router(HIDDEN, moe, env_of())
    for num_tokens in (1, 2, 17, 2000):
        router.weight.normal_(0, 0.4, generator=generator)
        if router.bias is not None:
            router.bias.normal_(0, 0.3, generator=generator)
        x = torch.randn(num_tokens, HIDDEN, generator=generator)
        with torch.no_grad():
            _, expected, expected_ids = reference_router(moe, router)(x)
        weights, ids = router(x)
        dense = torch.zeros(num_tokens, moe.num_experts)
        torch.testing.assert_close(
            dense.scatter(1, ids, weights), dense.scatter(1, expected_ids, expected), rtol=1e-5, atol=1e-6
        )
        assert len(set(ids[0].tolist())) == moe.top_k


def test_bias_chooses_but_does_not_weigh():
    moe = moe_of("noaux_tc", 8, 1, 1, 1, False)
    router = Router(HIDDEN, moe, env_of())
    router.weight.zero_()
    router.bias.zero_()
    router.bias[5] = 1.0
    weights, ids = router(torch.randn(3, HIDDEN))
    assert ids.flatten().tolist() == [5, 5, 5]
    assert weights.flatten().tolist() == pytest.approx([0.5 * 1.7] * 3)


def fill(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def definition(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Every token through every expert, times its weight for it or 0, in float64."""

    def mlp(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (x.double() @ gate_up.double().t()).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up @ down.double().t()

    weights, ids = layer.router(x)
    dense = torch.zeros(len(x), layer.moe.num_experts, dtype=torch.float64).scatter(1, ids, weights.double())
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(layer.moe.num_experts):
        out += dense[:, expert, None] * mlp(layer.experts.gate_up[expert], layer.experts.down[expert])
    return out if layer.shared is None else out + mlp(layer.shared.gate_up.weight, layer.shared.down.weight)


@settings(max_examples=15)
@given(num_tokens=st.integers(0, 120), shared=st.integers(0, 2), seed=st.integers(0, 1000))
def test_experts_equal_the_definition(num_tokens: int, shared: int, seed: int):
    moe = MoEConfig(8, 2, 16, shared, 1, 1, "sigmoid", "noaux_tc", True, 1.5)
    layer = MoE(HIDDEN, moe, False, "out", env_of())
    fill(layer, seed)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    expected = definition(layer, x)
    torch.testing.assert_close(layer(x.clone()).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_that_lie_across_tiles(dtype: torch.dtype):
    moe = MoEConfig(5, 2, 16, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.5)
    layer = MoE(HIDDEN, moe, False, "out", env_of(dtype=dtype))
    fill(layer, 0)
    layer.router.bias.zero_()
    layer.router.bias[2] = 100.0
    x = torch.randn(1300, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert layer.router(x)[1].flatten().bincount(minlength=5).max() > MLP_TILE
    torch.testing.assert_close(layer(x).double(), definition(layer, x), rtol=1e-4, atol=1e-4)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=9), size=st.integers(1, 12))
def test_tiles_together_have_every_pair(counts: list[int], size: int):
    ends, found = np.cumsum(counts), []
    for start in range(0, sum(counts), size):
        tile = slice(start, min(start + size, sum(counts)))
        parts = list(experts_in(tile, ends))
        places = [place for _, part in parts for place in range(part.start, part.stop)]
        assert places == list(range(tile.stop - tile.start))
        found += [expert for expert, part in parts for _ in range(part.start, part.stop)]
    assert found == [expert for expert, count in enumerate(counts) for _ in range(count)]


def test_all_tokens_to_one_expert():
    moe = MoEConfig(8, 1, 16, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.0)
    layer = MoE(HIDDEN, moe, False, "out", env_of())
    fill(layer, 0)
    layer.router.bias.zero_()
    layer.router.bias[7] = 100.0
    x = torch.randn(60, HIDDEN)
    torch.testing.assert_close(layer(x).double(), definition(layer, x), rtol=1e-4, atol=1e-4)


def test_one_all_reduce_for_routed_and_shared_experts():
    moe = MoEConfig(8, 2, 16, 2, 1, 1, "sigmoid", "noaux_tc", True, 1.5)

    def rank_main(group):
        calls = []
        reduce = group.all_reduce
        group.all_reduce = lambda x: (calls.append(x.shape), reduce(x))[1]
        layer = MoE(HIDDEN, moe, True, "out", env_of(group))
        fill(layer, 0)
        layer(torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)))
        return calls

    assert run_threads(2, rank_main) == [[(9, HIDDEN)]] * 2


@pytest.mark.parametrize("num_tokens", [3, 200])
def test_bfloat16_weights_with_float32_activations(num_tokens: int):
    """Few tokens are rounded to the weights' dtype, many meet weights converted without loss."""
    moe = MoEConfig(4, 2, 16, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.5)
    layer = MoE(HIDDEN, moe, False, "out", env_of(dtype=torch.bfloat16))
    fill(layer, 0)
    layer.router.bias.zero_()
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    if num_tokens > 48:
        assert layer.router(x)[1].flatten().bincount(minlength=4).min() >= 48, "an expert has few tokens"
    error = (layer(x).double() - definition(layer, x)).abs().max()
    assert error < (0.1 if num_tokens < 48 else 1e-4)
