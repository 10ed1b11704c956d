"""Expert parallelism against one rank: every mesh, any counts of tokens, routing at its worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.config import MoEConfig
from prefold.distributed.mesh import Mesh
from prefold.layers.expert_parallel import ExpertPlan, TokenShare, dispatch_capacity
from prefold.layers.experts import group_by_expert
from prefold.layers.moe import MoE
from prefold.testing.moe_layer import MoEBatch, RankLayer, whole_layer
from prefold.testing.threads import run_mesh_threads
from prefold.traffic import (
    dispatch_rows,
    expected_places,
    expert_bytes,
    expert_bytes_all_gather_form,
    experts_of,
)

torch.set_num_threads(1)

HIDDEN = 21
MOE = MoEConfig(8, 2, 16, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.5)
GROUP_LIMITED = replace(MOE, num_experts=12, top_k=3, n_group=3, topk_group=2)


@dataclass
class RankResult:
    out: torch.Tensor
    again: torch.Tensor
    expert_elements: int
    traffic: dict[str, list[int]]
    trace: list


def layer_of(moe: MoEConfig, seed: int = 0) -> MoE:
    return whole_layer(moe, HIDDEN, seed)


def batch_of(mesh: Mesh, prefill: Sequence[int], decode: Sequence[int], seed: int = 0) -> MoEBatch:
    return MoEBatch.random(mesh, HIDDEN, prefill, decode, seed)


def run(batch: MoEBatch, whole: MoE, **options: Any) -> list[RankResult]:
    """The layer on every rank of the batch's mesh, twice; what is counted is counted of one run."""

    def rank_main(rank, groups) -> RankResult:
        layer = RankLayer(groups, whole, **options)
        again = layer(batch, rank)
        for group in groups.values():
            group.traffic.clear()
            group.trace = []
        out = layer(batch, rank)
        traffic = {key: value for group in groups.values() for key, value in group.traffic.items()}
        return RankResult(out, again, layer.expert_elements, traffic, groups["ep"].trace)

    return run_mesh_threads(batch.mesh, rank_main)


def check(batch: MoEBatch, whole: MoE, stacked: bool = False) -> list[RankResult]:
    """Every rank's rows are those of one rank, and bit for bit those of its TP peers."""
    results = run(batch, whole, stacked=stacked)
    mesh = batch.mesh
    for rank, result in enumerate(results):
        expected = whole(batch.local(rank))
        torch.testing.assert_close(result.out, expected, rtol=1e-4, atol=2e-5)
        assert torch.equal(result.out, result.again), "a second run differs"
        peer = results[mesh.group_of("tp", rank)[0]]
        assert torch.equal(result.out, peer.out), "TP ranks differ"
        assert result.trace == results[mesh.group_of("ep", rank)[0]].trace
    return results


MESHES = [
    Mesh(ep=True),
    Mesh(pcp=2, ep=True),
    Mesh(pcp=3, ep=True),
    Mesh(pcp=4, ep=True),
    Mesh(pcp=8, ep=True),
    Mesh(tp=2, ep=True),
    Mesh(tp=4, ep=True),
    Mesh(dp=2, ep=True),
    Mesh(dp=5, ep=True),
    Mesh(dp=3, pcp=2, ep=True),
    Mesh(tp=2, pcp=2, ep=True),
    Mesh(tp=2, pcp=2, dcp=2, ep=True),
    Mesh(tp=2, pcp=2, dcp=4, ep=True),
    Mesh(tp=2, dcp=2, ep=True),
    Mesh(pcp=4, dcp=2, ep=True),
    Mesh(pcp=4, dcp=4, ep=True),
    Mesh(dp=2, tp=2, ep=True),
    Mesh(dp=2, pcp=2, dcp=2, ep=True),
    Mesh(dp=2, pcp=2, tp=2, dcp=2, ep=True),
    Mesh(pp=2, pcp=2, tp=2, dcp=4, ep=True),
]
COUNTS = [((7, 0, 12, 5), (3, 2)), ((0, 0, 9), (0, 1, 5)), ((4,), (0,)), ((0,), (3, 0)), ((1, 0, 0), (0,))]


def mesh_name(mesh: Mesh) -> str:
    sizes = {name: getattr(mesh, name) for name in ("dp", "pp", "pcp", "tp", "dcp")}
    return "_".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "single"


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_name)
def test_every_mesh_equals_one_rank(mesh: Mesh):
    for i, (prefill, decode) in enumerate(COUNTS):
        check(batch_of(mesh, prefill, decode, i), layer_of(MOE, i), stacked=i % 2 == 0)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("moe", [MOE, GROUP_LIMITED, replace(MOE, num_experts=5, top_k=4)], ids=repr)
