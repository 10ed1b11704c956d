"""Mixture of experts: routing, and experts split over their intermediate dim by TP."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import nn

from prefold.config import MoEConfig
from prefold.layers.linear import Env, GatedMLP, gated_mlp, prepared_mlp, tiles
from prefold.layers.weight import Weight, parameter, shard, whole


class Router(nn.Module):
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
        if x.dtype != torch.float32:
            x = workspace.get("moe.router_input", x.shape, torch.float32).copy_(x)
        scores = workspace.get("moe.scores", (x.shape[0], self.moe.num_experts), torch.float32)
        torch.mm(x, self.weight.t(), out=scores)
        return self.select(scores)

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from router logits [n, num_experts], which are overwritten with the scores."""
        moe = self.moe
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


class MoE(nn.Module):
    """Routed experts and shared experts; x [n, hidden] -> [n, hidden] with one all-reduce.

    Every rank routes all its tokens alike (routing is replicated over TP) and computes its share of
    every expert's intermediate dim.
    """

    def __init__(self, hidden_size: int, moe: MoEConfig, bias: bool, role: str, env: Env) -> None:
        super().__init__()
        assert moe.intermediate_size % env.tp.size == 0
        self.moe, self.role, self.env = moe, role, env
        self.router = Router(hidden_size, moe, env)
        self.width = moe.intermediate_size // env.tp.size
        like = {"dtype": env.weight_dtype, "device": env.device}
        self.gate_up = parameter(moe.num_experts, 2 * self.width, hidden_size, **like)
        self.down = parameter(moe.num_experts, hidden_size, self.width, **like)
        shared_size = moe.intermediate_size * moe.num_shared_experts
        self.shared = GatedMLP(hidden_size, shared_size, bias, role, env) if shared_size else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        if self.shared is not None:
            out = self.shared.partial(x)
        else:
            out = self.env.workspace.get(self.role, x.shape, x.dtype).zero_()
        self._add_experts_(out, x, weights, ids)
        if self.shared is not None:
            return self.shared.down.finish(out)
        return self.env.tp.all_reduce(out)

    def _add_experts_(
        self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """out += sum over each token's experts, all [n, hidden] but weights and ids [n, top_k]."""
        workspace, hidden = self.env.workspace, x.shape[1]
        flat_ids = ids.flatten()
        order = flat_ids.argsort(stable=True)
        tokens = order // self.moe.top_k
        sorted_weights = weights.flatten()[order].to(x.dtype)
        start = 0
        for expert, count in enumerate(flat_ids.bincount(minlength=self.moe.num_experts).tolist()):
            if count == 0:
                continue
            mlp = prepared_mlp(self.gate_up[expert], self.down[expert], count, self.env)
            for tile in tiles(count):
                mine = slice(start + tile.start, start + tile.stop)
                rows = workspace.get("moe.rows", (tile.stop - tile.start, hidden), x.dtype)
                torch.index_select(x, 0, tokens[mine], out=rows)
                result = gated_mlp(rows, *mlp, workspace.get("moe.result", rows.shape, x.dtype), self.env)
                out.index_add_(0, tokens[mine], result.mul_(sorted_weights[mine, None]))
            start += count

    def weights(self, prefix: str, names: Container[str]) -> Iterator[Weight]:
        """`names`: the checkpoint's tensors. They tell whether its experts are stacked or apart."""
        yield from self.router.weights(f"{prefix}.gate")
        if self.shared is not None:
            yield from self.shared.weights(f"{prefix}.shared_experts")
        if f"{prefix}.experts.gate_up_proj" in names:
            yield from self._stacked(f"{prefix}.experts")
        else:
            yield from self._apart(f"{prefix}.experts")

    def _apart(self, prefix: str) -> Iterator[Weight]:
        tp, width = self.env.tp, self.width
        for i in range(self.moe.num_experts):
            yield shard(f"{prefix}.{i}.gate_proj.weight", self.gate_up[i, :width], 0, tp.rank, tp.size)
            yield shard(f"{prefix}.{i}.up_proj.weight", self.gate_up[i, width:], 0, tp.rank, tp.size)
            yield shard(f"{prefix}.{i}.down_proj.weight", self.down[i], 1, tp.rank, tp.size)

    def _stacked(self, prefix: str) -> Iterator[Weight]:
        tp, width, full = self.env.tp, self.width, self.moe.intermediate_size
        experts, _, hidden = self.gate_up.shape
        parts = []
        for half in range(2):
            start = half * full + tp.rank * width
            slices = (slice(0, experts), slice(start, start + width), slice(0, hidden))
            parts.append((slices, self.gate_up[:, half * width : (half + 1) * width]))
        yield Weight(f"{prefix}.gate_up_proj", (experts, 2 * full, hidden), tuple(parts))
        yield shard(f"{prefix}.down_proj", self.down, 2, tp.rank, tp.size)
