"""Expert parallelism against one rank: every mesh, any counts of tokens, routing at its worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.config import MoEConfig
from prefold.distributed.mesh import Mesh
from prefold.layers.expert_parallel import ExpertParallel, ExpertPlan, TokenShare, dispatch_capacity
from prefold.layers.experts import group_by_expert
from prefold.layers.linear import Env
from prefold.layers.moe import MoE
from prefold.testing.threads import run_mesh_threads, single_rank
from prefold.traffic import (
    dispatch_rows,
    expected_places,
    expert_bytes,
    expert_bytes_all_gather_form,
    experts_of,
)
from prefold.workspace import Workspace

torch.set_num_threads(1)

HIDDEN = 21
MOE = MoEConfig(8, 2, 16, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.5)
GROUP_LIMITED = replace(MOE, num_experts=12, top_k=3, n_group=3, topk_group=2)


def whole_layer(moe: MoEConfig, seed: int = 0, role: str = "out") -> MoE:
    """A layer on one rank, with all experts."""
    env = Env(single_rank(), Workspace(poison=True), torch.float32, torch.float32, "cpu")
    layer = MoE(HIDDEN, moe, False, role, env)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


def checkpoint_of(layer: MoE, stacked: bool) -> dict[str, torch.Tensor]:
    """The layer's tensors as a checkpoint has them."""
    tensors = {"mlp.gate.weight": layer.router.weight}
    if layer.router.bias is not None:
        tensors["mlp.gate.e_score_correction_bias"] = layer.router.bias
    if layer.shared is not None:
        gate, up = layer.shared.gate_up.weight.chunk(2)
        tensors |= {
            "mlp.shared_experts.gate_proj.weight": gate,
            "mlp.shared_experts.up_proj.weight": up,
            "mlp.shared_experts.down_proj.weight": layer.shared.down.weight,
        }
    if stacked:
        tensors["mlp.experts.gate_up_proj"] = layer.experts.gate_up
        tensors["mlp.experts.down_proj"] = layer.experts.down
        return tensors
    for i in range(layer.moe.num_experts):
        gate, up = layer.experts.gate_up[i].chunk(2)
        tensors[f"mlp.experts.{i}.gate_proj.weight"] = gate
        tensors[f"mlp.experts.{i}.up_proj.weight"] = up
        tensors[f"mlp.experts.{i}.down_proj.weight"] = layer.experts.down[i]
    return tensors


def load(layer: MoE, tensors: dict[str, torch.Tensor]) -> int:
    """Fill `layer` as the loader does; how many elements it read of routed experts."""
    wanted = {weight.name: weight for weight in layer.weights("mlp", tensors.keys())}
    assert wanted.keys() == tensors.keys()
    elements = 0
    for name, weight in wanted.items():
        assert weight.shape == tuple(tensors[name].shape), name
        for slices, destination in weight.parts:
            destination.copy_(tensors[name][slices])
            elements += destination.numel() * (".experts." in name)
    return elements


