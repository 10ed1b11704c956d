"""One MoE layer on any mesh: tokens for every rank, and every rank's layer made from one whole layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefold.config import MoEConfig
from prefold.distributed.mesh import Mesh
from prefold.layers.expert_parallel import ExpertParallel, ExpertPlan, TokenShare, dispatch_capacity
from prefold.layers.linear import Env
from prefold.layers.moe import MoE
from prefold.testing.threads import single_rank
from prefold.workspace import Workspace


def whole_layer(moe: MoEConfig, hidden_size: int, seed: int = 0) -> MoE:
    """A layer with all experts on one rank, float32, random weights."""
    group: Any = single_rank()
    env = Env(group, Workspace(poison=True), torch.float32, torch.float32, "cpu")
    layer = MoE(hidden_size, moe, False, "out", env)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


def checkpoint_of(layer: MoE, stacked: bool) -> dict[str, torch.Tensor]:
    """The tensors of a whole layer as a checkpoint has them, its experts stacked or apart."""
    tensors: dict[str, torch.Tensor] = {"mlp.gate.weight": layer.router.weight}
    if layer.router.bias is not None:
        tensors["mlp.gate.e_score_correction_bias"] = layer.router.bias
    if layer.shared is not None:
        gate, up = layer.shared.gate_up.weight.chunk(2)
        tensors["mlp.shared_experts.gate_proj.weight"] = gate
        tensors["mlp.shared_experts.up_proj.weight"] = up
        tensors["mlp.shared_experts.down_proj.weight"] = layer.shared.down.weight
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


class RankLayer:
    """The part of `whole` that one rank of a mesh holds.

    Attributes:
        expert_elements: elements of the checkpoint's routed experts that were read.
    """

    def __init__(
        self,
        groups: dict[str, Any],
        whole: MoE,
        stacked: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        workspace = Workspace(poison=True)
        self._parallel = ExpertParallel(groups, whole.moe.num_experts, workspace)
        env = Env(groups["tp"], workspace, torch.float32, dtype, "cpu", self._parallel)
        self._dtype = dtype
        self._layer = MoE(whole.router.weight.shape[1], whole.moe, False, "out", env)
        tensors = checkpoint_of(whole, stacked)
        self.expert_elements = 0
        weights = {weight.name: weight for weight in self._layer.weights("mlp", tensors.keys())}
        assert weights.keys() == tensors.keys()
        for name, weight in weights.items():
            assert weight.shape == tuple(tensors[name].shape), name
            for slices, destination in weight.parts:
                destination.copy_(tensors[name][slices])
                self.expert_elements += destination.numel() * (".experts." in name)

    def __call__(self, batch: MoEBatch, rank: int) -> torch.Tensor:
        """A step of this layer alone: [prefill + decode tokens of `rank`, hidden]."""
        self._parallel.begin_step(batch.plan(rank))
        return self._layer(batch.local(rank).to(self._dtype, copy=True)).clone()


@dataclass(frozen=True)
class MoEBatch:
    """Tokens [n, hidden] of a step on all ranks.

    Attributes:
        prefill: by (dp, pcp), the same on all ranks of a TP group.
        decode: by (dp, unit), the same on all ranks of a unit: a `dcp_pcp` group and their TP peers.
    """

    mesh: Mesh
    prefill: list[list[torch.Tensor]]
    decode: list[list[torch.Tensor]]

    @classmethod
    def random(
        cls, mesh: Mesh, hidden_size: int, prefill: Sequence[int], decode: Sequence[int], seed: int = 0
    ) -> MoEBatch:
        """`prefill`, `decode`: numbers of tokens, taken in turn by (dp, pcp) and by (dp, unit)."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(counts: Sequence[int], per_replica: int) -> list[list[torch.Tensor]]:
            numbers = [counts[i % len(counts)] for i in range(mesh.dp * per_replica)]
            drawn = [torch.randn(n, hidden_size, generator=generator) for n in numbers]
            return [drawn[d * per_replica : (d + 1) * per_replica] for d in range(mesh.dp)]

        return cls(mesh, tokens(prefill, mesh.pcp), tokens(decode, mesh.pcp // unit_size(mesh)))

    def _split(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.mesh.coords(rank)
        return self.prefill[at.dp][at.pcp], self.decode[at.dp][at.pcp // unit_size(self.mesh)]

    def local(self, rank: int) -> torch.Tensor:
        """[n, hidden] prefill tokens of a rank, then its decode tokens."""
        return torch.cat(self._split(rank))

    def plan(self, rank: int) -> ExpertPlan:
        u, tp = unit_size(self.mesh), self.mesh.tp
        capacities = [
            dispatch_capacity([len(x) for x in prefill], np.repeat([len(x) for x in decode], u), tp, u)
            for prefill, decode in zip(self.prefill, self.decode)
        ]
        prefill, decode = self._split(rank)
        return ExpertPlan(len(prefill), len(decode), max(capacities))

    def sent_ids(self, whole: MoE, rank: int) -> list[np.ndarray]:
        """[tokens, top_k] experts of the tokens that each rank of `rank`'s EP group sends."""
        ids = []
        for peer in self.mesh.group_of("ep", rank):
            unit = self.mesh.group_of("dcp_pcp", peer)
            at = self.mesh.coords(peer)
            share = TokenShare.of(self.plan(peer), at.tp, self.mesh.tp, unit.index(peer), len(unit))
            ids.append(whole.router(self.local(peer))[1].numpy()[share.rows])
        return ids


def unit_size(mesh: Mesh) -> int:
    """PCP ranks that compute the same decode tokens."""
    return min(mesh.dcp, mesh.pcp)
