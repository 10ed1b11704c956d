"""Tensors of a GGUF file under Hugging Face names, any part of each as floats.

`gguf_file` parses the file and the gguf package dequantises; here are names, the order of rows, and slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from prefold.gguf_file import GGUFFile, GGUFTensor, hf_name
from prefold.kernels.quantized import KINDS, QuantizedMatrix
from prefold.quantization.catalog import StoredTensor
from prefold.quantization.source import OpenTensor, Read
from prefold.quantization.tensors import TILE

PERMUTED_ARCHITECTURES = ("llama", "smollm3")
"""Whose files keep the rows of q_proj and k_proj in the order that rotates neighbours."""

PLAIN_KINDS = ("F32", "F16", "BF16", "F64")

AUXILIARY = ("rope_freqs.weight",)
"""Tensors that are no weights of a model: scaling of rotary wavelengths."""


class GGUFTensors:
    """A GGUF file, or all parts of one; a `WeightSource`.

    Attributes:
        tensors: weights by Hugging Face name; an unknown one keeps its name.
    """

    def __init__(self, path: str | Path) -> None:
        """ValueError if the file cannot be parsed."""
        self.file = GGUFFile(path)
        self.name = self.file.path.name
        self._stored = {hf_name(tensor.name): tensor for tensor in self.file.tensors.values()}
        self.tensors = {
            name: StoredTensor(
                name,
                stored.shape,
                (stored.name,),
                problem=stored.problem,
                is_quantized=stored.kind.name not in PLAIN_KINDS,
                file=self.name,
            )
            for name, stored in self._stored.items()
            if name not in AUXILIARY
        }

    def open(self, names: Iterable[str]) -> Iterator[tuple[str, OpenTensor]]:
        """See `WeightSource`."""
        for name in names:
            keep = None
            if self.tensors[name].is_quantized:
                matrix = self.matrix(name)
                keep = partial(_keep, matrix)
            yield name, OpenTensor(self._reader(name), keep)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor in float32; ValueError for a type that is not supported."""
        stored = self._stored[name]
        if stored.problem:
            raise ValueError(f"{self.name}: {stored.problem}")
        out = torch.empty(stored.shape)
        self._reader(name)(tuple(slice(0, n) for n in out.shape), out)
        return out

    def auxiliary(self, name: str) -> torch.Tensor | None:
        """One of `AUXILIARY`, if the file has it."""
        return self.whole(name) if name in self._stored else None

    def matrix(self, name: str) -> GGUFMatrix:
        """A tensor of two dims as a `QuantizedTensor`."""
        return GGUFMatrix(self._stored[name], self._row_order(name))

    def _reader(self, name: str) -> Read:
        matrix = self.matrix(name)
        if len(self._stored[name].shape) == 1:
            return lambda slices, out: matrix.dequantize(slices[0], slice(0, 1), out[:, None])
        return lambda slices, out: matrix.dequantize(slices[0], slices[1], out)

    def _row_order(self, name: str) -> np.ndarray | None:
        module = name.split(".")[-2] if "." in name else ""
        if self.file.architecture not in PERMUTED_ARCHITECTURES or module not in ("q_proj", "k_proj"):
            return None
        heads = self.file.model_field("attention.head_count", required=True)
        if module == "k_proj":
            heads = self.file.model_field("attention.head_count_kv", heads)
        return row_order(self._stored[name].shape[0], heads)


class GGUFMatrix:
    """A tensor of a GGUF file as a `QuantizedTensor`; one of one dim [n] is taken as [n, 1].

    Args:
        stored: of one or two dims.
        order: [rows] which row of the file each row is; None: the same.
    """

    def __init__(self, stored: GGUFTensor, order: np.ndarray | None) -> None:
        from gguf import GGML_QUANT_SIZES

        self._type, self._order = stored.kind, order
        shape = stored.shape
        assert len(shape) <= 2
        self._shape = (*shape, 1)[:2]
        self._data = stored.data if len(shape) == 2 else stored.data.reshape(self._shape[0], -1)
        self._block, block_bytes = GGML_QUANT_SIZES[self._type]
        # Entries of `data` per block of values: floats are read as they are, all others as bytes.
        self._entries = block_bytes // self._data.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def keep(self, rows: slice, columns: slice, dtype: torch.dtype) -> QuantizedMatrix | None:
        """That part in quantised form, with values of `dtype`; None for types without a kernel, and
        for columns that cut a block."""
        kind, shape = self._type.name.lower(), (rows.stop - rows.start, columns.stop - columns.start)
        if kind not in KINDS or columns.start % self._block or columns.stop % self._block or 0 in shape:
            return None
        blocks = slice(columns.start // self._block, columns.stop // self._block)
        stored = slice(blocks.start * self._entries, blocks.stop * self._entries)
        codes = self._data[rows if self._order is None else self._order[rows], stored]
        return QuantizedMatrix(kind, shape, dtype, torch.from_numpy(np.array(codes)))

    def dequantize(self, rows: slice, columns: slice, out: torch.Tensor) -> None:
        """See `QuantizedTensor`."""
        from gguf import quants

        first, last = columns.start // self._block, -(-columns.stop // self._block)
        stored = slice(first * self._entries, last * self._entries)
        inner = slice(columns.start - first * self._block, columns.stop - first * self._block)
        if not out.numel():
            return
        step = max(1, TILE // ((last - first) * self._block))
        for start in range(rows.start, rows.stop, step):
            tile = slice(start, min(start + step, rows.stop))
            taken = self._data[tile if self._order is None else self._order[tile], stored]
            values = quants.dequantize(np.ascontiguousarray(taken), self._type)
            into = out[tile.start - rows.start : tile.stop - rows.start]
            # A copy where gguf hands out the file itself, which is not writable.
            values = values if values.flags.writeable else values.copy()
            into.copy_(torch.from_numpy(values)[:, inner])


def _keep(matrix: GGUFMatrix, slices: tuple[slice, ...], dtype: torch.dtype) -> QuantizedMatrix | None:
    return matrix.keep(slices[0], slices[1], dtype)


def row_order(num_rows: int, num_heads: int) -> np.ndarray:
    """[num_rows]: which row of a GGUF file's q_proj or k_proj each of Hugging Face's rows is.

    llama.cpp rotates neighbours, so its files interleave each head's halves: rows 0, d/2, 1, d/2 + 1, ...

    >>> row_order(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
