"""The weight of a layer in bands of rows, each a part of one checkpoint tensor, floats or quantised."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from prefold.kernels.quantized import QuantizedMatrix

Band = torch.Tensor | QuantizedMatrix
"""Rows of a weight [rows, columns]."""


class Bands:
    """The rows of a parameter [..., columns], all dims but the last one flattened.

    They are one tensor until the parameter is released; from then on each band has memory of its own, in
    whatever form it was put here.

    Args:
        heights: rows of each band.
    """

    def __init__(self, parameter: nn.Parameter, heights: Sequence[int]) -> None:
        self._parameter = parameter
        self._starts = [0, *accumulate(heights)]
        assert self._starts[-1] * parameter.shape[-1] == parameter.numel()
        self._released: list[Band] | None = None
        self._all: tuple[Band, ...] = (parameter.flatten(0, -2),)

    @property
    def is_released(self) -> bool:
        return self._released is not None

    def release(self) -> None:
        """Give the parameter's memory back, whatever it holds."""
        if self._released is None:
            parameter = self._parameter
            parameter.data = parameter.new_empty((0, parameter.shape[-1]))
            nothing: list[Band] = [parameter.data]
            self._released = nothing * (len(self._starts) - 1)
            self._all = tuple(self._released)

    def put(self, index: int, band: Band) -> None:
        """Band `index`, after `release`."""
        assert self._released is not None
        assert band.shape[0] == self._starts[index + 1] - self._starts[index], (band.shape, index)
        self._released[index] = band
        self._all = tuple(self._released)

    def take(self, first: int = 0, count: int | None = None) -> tuple[Band, ...]:
        """`count` bands from `first` on (default: to the last): one tensor as long as nothing is released."""
        if first == 0 and count is None:
            return self._all
        end = len(self._starts) - 1 if count is None else first + count
        if self._released is not None:
            return tuple(self._released[first:end])
        rows = self._parameter.flatten(0, -2)
        return (rows[self._starts[first] : self._starts[end]],)

    @property
    def num_rows(self) -> int:
        """Of all bands."""
        return self._starts[-1]

    @property
    def num_bytes(self) -> int:
        """Of what was put here."""
        bands = self._released or ()
        return sum(b.num_bytes if isinstance(b, QuantizedMatrix) else b.nbytes for b in bands)


def weight_bytes(model: nn.Module) -> int:
    """Memory of a model's parameters and of what its bands hold instead."""
    held = (bands for module in model.modules() for bands in vars(module).values() if type(bands) is Bands)
    return sum(p.nbytes for p in model.parameters()) + sum(bands.num_bytes for bands in held)
