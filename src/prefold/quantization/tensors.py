"""Values of quantised tensors, any rows and columns of them, tile by tile."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional as F

from prefold.kernels.quantized import QuantizedMatrix
from prefold.quantization.formats import NVFP4_GROUP, Format

TILE = 1 << 18
"""Elements that a thread dequantises at a time: 1 MiB of float32, which stays in a core's cache."""

MAX_SCALE = 1e36
"""FP8 with larger scales is not kept quantised: kernels multiply them by 256."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class QuantizedTensor(Protocol):
    """A matrix in some quantised form, in a file or in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, [out, in]."""
        ...

    def dequantize(self, rows: slice, columns: slice, out: torch.Tensor) -> None:
        """Values of `rows` and `columns` into out [rows, columns], of any float dtype.

        Slices have a start and a stop inside the shape, and no step. Values are computed in float32 and
        rounded once, to out's dtype.
        """
        ...


class Sliceable(Protocol):
    """A tensor, or a tensor in a safetensors file of which only what is asked for is read."""

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


class BlockScaledTensor:
    """A `Format`'s codes and scales as a `QuantizedTensor`.

    Args:
        shape: the logical one.
        codes: [out, in] float8_e4m3fn, or [out, in / 2] uint8.
        scales: with one entry per block, of two dims; float, or float8_e4m3fn.
        global_scale: one float32.
    """

    def __init__(
        self,
        format: Format,
        shape: tuple[int, ...],
        codes: Sliceable,
        scales: Sliceable,
        global_scale: torch.Tensor | None = None,
    ) -> None:
        assert len(shape) == 2
        assert (global_scale is None) == (format.global_scale is None)
        self.format, self._shape = format, shape
        self._codes, self._scales = codes, scales
        self._global_scale = None if global_scale is None else global_scale.float().reshape(())
        block = (n if b is None else b for n, b in zip(shape, format.block, strict=True))
        self._height, self._width = block

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def dequantize(self, rows: slice, columns: slice, out: torch.Tensor) -> None:
        """See `QuantizedTensor`."""
        num_columns = columns.stop - columns.start
        assert out.shape == (rows.stop - rows.start, num_columns)
        if not out.numel():
            return
        step = max(1, TILE * torch.get_num_threads() // num_columns)
        pairs = e2m1_pairs() if self.format.dtype == "U8" else None
        for start in range(rows.start, rows.stop, step):
            tile = slice(start, min(start + step, rows.stop))
            into = out[tile.start - rows.start : tile.stop - rows.start]
            into.copy_(self._tile(tile, columns, pairs))

    def keep(self, rows: slice, columns: slice, dtype: torch.dtype) -> QuantizedMatrix | None:
        """That part in quantised form, with values of `dtype`.

        None where a native kernel could not follow: a part whose columns begin inside a group of NVFP4,
        codes that are NaN, scales that are not finite or huge.
        """
        if self.format.dtype == "U8":
            return self._keep_nvfp4(rows, columns, dtype)
        above, left = rows.start // self._height, columns.start // self._width
        below, right = -(-rows.stop // self._height), -(-columns.stop // self._width)
        codes = self._codes[rows, columns].contiguous().view(torch.uint8)
        scales = self._scales[above:below, left:right].float().contiguous()
        if (
            not codes.numel()
            or bool(((codes & 127) == 127).any())
            or not bool((scales.abs() < MAX_SCALE).all())
        ):
            return None
        skip = (rows.start - above * self._height, columns.start - left * self._width)
        block = (self._height, self._width)
        shape = (codes.shape[0], codes.shape[1])
        return QuantizedMatrix("fp8", shape, dtype, codes, scales, block=block, skip=skip)

    def _keep_nvfp4(self, rows: slice, columns: slice, dtype: torch.dtype) -> QuantizedMatrix | None:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        first, last = columns.start // NVFP4_GROUP, -(-columns.stop // NVFP4_GROUP)
        groups = self._scales[rows, first:last]
        if columns.start % NVFP4_GROUP or 0 in shape or groups.dtype != torch.float8_e4m3fn:
            return None
        half = NVFP4_GROUP // 2
        pairs = self._codes[rows, first * half : -(-columns.stop // 2)]
        spare = last % 2 != first % 2  # groups come in twos
        missing = (last - first + spare) * half - pairs.shape[1]
        pairs = F.pad(pairs, (0, missing)).unflatten(1, (-1, 2, half))
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(3)  # [rows, twos, 2, group]
        packed = (codes[:, :, 0] | (codes[:, :, 1] << 4)).flatten(1).contiguous()
        stored = F.pad(groups.view(torch.uint8), (0, int(spare)))
        scales = self._combined(e4m3_to_float32(torch.arange(256, dtype=torch.uint8)))
        return QuantizedMatrix("nvfp4", shape, dtype, packed, scales, stored.contiguous())

    def _combined(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales of blocks with the global one."""
        if self._global_scale is None:
            return scales
        return scales / self._global_scale if self.format.divides else scales * self._global_scale

    def _tile(self, rows: slice, columns: slice, pairs: torch.Tensor | None) -> torch.Tensor:
        """[rows, columns] float32."""
        if pairs is None:
            values = e4m3_to_float32(self._codes[rows, columns])
            return self._scale_(values, rows, columns)
        # Whole bytes: a slice may begin or end in the middle of one.
        whole = slice(columns.start // 2 * 2, -(-columns.stop // 2) * 2)
        values = e2m1_to_float32(self._codes[rows, whole.start // 2 : whole.stop // 2], pairs)
        inner = slice(columns.start - whole.start, columns.stop - whole.start)
        return self._scale_(values, rows, whole)[:, inner]

    def _scale_(self, values: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """values [rows, columns] *= their scales."""
        above, left = rows.start // self._height, columns.start // self._width
        below, right = -(-rows.stop // self._height), -(-columns.stop // self._width)
        scales = self._scales[above:below, left:right]
        scales = e4m3_to_float32(scales) if scales.dtype == torch.float8_e4m3fn else scales.float()
        scales = self._combined(scales)
        if right - left > 1:
            skip = columns.start - left * self._width
            scales = scales.repeat_interleave(self._width, dim=1)[:, skip : skip + values.shape[1]]
        if self._height == 1:
            return values.mul_(scales)
        for i in range(above, below):
            start, stop = max(i * self._height, rows.start), min((i + 1) * self._height, rows.stop)
            values[start - rows.start : stop - rows.start].mul_(scales[i - above])
        return values


def e4m3_to_float32(codes: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn -> float32, eight times as fast as torch converts it on a CPU (one thread, torch 2.13).

    Seven bits of exponent and mantissa, put where float16 has its own, are a float16 that is 2^8 times too
    small, subnormal ones included: the two exponents' offsets differ by 8. Only NaN needs care.
    """
    codes = codes.view(torch.int8)
    # Seven places left: the sign, extended to 16 bits, fills bits 15 and 14, of which 14 is the exponent's.
    half = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    values = half.view(torch.float16).float().mul_(256.0)
    magnitude = codes & 0x7F
    if magnitude.numel() and magnitude.amax() == 0x7F:
        values.masked_fill_(magnitude == 0x7F, torch.nan)
    return values


def e2m1_pairs() -> torch.Tensor:
    """[256] int64: the two float32 values that a byte of two E2M1 codes stands for, lower bits first."""
    values = torch.tensor(E2M1)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).view(torch.int64).flatten()


def e2m1_to_float32(packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """uint8 [n, m] -> float32 [n, 2 m], by `e2m1_pairs`."""
    found = pairs.index_select(0, packed.to(torch.int32).flatten())
    return found.view(torch.float32).view(packed.shape[0], 2 * packed.shape[1])
