"""The routed experts that a rank holds: their weights, and rows through them grouped by expert."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial

import numpy as np
import torch

from prefold.config import MoEConfig
from prefold.kernels import fused
from prefold.kernels.recording import again
from prefold.layers.bands import Bands
from prefold.layers.expert_parallel import Dispatch, ExpertParallel
from prefold.layers.layer import Layer
from prefold.layers.linear import Env, gated_mlp, prepared_mlp, tiles, widens
from prefold.layers.weight import Weight, parameter

AddRouted = Callable[[torch.Tensor], None]
"""Adds what the routed experts contribute to a layer's output [n, hidden], in place."""


class Experts(Layer):
    """Experts `held` (of all, by number), and of each of them one part of the intermediate dim.

    Args:
        held: may be empty.
        part, num_parts: this rank's part of the intermediate dim, which is cut in `num_parts` equal ones.

    Attributes:
        gate_up: [len(held), 2 * width, hidden], gate | up.
        down: [len(held), hidden, width].
        gate_up_bands, down_bands: of these, gate and up apart; an expert's are side by side.
    """

    def __init__(
        self, hidden_size: int, moe: MoEConfig, held: range, part: int, num_parts: int, env: Env
    ) -> None:
        super().__init__()
        assert moe.intermediate_size % num_parts == 0
        self.moe, self.held, self.env = moe, held, env
        self.width = moe.intermediate_size // num_parts
        self._columns = slice(part * self.width, (part + 1) * self.width)
        like = {"dtype": env.weight_dtype, "device": env.device}
        self.gate_up = parameter(len(held), 2 * self.width, hidden_size, **like)
        self.down = parameter(len(held), hidden_size, self.width, **like)
        self.gate_up_bands = Bands(self.gate_up, [self.width] * (2 * len(held)))
        self.down_bands = Bands(self.down, [hidden_size] * len(held))

    def add_(self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """out += the sum over each row's experts that are held here, times their weights.

        Args:
            out: [n, hidden].
            x: [n, hidden], rows may lie apart.
            weights, ids: [n, top_k] float32 and integers; an expert that is not held costs nothing.
        """
        if x.shape[0] < self.env.convert_from and x.dtype == torch.float32 and self._is_one_call:
            fused.experts_(out, x, weights, ids.long(), self.held.start, self.gate_up, self.down)
            return
        if widens(x, self.env) and self._is_one_call:
            wide = fused.convert(x, self.env.workspace.get("moe.wide", x.shape, torch.float32))
            total = fused.convert(out, self.env.workspace.get("moe.wide_result", x.shape, torch.float32))
            fused.experts_(total, wide, weights, ids.long(), self.held.start, self.gate_up, self.down)
            fused.convert(total, out)
            return
        again(self._add_grouped, out, x, weights, ids)

    def _add_grouped(
        self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """`add_`, each expert's rows together."""
        workspace, hidden = self.env.workspace, x.shape[1]
        order, counts = group_by_expert(ids.cpu().numpy(), self.held)
        ends = counts.cumsum()
        pairs = torch.from_numpy(order[: counts.sum()]).to(x.device)
        rows = pairs // ids.shape[1]
        row_weights = weights.flatten()[pairs].to(x.dtype)[:, None]
        current, mlp = -1, ((), ())
        for tile in tiles(len(rows)):
            tile_x = workspace.get("moe.rows", (tile.stop - tile.start, hidden), x.dtype)
            torch.index_select(x, 0, rows[tile], out=tile_x)
            result = workspace.get("moe.result", tile_x.shape, x.dtype)
            for expert, part in experts_in(tile, ends):
                if expert != current:
                    current = expert
                    gate_up, down = self.gate_up_bands.take(2 * expert, 2), self.down_bands.take(expert, 1)
                    mlp = prepared_mlp(gate_up, down, int(counts[expert]), self.env)
                gated_mlp(tile_x[part], *mlp, result[part], self.env)
            out.index_add_(0, rows[tile], result.mul_(row_weights[tile]))

    @property
    def _is_one_call(self) -> bool:
        """Whether a native kernel computes few rows by all of their experts."""
        is_plain = not (self.gate_up_bands.is_released or self.down_bands.is_released)
        return is_plain and fused.can_multiply(self.gate_up, self.down)

    def weights(self, prefix: str, names: Container[str]) -> Iterator[Weight]:
        """`names`: the checkpoint's tensors. They tell whether its experts are stacked or apart."""
        if f"{prefix}.gate_up_proj" in names:
            return self._stacked(prefix)
        return self._apart(prefix)

    def _apart(self, prefix: str) -> Iterator[Weight]:
        """Also names the tensors of experts that are not held, of which no part is read."""
        width, full, hidden = self.width, self.moe.intermediate_size, self.gate_up.shape[2]
        in_, out = (self._columns, slice(0, hidden)), (slice(0, hidden), self._columns)
        for i in range(self.moe.num_experts):
            names = [f"{prefix}.{i}.{name}_proj.weight" for name in ("gate", "up", "down")]
            shapes = [(full, hidden), (full, hidden), (hidden, full)]
            if i not in self.held:
                yield from (Weight(name, shape, ()) for name, shape in zip(names, shapes, strict=True))
                continue
            expert = i - self.held.start
            gate, up = self.gate_up[expert].split(width)
            yield Weight(names[0], shapes[0], ((in_, gate),), self.gate_up_bands, 2 * expert)
            yield Weight(names[1], shapes[1], ((in_, up),), self.gate_up_bands, 2 * expert + 1)
            yield Weight(names[2], shapes[2], ((out, self.down[expert]),), self.down_bands, expert)

    def _stacked(self, prefix: str) -> Iterator[Weight]:
        width, full, hidden = self.width, self.moe.intermediate_size, self.gate_up.shape[2]
        num_experts = self.moe.num_experts
        experts, whole_hidden = slice(self.held.start, self.held.stop), slice(0, hidden)
        parts = []
        for half in range(2):
            start = half * full + self._columns.start
            slices = (experts, slice(start, start + width), whole_hidden)
            parts.append((slices, self.gate_up[:, half * width : (half + 1) * width]))
        yield Weight(f"{prefix}.gate_up_proj", (num_experts, 2 * full, hidden), tuple(parts))
        down = (((experts, whole_hidden, self._columns), self.down),)
        yield Weight(f"{prefix}.down_proj", (num_experts, hidden, full), down)


class TensorParallelExperts(Experts):
    """Every expert, split over its intermediate dim by TP: a rank adds its summand for all rows."""

    def __init__(self, hidden_size: int, moe: MoEConfig, env: Env) -> None:
        super().__init__(hidden_size, moe, range(moe.num_experts), env.tp.rank, env.tp.size, env)

    def start(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> AddRouted:
        """x [n, hidden]; weights, ids [n, top_k]. Nothing travels, so nothing is begun."""
        return lambda out: self.add_(out, x, weights, ids)


class WholeExperts(Experts):
    """Whole experts: `parallel.held` of them on this rank, the rest elsewhere."""

    def __init__(self, hidden_size: int, moe: MoEConfig, parallel: ExpertParallel, env: Env) -> None:
        super().__init__(hidden_size, moe, parallel.held, 0, 1, env)
        self.parallel = parallel
        self._sent: Dispatch | None = None

    def start(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> AddRouted:
        """Send tokens off. What is returned computes the experts on those that arrive, and gets back
        this rank's rows: one exchange each way. x [n, hidden]; weights, ids [n, top_k]."""
        again(self._send, x, weights, ids)
        return partial(again, self._answer)

    def _send(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        has_tokens = self.parallel.capacity_tokens > 0
        self._sent = self.parallel.dispatch(x, weights, ids) if has_tokens else None

    def _answer(self, out: torch.Tensor) -> None:
        """Compute what has arrived, and add to `out` what comes back."""
        if self._sent is None:
            return
        received, counts = self.parallel.receive(self._sent)
        result = self.env.workspace.get("ep.result", received.hidden.shape, out.dtype).zero_()
        self.add_(result, received.hidden, received.weights, received.ids)
        self.parallel.combine_(out, self._sent, result, counts)


def group_by_expert(ids: np.ndarray, held: range) -> tuple[np.ndarray, np.ndarray]:
    """(row, choice) pairs [n, top_k], flattened and sorted by expert: (places of pairs, pairs per expert).

    Pairs keep their order within an expert; those whose expert is not held come last and are not counted.

    >>> group_by_expert(np.array([[3, 2], [0, 3], [2, 1]]), held=range(2, 4))
    (array([1, 4, 0, 3, 2, 5]), array([2, 2]))
    """
    # 16 bits are sorted by radix. What lies below `held` wraps round to large numbers.
    local = np.minimum((ids.ravel() - held.start).astype(np.uint16), len(held))
    counts = np.bincount(local, minlength=len(held) + 1)
    return local.argsort(kind="stable"), counts[:-1]


def experts_in(tile: slice, ends: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Experts with pairs in `tile`, and the place of those in the tile; pairs are sorted by expert.

    `ends` [experts]: where each expert's pairs end.

    >>> list(experts_in(slice(4, 8), np.array([3, 5, 5, 9])))
    [(1, slice(0, 1, None)), (3, slice(1, 4, None))]
    """
    start = tile.start
    for expert in range(int(ends.searchsorted(start, "right")), len(ends)):
        if start == tile.stop:
            return
        stop = min(int(ends[expert]), tile.stop)
        if start < stop:
            yield expert, slice(start - tile.start, stop - tile.start)
            start = stop
