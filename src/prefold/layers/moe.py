"""Mixture of experts: routing, shared experts, and the routed ones in one of two forms."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch

from prefold.config import MoEConfig
from prefold.kernels import fused
from prefold.kernels.recording import again
from prefold.layers.experts import TensorParallelExperts, WholeExperts
from prefold.layers.layer import Layer
from prefold.layers.linear import Env, GatedMLP
from prefold.layers.weight import Weight, parameter, whole

SCORED_ROWS = 32
"""Up to so many rows meet the router's weight in native code, which a recording can replay."""


class Router(Layer):
    """Chooses `top_k` experts per token and their weights, in float32."""

    def __init__(self, hidden_size: int, moe: MoEConfig, env: Env) -> None:
        super().__init__()
        self.moe, self.env = moe, env
        self.weight = parameter(moe.num_experts, hidden_size, dtype=torch.float32, device=env.device)
        has_bias = moe.topk_method == "noaux_tc"
        self.bias = parameter(moe.num_experts, dtype=torch.float32, device=env.device) if has_bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> weights float32 and expert ids int64, both [n, top_k], in no order."""
        workspace = self.env.workspace
        scores = workspace.get("moe.scores", (x.shape[0], self.moe.num_experts), torch.float32)
        if x.shape[0] <= SCORED_ROWS and fused.can_fuse(x):
            return self.select(fused.score(x, self.weight, scores))
        if x.dtype != torch.float32:
            x = workspace.get("moe.router_input", x.shape, torch.float32).copy_(x)
        return self.select(torch.mm(x, self.weight.t(), out=scores))

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from router logits [n, num_experts], which are overwritten with the scores."""
        moe = self.moe
        if fused.can_fuse(logits):
            return self._select_natively(logits)
        if moe.scoring_func == "softmax":
            scores = torch.softmax(logits, dim=-1, out=logits)
        else:
            scores = logits.sigmoid_()
        choice = self.env.workspace.get("moe.choice", scores.shape, torch.float32).copy_(scores)
        if self.bias is not None:
            choice.add_(self.bias)
        self._mask_groups_(choice)
        ids = choice.topk(moe.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if moe.norm_topk_prob:
            weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return weights.mul_(moe.routed_scaling_factor), ids

    def _select_natively(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe, shape = self.moe, (logits.shape[0], self.moe.top_k)
        weights = self.env.workspace.get("moe.weights", shape, torch.float32)
        ids = self.env.workspace.get("moe.ids", shape, torch.int64)
        softmax, groups = moe.scoring_func == "softmax", (1, 1, False)
        if moe.topk_method != "greedy":
            groups = (moe.n_group, moe.topk_group, moe.topk_method == "noaux_tc")
        scale = moe.routed_scaling_factor
        fused.route(logits, self.bias, weights, ids, softmax, groups, moe.norm_topk_prob, scale)
        return weights, ids

    def _mask_groups_(self, choice: torch.Tensor) -> None:
        """-inf for the experts outside a token's `topk_group` best groups."""
        moe = self.moe
        if moe.topk_method == "greedy" or moe.topk_group == moe.n_group:
            return
        grouped = choice.unflatten(-1, (moe.n_group, -1))
        if moe.topk_method == "group_limited_greedy":
            group_scores = grouped.amax(dim=-1)
        else:
            group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = group_scores.topk(moe.topk_group, dim=-1, sorted=False).indices
        unwanted = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        grouped.masked_fill_(unwanted[..., None], float("-inf"))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield whole(f"{prefix}.weight", self.weight)
        if self.bias is not None:
            yield whole(f"{prefix}.e_score_correction_bias", self.bias)


class MoE(Layer):
    """Routed experts and shared experts; x [n, hidden] -> [n, hidden] with one all-reduce over TP.

    Every rank routes all its tokens alike (routing is replicated over TP). Where the routed experts
    live, and how rows get there, is the business of `experts`: each rank has a part of every expert,
    or, with `env.experts`, whole experts. The shared expert is split over TP and computed while rows travel.
    """

    def __init__(self, hidden_size: int, moe: MoEConfig, bias: bool, role: str, env: Env) -> None:
        super().__init__()
        self.moe, self.role, self.env = moe, role, env
        self.router = Router(hidden_size, moe, env)
        if env.experts is None:
            self.experts = TensorParallelExperts(hidden_size, moe, env)
        else:
            self.experts = WholeExperts(hidden_size, moe, env.experts, env)
        shared_size = moe.intermediate_size * moe.num_shared_experts
        self.shared = GatedMLP(hidden_size, shared_size, bias, role, env) if shared_size else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        add_routed = self.experts.start(x, *self.router(x))
        if self.shared is not None:
            out = self.shared.partial(x)
        else:
            out = again(torch.Tensor.zero_, self.env.workspace.get(self.role, x.shape, x.dtype))
        add_routed(out)
        if self.shared is not None:
            return self.shared.down.finish(out)
        return self.env.tp.all_reduce(out)

    def weights(self, prefix: str, names: Container[str]) -> Iterator[Weight]:
        """`names`: the checkpoint's tensors. They tell whether its experts are stacked or apart."""
        yield from self.router.weights(f"{prefix}.gate")
        if self.shared is not None:
            yield from self.shared.weights(f"{prefix}.shared_experts")
        yield from self.experts.weights(f"{prefix}.experts", names)
