"""Linear layers: replicated, split over columns (outputs) and split over rows (inputs).

Weights keep the checkpoint's dtype; activations have the compute dtype, which may differ. Results
live in workspace buffers named after the layer's role: a result is valid until a layer of the same
role runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from prefold.layers.weight import Weight, parameter, shard, whole

if TYPE_CHECKING:
    from prefold.distributed.group import Group
    from prefold.workspace import Workspace

CONVERT_WEIGHT_FROM = 48
"""Rows from which converting a weight to the compute dtype pays; with fewer, the rows are converted.

A few rows are bound by reading the weight, which a conversion would read, write and read again.
Measured on a CPU: bfloat16 wins below about 40 rows, converting wins above.
"""


@dataclass(frozen=True)
class Env:
    """What every layer needs to be built: its TP group, scratch memory and dtypes."""

    tp: Group
    workspace: Workspace
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: str


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """out = x @ weight.T for x [n, k], weight [m, k], out [n, m]; x and out share the compute dtype."""
    if weight.dtype == x.dtype:
        return torch.mm(x, weight.t(), out=out)
    if x.shape[0] >= CONVERT_WEIGHT_FROM:
        converted = workspace.get("linear.weight", weight.shape, x.dtype)
        converted.copy_(weight)
        return torch.mm(x, converted.t(), out=out)
    return out.copy_(F.linear(x.to(weight.dtype), weight))


class Linear(nn.Module):
    """x [n, in_features] -> [n, out_features], the same weight on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool, role: str, env: Env) -> None:
        super().__init__()
        self.role, self.env = role, env
        self.weight = parameter(out_features, in_features, dtype=env.weight_dtype, device=env.device)
        # Biases are added to activations, so they have the compute dtype.
        self.bias = parameter(out_features, dtype=env.compute_dtype, device=env.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.env.workspace.get(self.role, (x.shape[0], self.weight.shape[0]), x.dtype)
        matmul(x, self.weight, out, self.env.workspace)
        return out if self.bias is None else out.add_(self.bias)

    def weights(self, prefixes: dict[str, int]) -> Iterator[Weight]:
        """`prefixes`: checkpoint modules whose outputs lie side by side in this one, and their widths."""
        start = 0
        for prefix, width in prefixes.items():
            rows = slice(start, start + width)
            yield whole(f"{prefix}.weight", self.weight[rows])
            if self.bias is not None:
                yield whole(f"{prefix}.bias", self.bias[rows])
            start += width
        assert start == self.weight.shape[0]


class ColumnParallelLinear(nn.Module):
    """x [n, in_features] -> this rank's share [n, out_features / TP] of one or several projections.

    `out_features` lists projections of the same input; a rank's result holds its share of each,
    side by side (gate | up).
    """

    def __init__(self, in_features: int, out_features: list[int], bias: bool, role: str, env: Env) -> None:
        super().__init__()
        assert all(width % env.tp.size == 0 for width in out_features)
        self.role, self.env = role, env
        self.widths = [width // env.tp.size for width in out_features]
        total = sum(self.widths)
        self.weight = parameter(total, in_features, dtype=env.weight_dtype, device=env.device)
        self.bias = parameter(total, dtype=env.compute_dtype, device=env.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.env.workspace.get(self.role, (x.shape[0], self.weight.shape[0]), x.dtype)
        matmul(x, self.weight, out, self.env.workspace)
        return out if self.bias is None else out.add_(self.bias)

    def weights(self, *prefixes: str) -> Iterator[Weight]:
        tp = self.env.tp
        start = 0
        for prefix, width in zip(prefixes, self.widths, strict=True):
            rows = slice(start, start + width)
            yield shard(f"{prefix}.weight", self.weight[rows], 0, tp.rank, tp.size)
            if self.bias is not None:
                yield shard(f"{prefix}.bias", self.bias[rows], 0, tp.rank, tp.size)
            start += width


class RowParallelLinear(nn.Module):
    """x [n, in_features / TP], this rank's share of the input -> [n, out_features], whole on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool, role: str, env: Env) -> None:
        super().__init__()
        assert in_features % env.tp.size == 0
        self.role, self.env = role, env
        self.weight = parameter(
            out_features, in_features // env.tp.size, dtype=env.weight_dtype, device=env.device
        )
        self.bias = parameter(out_features, dtype=env.compute_dtype, device=env.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.finish(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand [n, out_features], without the bias."""
        out = self.env.workspace.get(self.role, (x.shape[0], self.weight.shape[0]), x.dtype)
        return matmul(x, self.weight, out, self.env.workspace)

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' summands and add the bias once, in place."""
        self.env.tp.all_reduce(out)
        return out if self.bias is None else out.add_(self.bias)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield shard(f"{prefix}.weight", self.weight, 1, self.env.tp.rank, self.env.tp.size)
        if self.bias is not None:
            yield whole(f"{prefix}.bias", self.bias)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), split over the intermediate dim. x [n, hidden] -> [n, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, env: Env) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(hidden_size, [intermediate_size] * 2, bias, "mlp.gate_up", env)
        self.down = RowParallelLinear(intermediate_size, hidden_size, bias, "mlp.out", env)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_and_mul_(self.gate_up(x)))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, to be given to `down.finish`."""
        return self.down.partial(silu_and_mul_(self.gate_up(x)))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.gate_up.weights(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        yield from self.down.weights(f"{prefix}.down_proj")


def silu_and_mul_(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [n, 2 * width], written over the gate half; a view [n, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)
