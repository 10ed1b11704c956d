"""Linear layers: replicated, split over columns (outputs) and split over rows (inputs).

Weights keep the checkpoint's dtype, or stay quantised; activations have the compute dtype, which may
differ. Results
live in workspace buffers named after the layer's role: a result is valid until a layer of the same
role runs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from prefold.kernels import fused, library, native
from prefold.kernels.quantized import QuantizedMatrix
from prefold.kernels.recording import again
from prefold.layers.bands import Band, Bands
from prefold.layers.layer import Layer
from prefold.layers.weight import Weight, parameter, shard, whole
from prefold.limits import EXPAND_FROM, EXPANDED_TILE, MLP_TILE, WIDENED_ROWS

if TYPE_CHECKING:
    from prefold.distributed.group import Group
    from prefold.layers.expert_parallel import ExpertParallel
    from prefold.workspace import Workspace

CONVERT_WEIGHT_FROM = 48
"""Rows from which converting a weight to the compute dtype pays; with fewer, the rows are converted.

A few rows are bound by reading the weight, which a conversion would read, write and read again.
Measured on a CPU: bfloat16 wins below about 40 rows, converting wins above.
"""

CONVERT_ONCE_FROM = 256
"""The same where native code converts a weight block by block, in the cache: level at 256 rows."""

DELTA = "layer.delta"
"""Role of what attention and MLP add to the residual stream: each is added before the other is computed."""


@dataclass(frozen=True)
class Env:
    """What every layer needs to be built: its TP group, scratch memory and dtypes.

    `experts`: whole experts live on ranks of the EP group; None: a part of each is on every TP rank.
    """

    tp: Group
    workspace: Workspace
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: str
    experts: ExpertParallel | None = None

    @cached_property
    def convert_from(self) -> int:
        """Rows from which a weight is converted as a whole."""
        is_native = native.serves(self.compute_dtype, self.weight_dtype, self.device == "cpu")
        return CONVERT_ONCE_FROM if is_native else CONVERT_WEIGHT_FROM


def prepared(bands: Sequence[Band], num_rows: int, name: str, env: Env) -> tuple[Band, ...]:
    """A weight in the dtype in which `num_rows` rows meet it best: bands that are floats as they are, or
    copies in buffers `name`."""
    if env.weight_dtype == env.compute_dtype or num_rows < env.convert_from:
        return tuple(bands)
    return tuple(
        env.workspace.get(f"{name}.{i}", band.shape, env.compute_dtype).copy_(band)
        if isinstance(band, torch.Tensor)
        else band
        for i, band in enumerate(bands)
    )


def scale_(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x [n, width] times a number, in place; most models' numbers are 1."""
    return fused.scale_add_(x, factor)


