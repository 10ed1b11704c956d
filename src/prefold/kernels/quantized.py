"""Matrices that stay quantised in memory: any rows as floats, and products of a few rows with them.

Each use decodes what it needs: rows by the tile for a matrix multiplication, or each row as it meets a few
float32 rows, which reads the codes once and nothing else. Native code does it where it was built, and
`quantized_reference` otherwise. The two give the same values, bit for bit.
"""

from __future__ import annotations

import ctypes

import torch

from prefold.kernels import library, quantized_reference

KINDS = ("fp8", "nvfp4", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
"""How a row of codes may lie in memory:

fp8     a byte per column, E4M3; `scales` [block rows, block columns] float32
nvfp4   16 bytes per 32 columns, E2M1: the lower four bits are columns 0 to 15, the upper ones 16 to 31, and
        rows end with whole bytes of 32 columns; `groups` [rows, 2 * 32s of columns] uint8 are the scales'
        codes and `scales` [256] float32 what each code stands for
others  the blocks of GGUF files, one after the other
"""


_Matrix = library.structure(
    "Matrix",
    (
        *("columns", "format", "round", "code_stride", "scale_stride", "group_stride"),
        *("block_rows", "block_columns", "skip_rows", "skip_columns"),
    ),
    ("codes", "scales", "groups"),
)
_array = (ctypes.c_void_p, ctypes.c_int64)
_linear = library.declare(
    "quantized_linear", ctypes.c_void_p, ctypes.c_int64, *_array, *_array, ctypes.c_int64
)
_expand = library.declare(
    "quantized_expand", ctypes.c_void_p, *_array, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
)


class QuantizedMatrix:
    """[rows, columns] as codes and scales, see `KINDS`.

    Args:
        kind: one of them.
        shape: (rows, columns).
        dtype: float32 or bfloat16, to which values are rounded, whatever they are handed out as.
        codes: uint8 [rows, bytes].
        scales, groups: float32 and uint8, where the kind has them.
        block: rows and columns of a block (fp8).
        skip: rows and columns by which the first block begins before the matrix (fp8).
    """

    def __init__(
        self,
        kind: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        codes: torch.Tensor,
        scales: torch.Tensor | None = None,
        groups: torch.Tensor | None = None,
        block: tuple[int, int] = (1, 1),
        skip: tuple[int, int] = (0, 0),
    ) -> None:
        assert kind in KINDS, kind
        assert dtype in (torch.float32, torch.bfloat16), dtype
        assert codes.dtype == torch.uint8, codes.dtype
        assert codes.shape[0] == shape[0], (codes.shape, shape)
        assert codes.is_contiguous()
        self.kind, self.shape, self.dtype = kind, shape, dtype
        self.codes, self.scales, self.groups = codes, scales, groups
        self.block, self.skip = block, skip
        if kind == "fp8":
            assert scales is not None
            self.groups = _has_ties(scales)
        self._as_stored = self._struct(dtype == torch.bfloat16)
        self._rounded = self._struct(True)

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.groups)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def expand(self, rows: slice, out: torch.Tensor, instruction_set: str | None = None) -> torch.Tensor:
        """Values of `rows` into out [rows, columns], contiguous, float32 or bfloat16."""
        assert out.shape == (rows.stop - rows.start, self.shape[1]), (rows, out.shape, self.shape)
        assert out.is_contiguous()
        if not library.is_available():
            return out.copy_(quantized_reference.values(self, rows).to(self.dtype))
        as_bfloat16 = out.dtype == torch.bfloat16
        assert as_bfloat16 or out.dtype == torch.float32, out.dtype
        _expand(
            instruction_set,
            ctypes.byref(self._rounded if as_bfloat16 else self._as_stored),
            out.data_ptr(),
            self.shape[1],
            as_bfloat16,
            rows.start,
            rows.stop,
        )
        return out

    def linear(self, x: torch.Tensor, out: torch.Tensor, instruction_set: str | None = None) -> torch.Tensor:
        """out[m, n] = sum over k of x[m, k] * values[n, k], in float32.

        Args:
            x: [m, columns] float32; any strides but the last, which is 1. So are those of `out`.
            out: [m, rows] float32, written.
        """
        assert x.dtype == out.dtype == torch.float32, (x.dtype, out.dtype)
        assert x.shape[1] == self.shape[1], (x.shape, self.shape)
        assert out.shape == (x.shape[0], self.shape[0]), (x.shape, out.shape)
        assert x.stride(1) == out.stride(1) == 1 or 0 in x.shape or 0 in out.shape
        _linear(
            instruction_set,
            ctypes.byref(self._as_stored),
            self.shape[0],
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            x.shape[0],
        )
        return out

    def _struct(self, rounds: bool) -> ctypes.Structure:
        scales, groups = self.scales, self.groups
        (block_rows, block_columns), (skip_rows, skip_columns) = self.block, self.skip
        return _Matrix(
            columns=self.shape[1],
            format=KINDS.index(self.kind),
            round=rounds,
            code_stride=self.codes.shape[1],
            scale_stride=0 if scales is None else scales.shape[-1],
            group_stride=0 if groups is None else groups.shape[1],
            block_rows=block_rows,
            block_columns=block_columns,
            skip_rows=skip_rows,
            skip_columns=skip_columns,
            codes=self.codes.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            groups=None if groups is None else groups.data_ptr(),
        )


def _has_ties(scales: torch.Tensor) -> torch.Tensor:
    """Which blocks of E4M3 codes may have values halfway between two bfloat16; uint8, of scales' shape.

    The others, nearly all, need no care in rounding. Codes have four significant bits, and powers of two
    change no product's, as long as none is subnormal.
    """
    products = scales[..., None] * torch.arange(8.0, 16.0)
    ties = (products.view(torch.int32) & 0xFFFF) == 0x8000
    magnitude = scales.abs()
    extreme = (magnitude != 0) & ((magnitude < 1e-30) | (magnitude > 1e30))
    return (ties.any(-1) | extreme).to(torch.uint8).contiguous()