@dataclass(frozen=True)
class Batch:
    """Tokens of all ranks: prefill ones of each (dp, pcp), decode ones of each (dp, unit)."""

    mesh: Mesh
    prefill: list[list[torch.Tensor]]
    decode: list[list[torch.Tensor]]

    @classmethod
    def random(cls, mesh: Mesh, prefill: Sequence[int], decode: Sequence[int], seed: int = 0) -> Batch:
        """`prefill`, `decode`: counts, taken in turn by (dp, pcp) and (dp, unit)."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(counts: Sequence[int], per_replica: int) -> list[list[torch.Tensor]]:
            numbers = [counts[i % len(counts)] for i in range(mesh.dp * per_replica)]
            drawn = [torch.randn(n, HIDDEN, generator=generator) for n in numbers]
            return [drawn[d * per_replica : (d + 1) * per_replica] for d in range(mesh.dp)]

        return cls(mesh, tokens(prefill, mesh.pcp), tokens(decode, mesh.pcp // cls.unit_size(mesh)))

    @staticmethod
    def unit_size(mesh: Mesh) -> int:
        return min(mesh.dcp, mesh.pcp)

    def local(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(prefill, decode) tokens of a rank."""
        at = self.mesh.coords(rank)
        return self.prefill[at.dp][at.pcp], self.decode[at.dp][at.pcp // self.unit_size(self.mesh)]

    def capacity(self) -> int:
        u = self.unit_size(self.mesh)
        return max(
            dispatch_capacity(
                [len(x) for x in prefill], np.repeat([len(x) for x in decode], u), self.mesh.tp, u
            )
            for prefill, decode in zip(self.prefill, self.decode)
        )

    def plan(self, rank: int) -> ExpertPlan:
        prefill, decode = self.local(rank)
        return ExpertPlan(len(prefill), len(decode), self.capacity())


@dataclass
class RankResult:
    out: torch.Tensor
    again: torch.Tensor
    elements: int
    traffic: dict[str, list[int]]
    trace: list


def run(
    batch: Batch, whole: MoE, stacked: bool = False, dtype: torch.dtype = torch.float32
) -> list[RankResult]:
    """The layer on every rank of the batch's mesh, computing in `dtype`."""
    tensors = checkpoint_of(whole, stacked)

    def rank_main(rank, groups) -> RankResult:
        workspace = Workspace(poison=True)
        parallel = ExpertParallel(groups, whole.moe.num_experts, workspace)
        env = Env(groups["tp"], workspace, torch.float32, dtype, "cpu", parallel)
        layer = MoE(HIDDEN, whole.moe, False, "out", env)
        elements = load(layer, tensors)
        parallel.begin_step(batch.plan(rank))
        x = torch.cat(batch.local(rank)).to(dtype)
        again = layer(x.clone()).clone()
        for group in groups.values():
            group.traffic.clear()
            group.trace = []
        out = layer(x.clone()).clone()
        traffic = {key: value for group in groups.values() for key, value in group.traffic.items()}
        trace = [call for group in groups.values() if group.name == "ep" for call in group.trace]
        return RankResult(out, again, elements, traffic, trace)

    return run_mesh_threads(batch.mesh, rank_main)


def check(batch: Batch, whole: MoE, stacked: bool = False) -> list[RankResult]:
    """Every rank's rows are those of one rank, and bit for bit those of its TP peers."""
    results = run(batch, whole, stacked)
    mesh = batch.mesh
    for rank, result in enumerate(results):
        expected = whole(torch.cat(batch.local(rank)))
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
        check(Batch.random(mesh, prefill, decode, i), whole_layer(MOE, i), stacked=i % 2 == 0)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("moe", [MOE, GROUP_LIMITED, replace(MOE, num_experts=5, top_k=4)], ids=repr)
def test_every_size_equals_one_rank(size: int, moe: MoEConfig):
    """Experts that do not divide evenly, more ranks than experts, more choices than experts on a rank."""
    results = check(Batch.random(Mesh(pcp=size, ep=True), (6, 0, 11, 1), (2, 0)), whole_layer(moe))
    per_expert = 3 * moe.intermediate_size * HIDDEN
    held = [len(experts_of(place, moe.num_experts, size)) for place in range(size)]
    assert [result.elements for result in results] == [n * per_expert for n in held]


@settings(max_examples=25, deadline=None)
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
    check(Batch.random(mesh, *counts, seed), whole_layer(moe, seed), stacked)


@pytest.mark.parametrize("favourites", [[7], [0], [3, 4], [5, 6, 7]], ids=str)
def test_all_tokens_to_few_experts(favourites: list[int]):
    """The other experts, and the ranks that hold them, get no token."""
    whole = whole_layer(replace(MOE, top_k=len(favourites)))
    whole.router.bias.zero_()
    whole.router.bias[favourites] = 100.0
    for mesh in (Mesh(pcp=4, ep=True), Mesh(tp=2, pcp=2, dcp=2, ep=True)):
        check(Batch.random(mesh, (30, 0, 12), (5,)), whole)


@pytest.mark.parametrize("mesh", [Mesh(pcp=3, ep=True), Mesh(tp=2, pcp=2, dcp=4, ep=True)], ids=mesh_name)
def test_half_precision_travels_as_it_is(mesh: Mesh):
    """An odd hidden size of 2 bytes each: what follows it in a row is aligned none the less."""
    batch, whole = Batch.random(mesh, (60, 0, 40), (7,)), whole_layer(MOE)
    for rank, result in enumerate(run(batch, whole, dtype=torch.bfloat16)):
        assert result.out.dtype == torch.bfloat16
        expected = whole(torch.cat(batch.local(rank)).bfloat16().float())
        error = (result.out.float() - expected).norm() / expected.norm()
        assert error < 0.02


def test_a_step_without_tokens_calls_nothing():
    results = check(Batch.random(Mesh(dp=2, pcp=2, tp=2, dcp=2, ep=True), (0,), (0,)), whole_layer(MOE))
    assert all(result.traffic == {} and result.trace == [] for result in results)


def test_an_idle_replica_joins_both_exchanges():
    """No tokens on the second replica: same calls, same capacity, nothing sent but what it computes."""
    mesh = Mesh(dp=2, pcp=2, ep=True)
    results = check(Batch.random(mesh, (9, 8, 0, 0), (1, 2, 0, 0)), whole_layer(MOE))
    for result in results:
        assert [call[:2] for call in result.trace] == [("ep", "all_to_all")] * 2
        # 10 tokens of 2 choices on their way there, and at most all tokens of 4 ranks on the way back.
        assert [call[2][0] for call in result.trace] == [10 * 2, 10 * 4]


def test_tp_ranks_do_not_send_tokens_twice():
    """Two TP ranks have the same 16 tokens, and send half of them each."""
    batch = Batch.random(Mesh(tp=2, ep=True), (16,), (0,))
    whole = whole_layer(MOE)
    results = check(batch, whole)
    ids = whole.router(batch.local(0)[0])[1].numpy()
    rows = dispatch_rows([ids[:8], ids[8:]], MOE.num_experts)
    sent = expert_bytes(rows, HIDDEN, MOE.top_k, 4)
    assert [result.traffic["ep.all_to_all"][1] for result in results] == sent.tolist()
    assert results[0].traffic["tp.all_reduce"][0] == 1
    assert rows.sum() <= 16 * 2


def test_bytes_equal_the_formula_and_are_below_the_all_gather_form():
    moe = replace(MOE, num_experts=64, top_k=4)
    whole = whole_layer(moe)
    batch = Batch.random(Mesh(pcp=8, ep=True), (40, 37, 40, 0, 40, 39, 40, 40), (2, 0, 1))
    results = check(batch, whole)
    ids = [whole.router(torch.cat(batch.local(rank)))[1].numpy().copy() for rank in range(8)]
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