def test_every_size_equals_one_rank(size: int, moe: MoEConfig):
    """Experts that do not divide evenly, more ranks than experts, more choices than experts on a rank."""
    results = check(batch_of(Mesh(pcp=size, ep=True), (6, 0, 11, 1), (2, 0)), layer_of(moe))
    per_expert = 3 * moe.intermediate_size * HIDDEN
    held = [len(experts_of(place, moe.num_experts, size)) for place in range(size)]
    assert [result.expert_elements for result in results] == [n * per_expert for n in held]


@settings(max_examples=25)
@given(
    mesh=st.sampled_from(MESHES[:12]),
    num_experts=st.integers(1, 11),
    top_k=st.integers(1, 6),
    shared=st.integers(0, 2),
    stacked=st.booleans(),
    counts=st.tuples(*[st.lists(st.integers(0, 20), min_size=1, max_size=6)] * 2),
    seed=st.integers(0, 1000),
)
def test_random_layers_and_batches(mesh, num_experts, top_k, shared, stacked, counts, seed):
    moe = replace(MOE, num_experts=num_experts, top_k=min(top_k, num_experts), num_shared_experts=shared)
    check(batch_of(mesh, *counts, seed), layer_of(moe, seed), stacked)


@pytest.mark.parametrize("favourites", [[7], [0], [3, 4], [5, 6, 7]], ids=str)
def test_all_tokens_to_few_experts(favourites: list[int]):
    """The other experts, and the ranks that hold them, get no token."""
    whole = layer_of(replace(MOE, top_k=len(favourites)))
    whole.router.bias.zero_()
    whole.router.bias[favourites] = 100.0
    for mesh in (Mesh(pcp=4, ep=True), Mesh(tp=2, pcp=2, dcp=2, ep=True)):
        check(batch_of(mesh, (30, 0, 12), (5,)), whole)


@pytest.mark.parametrize("mesh", [Mesh(pcp=3, ep=True), Mesh(tp=2, pcp=2, dcp=4, ep=True)], ids=mesh_name)
def test_half_precision_travels_as_it_is(mesh: Mesh):
    """An odd hidden size of 2 bytes each: what follows it in a row is aligned none the less."""
    batch, whole = batch_of(mesh, (60, 0, 40), (7,)), layer_of(MOE)
    for rank, result in enumerate(run(batch, whole, dtype=torch.bfloat16)):
        assert result.out.dtype == torch.bfloat16
        expected = whole(batch.local(rank).bfloat16().float())
        error = (result.out.float() - expected).norm() / expected.norm()
        assert error < 0.02


def test_a_step_without_tokens_calls_nothing():
    results = check(batch_of(Mesh(dp=2, pcp=2, tp=2, dcp=2, ep=True), (0,), (0,)), layer_of(MOE))
    assert all(result.traffic == {} and result.trace == [] for result in results)


def test_an_idle_replica_joins_both_exchanges():
    """No tokens on the second replica: same calls, same capacity, nothing sent but what it computes."""
    mesh = Mesh(dp=2, pcp=2, ep=True)
    results = check(batch_of(mesh, (9, 8, 0, 0), (1, 2, 0, 0)), layer_of(MOE))
    for result in results:
        assert [call[:2] for call in result.trace] == [("ep", "all_to_all")] * 2
        # 10 tokens of 2 choices on their way there, and at most all tokens of 4 ranks on the way back.
        assert [call[2][0] for call in result.trace] == [10 * 2, 10 * 4]


def test_tp_ranks_do_not_send_tokens_twice():
    """Two TP ranks have the same 16 tokens, and send half of them each."""
    batch = batch_of(Mesh(tp=2, ep=True), (16,), (0,))
    whole = layer_of(MOE)
    results = check(batch, whole)
    ids = batch.sent_ids(whole, 0)
    assert [len(own) for own in ids] == [8, 8]
    rows = dispatch_rows(ids, MOE.num_experts)
    sent = expert_bytes(rows, HIDDEN, MOE.top_k, 4)
    assert [result.traffic["ep.all_to_all"][1] for result in results] == sent.tolist()
    assert results[0].traffic["tp.all_reduce"][0] == 1
    assert rows.sum() <= 16 * 2


