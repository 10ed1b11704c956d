"""Expert parallelism on ranks as processes: results, and the bytes that the real groups count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prefold.config import MoEConfig
from prefold.distributed.mesh import Mesh
from prefold.testing.moe_layer import MoEBatch, RankLayer, whole_layer
from prefold.testing.run_ranks import RankContext, run_ranks
from prefold.traffic import dispatch_rows, expert_bytes, expert_bytes_all_gather_form

HIDDEN = 33
MOE = MoEConfig(10, 3, 16, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.5)
# Growing, shrinking, none at all, on some ranks only, and more than a slot of shared memory holds at first.
COUNTS = [
    ((5, 0, 8, 1), (2, 3)),
    ((0,), (0,)),
    ((0, 0, 0, 70), (0, 1)),
    ((700, 650, 0, 9), (16,)),
    ((0,), (5, 0)),
    ((40, 41), (0,)),
]


@torch.inference_mode()
def steps(ctx: RankContext, moe: MoEConfig, counts: list) -> None:
    """Each step against one rank, its bytes against the formula."""
    whole = whole_layer(moe, HIDDEN)
    layer = RankLayer(ctx.groups, whole)
    group = ctx.groups["ep"]
    for seed, (prefill, decode) in enumerate(counts):
        batch = MoEBatch.random(ctx.mesh, HIDDEN, prefill, decode, seed)
        group.traffic.clear()
        out = layer(batch, ctx.rank)
        torch.testing.assert_close(out, whole(batch.local(ctx.rank)), rtol=1e-4, atol=5e-5)
        capacity = batch.plan(ctx.rank).capacity_tokens
        ids = batch.sent_ids(whole, ctx.rank)
        num_bytes = int(expert_bytes(dispatch_rows(ids, moe.num_experts), HIDDEN, moe.top_k, 4)[group.rank])
        assert group.traffic == ({"ep.all_to_all": [2, num_bytes]} if capacity else {})
        if capacity:
            most = max(len(own) for own in ids)
            assert num_bytes <= expert_bytes_all_gather_form(most, group.size, HIDDEN, moe.top_k, 4)


@pytest.mark.parametrize(
    ("mesh", "transport"),
    [
        (Mesh(pcp=2, tp=2, dcp=4, ep=True), "shm"),
        (Mesh(dp=2, pcp=2, dcp=2, ep=True), "gloo"),
    ],
    ids=str,
)
def test_steps_equal_one_rank(mesh: Mesh, transport: str):
    run_ranks(steps, mesh.world_size, MOE, COUNTS, mesh=mesh, transport=transport)


def test_eight_ranks_sixty_four_experts_top_4():
    mesh = Mesh(pcp=8, ep=True)
    moe = replace(MOE, num_experts=64, top_k=4)
    run_ranks(steps, 8, moe, [((40, 37, 40, 0, 40, 39, 40, 40), (2, 0, 1)), ((24,), (0,))], mesh=mesh)
