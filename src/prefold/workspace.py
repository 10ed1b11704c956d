"""Named buffers that are allocated once and used again in every layer and step.

On CPU a fresh large allocation costs more than the copy into it (page faults), so whatever is as
large as a batch lives here. A buffer is named after its role ("mlp.gate_up"), not its layer.

A rank's workspace is planned (`memory.buffers`): a buffer is allocated as large as it can become, so that it
never moves. Pages of memory that no step has needed yet are not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

NAN_BYTE = 0xFF
"""NaN, where bytes stand for floats: float32, bfloat16, and rows of the KV cache in FP8."""


class Workspace:
    """A rank's scratch memory. Contents of a buffer are undefined when it is handed out.

    Asking for a name again returns the same memory: the caller must be done with the earlier view.
    With `poison` every buffer is filled with NaN when handed out, so that a read of stale contents
    shows in the result.

    Args:
        planned: bytes by name. Other buffers, and larger ones, are allocated anew when they have to grow.

    Attributes:
        generation: how often a buffer was allocated. Between two allocations none of them moves.
        used: most elements that were asked for, by name and dtype.
        num_bytes: of all that is `used`.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        poison: bool = False,
        planned: Mapping[str, int] | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._poison = poison
        self._planned = planned or {}
        self.generation = 0
        self.used: dict[tuple[str, torch.dtype], int] = {}
        self.num_bytes = 0
        self._flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._last: dict[tuple[str, torch.dtype], torch.Tensor] = {}  # views that were handed out

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view of `shape`; grows the buffer if it is too small (first steps only)."""
        key = name, dtype
        view = self._last.get(key)
        if view is None or view.shape != tuple(shape):
            view = self._last[key] = self._view(key, shape)
        if self._poison and dtype.is_floating_point:
            view.fill_(float("nan"))
        elif self._poison and dtype == torch.uint8:
            view.fill_(NAN_BYTE)
        return view

    def _view(self, key: tuple[str, torch.dtype], shape: Sequence[int]) -> torch.Tensor:
        numel = math.prod(shape)
        if numel > (before := self.used.get(key, 0)):
            self.used[key] = numel
            self.num_bytes += (numel - before) * key[1].itemsize
        flat = self._flat.get(key)
        if flat is None or flat.numel() < numel:
            name, dtype = key
            most = max(numel, self._planned.get(name, 0) // dtype.itemsize)
            flat = torch.empty(most, dtype=dtype, device=self._device)
            self._flat[key] = flat
            self.generation += 1
        return flat[:numel].view(*shape)

    def carve(
        self, name: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """Contiguous tensors of `shapes`, side by side in one buffer."""
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.split(self.get(name, (sum(sizes),), dtype), sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def keep(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A copy of x in the buffer `name`."""
        return self.get(name, x.shape, x.dtype).copy_(x)