def widens(x: torch.Tensor, env: Env) -> bool:
    """Whether rows in bfloat16 are few enough to be multiplied as float32."""
    return native.serves_as_float32(x, env.weight_dtype, WIDENED_ROWS)


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = x @ weight.T for x [n, k], weight [m, k], out [n, m]; x and out share a dtype."""
    if weight.dtype == x.dtype:
        return again(_matmul_with_torch, x, weight, out)
    if native.can_multiply(x, weight, out):
        return native.multiply(x, weight, out)
    return out.copy_(F.linear(x.to(weight.dtype), weight))


def _matmul_with_torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t(), out=out)


def multiply(x: torch.Tensor, bands: Sequence[Band], out: torch.Tensor, env: Env) -> torch.Tensor:
    """out = x @ weight.T for the bands of a weight."""
    start = 0
    for band in bands:
        part = out if len(bands) == 1 else out[:, start : start + band.shape[0]]
        if isinstance(band, QuantizedMatrix):
            _multiply_quantized(x, band, part, env)
        elif widens(x, env):
            wide = fused.convert(x, env.workspace.get("linear.wide", x.shape, torch.float32))
            result = env.workspace.get("linear.result", part.shape, torch.float32)
            fused.convert(matmul(wide, band, result), part)
        else:
            matmul(x, band, part)
        start += band.shape[0]
    return out


def _multiply_quantized(x: torch.Tensor, weight: QuantizedMatrix, out: torch.Tensor, env: Env) -> None:
    """As `matmul`. Many rows meet a tile of the weight's rows at a time, as floats."""
    num_rows, columns = x.shape[0], weight.shape[1]
    if num_rows < EXPAND_FROM and library.is_available():
        if x.dtype == torch.float32:
            weight.linear(x, out)
        else:
            wide = fused.convert(x, env.workspace.get("linear.wide", x.shape, torch.float32))
            result = env.workspace.get("linear.result", out.shape, torch.float32)
            fused.convert(weight.linear(wide, result), out)
        return
    step = max(1, EXPANDED_TILE // columns)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, min(start + step, weight.shape[0]))
        tile = env.workspace.get("quantized.tile", (rows.stop - start, columns), x.dtype)
        torch.mm(x, weight.expand(rows, tile).t(), out=out[:, rows])


def _multiply(x: torch.Tensor, bands: Bands, role: str, env: Env) -> torch.Tensor:
    """x @ weight.T in the buffer of `role`."""
    out = env.workspace.get(role, (x.shape[0], bands.num_rows), x.dtype)
    return multiply(x, prepared(bands.take(), x.shape[0], "linear.weight", env), out, env)


class Linear(Layer):
    """x [n, in_features] -> [n, out_features], the same weight on every rank.

    `bands`: outputs of each of the checkpoint's modules that lie side by side in this one, if several.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        role: str,
        env: Env,
        bands: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.role, self.env = role, env
        self.weight = parameter(out_features, in_features, dtype=env.weight_dtype, device=env.device)
        self.bands = Bands(self.weight, bands or [out_features])
        # Biases are added to activations, so they have the compute dtype.
        self.bias = parameter(out_features, dtype=env.compute_dtype, device=env.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused.scale_add_(_multiply(x, self.bands, self.role, self.env), bias=self.bias)

    def weights(self, prefixes: dict[str, int]) -> Iterator[Weight]:
        """`prefixes`: checkpoint modules whose outputs lie side by side in this one, and their widths."""
        start = 0
        for band, (prefix, width) in enumerate(prefixes.items()):
            rows = slice(start, start + width)
            yield whole(f"{prefix}.weight", self.weight[rows], self.bands, band)
            if self.bias is not None:
                yield whole(f"{prefix}.bias", self.bias[rows])
            start += width
        assert start == self.weight.shape[0]


class ColumnParallelLinear(Layer):
    """x [n, in_features] -> this rank's share [n, out_features / TP] of one or several projections.

    `out_features` lists projections of the same input; a rank's result holds its share of each,
    side by side (gate | up).

    Args:
        shares: into how many different shares each projection is cut, default TP. With fewer, which must
            divide TP, neighbours hold the same one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: list[int],
        bias: bool,
        role: str,
        env: Env,
        shares: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.shares = shares or [env.tp.size] * len(out_features)
        sizes = list(zip(out_features, self.shares, strict=True))
        assert all(width % share == 0 and env.tp.size % share == 0 for width, share in sizes), sizes
        self.role, self.env = role, env
        self.widths = [width // share for width, share in sizes]
        total = sum(self.widths)
        self.weight = parameter(total, in_features, dtype=env.weight_dtype, device=env.device)
        self.bands = Bands(self.weight, self.widths)
        self.bias = parameter(total, dtype=env.compute_dtype, device=env.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused.scale_add_(_multiply(x, self.bands, self.role, self.env), bias=self.bias)

    def weights(self, *prefixes: str) -> Iterator[Weight]:
        tp = self.env.tp
        start = 0
        projections = zip(prefixes, self.widths, self.shares, strict=True)
        for band, (prefix, width, shares) in enumerate(projections):
            rows = slice(start, start + width)
            own = tp.rank * shares // tp.size
            yield shard(f"{prefix}.weight", self.weight[rows], 0, own, shares, self.bands, band)
            if self.bias is not None:
                yield shard(f"{prefix}.bias", self.bias[rows], 0, own, shares)
            start += width


class RowParallelLinear(Layer):
    """x [n, in_features / TP], this rank's share of the input -> [n, out_features], whole on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool, role: str, env: Env) -> None:
        super().__init__()
        assert in_features % env.tp.size == 0
        self.role, self.env = role, env
        self.weight = parameter(
            out_features, in_features // env.tp.size, dtype=env.weight_dtype, device=env.device
        )
        self.bands = Bands(self.weight, [out_features])
        self.bias = parameter(out_features, dtype=env.compute_dtype, device=env.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.finish(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand [n, out_features], without the bias."""
        return _multiply(x, self.bands, self.role, self.env)

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' summands and add the bias once, in place."""
        return fused.scale_add_(self.env.tp.all_reduce(out), bias=self.bias)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield shard(f"{prefix}.weight", self.weight, 1, self.env.tp.rank, self.env.tp.size, self.bands)
        if self.bias is not None:
            yield whole(f"{prefix}.bias", self.bias)


class GatedMLP(Layer):
    """down(silu(gate(x)) * up(x)), split over the intermediate dim. x [n, hidden] -> [n, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, role: str, env: Env) -> None:
        super().__init__()
        self.env = env
        self.gate_up = ColumnParallelLinear(hidden_size, [intermediate_size] * 2, bias, "mlp.gate_up", env)
        self.down = RowParallelLinear(intermediate_size, hidden_size, bias, role, env)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.finish(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, to be given to `down.finish`."""
        out = self.env.workspace.get(self.down.role, x.shape, x.dtype)
        mlp = prepared_mlp(self.gate_up.bands.take(), self.down.bands.take(), x.shape[0], self.env)
        for rows in tiles(x.shape[0]):
            gated_mlp(x[rows], *mlp, out[rows], self.env, self.gate_up.bias)
        return out

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.gate_up.weights(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        yield from self.down.weights(f"{prefix}.down_proj")


def tiles(num_rows: int) -> Iterator[slice]:
    """The rows in tiles of MLP_TILE."""
    for start in range(0, num_rows, MLP_TILE):
        yield slice(start, min(start + MLP_TILE, num_rows))


def prepared_mlp(
    gate_up: Sequence[Band], down: Sequence[Band], num_rows: int, env: Env
) -> tuple[tuple[Band, ...], tuple[Band, ...]]:
    """Both weights of an MLP, see `prepared`."""
    return prepared(gate_up, num_rows, "mlp.w_gate_up", env), prepared(down, num_rows, "mlp.w_down", env)


def gated_mlp(
    x: torch.Tensor,
    w_gate_up: Sequence[Band],
    w_down: Sequence[Band],
    out: torch.Tensor,
    env: Env,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One tile: x [n, hidden] -> out [n, hidden]. `w_gate_up` are the bands of [2 * width, hidden], `w_down`
    those of [hidden, width].

    `bias` [2 * width] belongs to gate and up.
    """
    if bias is None and len(w_gate_up) == len(w_down) == 1 and x.dtype == torch.float32:
        one, other = w_gate_up[0], w_down[0]
        # Weights that few rows meet were not converted.
        if (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and fused.can_multiply(one, other)
        ):
            return fused.gated_mlp(x, one, other, out)
    width = sum(band.shape[0] for band in w_gate_up)
    gate_up = env.workspace.get("mlp.gate_up", (x.shape[0], width), x.dtype)
    multiply(x, w_gate_up, gate_up, env)
    fused.scale_add_(gate_up, bias=bias)
    if fused.can_fuse(gate_up):
        return multiply(fused.gate_(gate_up), w_down, out, env)
    gate, up = gate_up.chunk(2, dim=-1)
    return multiply(F.silu(gate, inplace=True).mul_(up), w_down, out, env)
