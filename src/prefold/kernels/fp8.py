"""Rows of the KV cache in FP8: a byte per element and one scale per head, in native code (fp8.cpp) or torch.

A row of `num_heads` vectors of `head_dim` elements, then `rotary_dim` elements, is stored as

    rotary, bfloat16 | codes, e4m3, a byte each | exponents, a byte per head

A head's elements are code * 2^(exponent - 127), with the smallest power of two that lets the largest one
be a code (at most 448). A power of two costs no precision against any other scale, since codes
are floats themselves, and lets bfloat16 hold what is decoded exactly. The nearest code is taken, of
two the even one: the error is at most 2^-4 of an element, or 2^-10 of the exponent's power where that is
more. Exponents are between 10 and 246; smaller elements lose precision, larger ones (from 448 * 2^119 on) are
taken for the largest code. A head with an element that is not finite has exponent 255 and decodes to NaN.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from prefold.kernels import library

BIAS, MIN_EXPONENT, MAX_EXPONENT = 127, -117, 119
LARGEST = 448.0
NOT_FINITE = 255

_Arguments = library.structure(
    "FP8Arguments",
    ("num_rows", "num_heads", "head_dim", "rotary_dim", "stored_stride", "rows_stride"),
    ("stored", "floats", "halves"),
)
_encode = library.declare("fp8_encode", ctypes.c_void_p)
_decode = library.declare("fp8_decode", ctypes.c_void_p)


@dataclass(frozen=True)
class FP8Rows:
    """The shape of rows."""

    num_heads: int
    head_dim: int
    rotary_dim: int

    @property
    def num_scaled(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.num_scaled + self.rotary_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of a stored row."""
        return 2 * self.rotary_dim + self.num_scaled + self.num_heads


def can_serve(tensor: torch.Tensor) -> bool:
    """Whether there is native code for it; torch takes ten times as long."""
    return tensor.device.type == "cpu" and bool(library.instruction_sets())


def encode(
    shape: FP8Rows, rows: torch.Tensor, stored: torch.Tensor, instruction_set: str | None = None
) -> None:
    """rows [n, dim] float32 -> stored [n, >= num_bytes] uint8; rows of both may lie apart."""
    _call(_encode, shape, rows, stored, instruction_set)


def decode(
    shape: FP8Rows, stored: torch.Tensor, rows: torch.Tensor, instruction_set: str | None = None
) -> None:
    """stored [n, >= num_bytes] uint8 -> rows [n, dim] bfloat16; rows of both may lie apart."""
    _call(_decode, shape, rows, stored, instruction_set)


def _call(
    function, shape: FP8Rows, rows: torch.Tensor, stored: torch.Tensor, instruction_set: str | None
) -> None:
    assert rows.dtype == (torch.float32 if function is _encode else torch.bfloat16), rows.dtype
    assert stored.dtype == torch.uint8
    assert rows.shape == (len(stored), shape.dim), (rows.shape, shape)
    assert stored.shape[1] >= shape.num_bytes, (stored.shape, shape)
    if len(rows) == 0:
        return
    assert rows.stride(1) == stored.stride(1) == 1
    arguments = _Arguments(
        num_rows=len(rows),
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        rotary_dim=shape.rotary_dim,
        stored_stride=stored.stride(0),
        rows_stride=rows.stride(0),
        stored=stored.data_ptr(),
        floats=rows.data_ptr(),
        halves=rows.data_ptr(),
    )
    function(instruction_set, ctypes.byref(arguments))


def encode_with_torch(shape: FP8Rows, rows: torch.Tensor, stored: torch.Tensor) -> None:
    """The same bytes as `encode`, from any float dtype, on any device."""
    values = rows[:, : shape.num_scaled].float().unflatten(1, (shape.num_heads, shape.head_dim))
    largest = values.abs().amax(-1).view(torch.int32)
    exponent = (largest >> 23) - BIAS - 8 + ((largest & 0x7FFFFF) > 0x600000).int()
    exponent.clamp_(MIN_EXPONENT, MAX_EXPONENT)
    factor = ((BIAS - exponent) << 23).view(torch.float32)
    codes = (
        (values * factor.unsqueeze(-1)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    is_finite = largest < 0x7F800000
    rotary, code_bytes, exponents = _sections(shape, stored)
    rotary.copy_(rows[:, shape.num_scaled :].bfloat16().contiguous().view(torch.uint8))
    code_bytes.copy_(torch.where(is_finite.unsqueeze(-1), codes, 0x7F).flatten(1))
    exponents.copy_(torch.where(is_finite, exponent + BIAS, NOT_FINITE))


def decode_with_torch(shape: FP8Rows, stored: torch.Tensor, rows: torch.Tensor) -> None:
    """The same elements as `decode`, on any device."""
    rotary, codes, exponents = _sections(shape, stored)
    values = codes.contiguous().view(torch.float8_e4m3fn).float()
    power = (exponents.int() << 23).view(torch.float32)
    power.masked_fill_(exponents == NOT_FINITE, torch.nan)
    by_head = values.unflatten(1, (shape.num_heads, shape.head_dim)) * power.unsqueeze(-1)
    rows[:, : shape.num_scaled].copy_(by_head.flatten(1))
    rows[:, shape.num_scaled :].copy_(rotary.contiguous().view(torch.bfloat16))


def _sections(shape: FP8Rows, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes of (rotary elements, codes, exponents)."""
    sizes = (2 * shape.rotary_dim, shape.num_scaled, shape.num_heads)
    rotary, codes, exponents = stored[:, : shape.num_bytes].split(sizes, dim=1)
    return rotary, codes, exponents