def test_bytes_equal_the_formula_and_are_below_the_all_gather_form():
    moe = replace(MOE, num_experts=64, top_k=4)
    whole = layer_of(moe)
    batch = batch_of(Mesh(pcp=8, ep=True), (40, 37, 40, 0, 40, 39, 40, 40), (2, 0, 1))
    results = check(batch, whole)
    ids = batch.sent_ids(whole, 0)
    rows = dispatch_rows(ids, moe.num_experts)
    expected = expert_bytes(rows, HIDDEN, moe.top_k, 4)
    counted = [result.traffic["ep.all_to_all"] for result in results]
    assert counted == [[2, num_bytes] for num_bytes in expected]
    most = max(len(own) for own in ids)
    other_form = expert_bytes_all_gather_form(most, 8, HIDDEN, moe.top_k, 4)
    assert expected.max() < other_form
    # On average a token goes to 3.4 of 8 ranks, one of which is often its own.
    assert expected.mean() < 0.45 * other_form
    per_token = rows.sum() / sum(len(own) for own in ids)
    assert per_token == pytest.approx(expected_places(64, 4, 8), rel=0.05)


# Index arithmetic


@given(
    prefill=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    decode=st.integers(0, 40),
    tp=st.integers(1, 5),
    u=st.integers(1, 5),
)
def test_every_token_is_sent_once(prefill: list[int], decode: int, tp: int, u: int):
    """`prefill`: of each place of a dcp_pcp group, which has `decode` tokens on all of them."""
    prefill = [prefill[i % len(prefill)] for i in range(u)]
    capacity = dispatch_capacity(prefill, [decode] * u, tp, u)
    shares = {
        (t, i): TokenShare.of(ExpertPlan(prefill[i], decode, capacity), t, tp, i, u)
        for t in range(tp)
        for i in range(u)
    }
    decode_sent: list[int] = []
    for i in range(u):
        rows = np.concatenate([shares[t, i].rows for t in range(tp)])
        assert sorted(rows[rows < prefill[i]]) == list(range(prefill[i]))
        decode_sent += [int(row) - prefill[i] for row in rows if row >= prefill[i]]
    assert sorted(decode_sent) == list(range(decode))
    largest = max(len(share.rows) for share in shares.values())
    assert largest <= capacity
    assert (largest == 0) == (capacity == 0)
    if len(set(prefill)) == 1:
        assert largest == capacity


@given(decode=st.integers(0, 60), tp=st.integers(1, 5), u=st.integers(1, 6), t=st.integers(0, 4))
def test_gathered_parts_are_the_decode_run(decode: int, tp: int, u: int, t: int):
    shares = [TokenShare.of(ExpertPlan(3, decode, 100), t % tp, tp, i, u) for i in range(u)]
    padded = []
    for share in shares:
        assert (share.decode_run, share.stride) == (shares[0].decode_run, shares[0].stride)
        padded += [*share.decode_sent] + [-1] * (share.stride - len(share.decode_sent))
    assert padded[: len(shares[0].decode_run)] == [*shares[0].decode_run]


def test_capacity_is_the_largest_of_all_pcp_ranks():
    assert dispatch_capacity([], [], 2, 1) == 0
    assert dispatch_capacity([0, 9, 3], [4, 0, 1], 1, 1) == 9
    assert dispatch_capacity([0, 4, 3], [4, 0, 2], 1, 1) == 5
    assert dispatch_capacity(np.array([8, 7]), np.array([5, 5]), 4, 2) == 3


@given(num_experts=st.integers(1, 50), size=st.integers(1, 20))
def test_experts_are_spread_evenly(num_experts: int, size: int):
    held = [experts_of(place, num_experts, size) for place in range(size)]
    assert [expert for part in held for expert in part] == list(range(num_experts))
    counts = [len(part) for part in held]
    assert max(counts) - min(counts) <= 1


@given(data=st.data(), top_k=st.integers(1, 4), start=st.integers(0, 9), count=st.integers(0, 9))
def test_pairs_are_grouped_by_expert(data, top_k: int, start: int, count: int):
    ids = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 20), min_size=top_k, max_size=top_k))), np.int64
    )
    ids = ids.reshape(-1, top_k)
    held = range(start, start + count)
    order, counts = group_by_expert(ids, held)
    pairs = [(int(expert), place) for place, expert in enumerate(ids.ravel()) if expert in held]
    assert order[: len(pairs)].tolist() == [place for _, place in sorted(pairs)]
    assert sorted(order.tolist()) == list(range(ids.size))
    assert counts.tolist() == [sum(expert == e for e, _ in pairs) for expert in held]
