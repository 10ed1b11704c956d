"""Products of few float32 rows with a bfloat16 matrix, in native code where it was built.

torch multiplies a few rows with a bfloat16 matrix at a third of the rate at which memory delivers it, and
rounds the rows to bfloat16 first. These kernels read the matrix once and keep everything else float32,
so a row's result does not depend on how many others it is computed with.

Where the library is missing, `can_multiply` says so and callers take torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from prefold.kernels import library

_ARGUMENTS = (*[ctypes.c_int64] * 4, *(ctypes.c_void_p, ctypes.c_int64) * 3, *[ctypes.c_int64] * 3)
_linear = library.declare("linear", *_ARGUMENTS)
_combine = library.declare("combine", *_ARGUMENTS)
_multiply = library.declare("multiply", *(ctypes.c_void_p, ctypes.c_int64) * 3, *[ctypes.c_int64] * 3)


def can_multiply(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether these kernels serve the tensors: built, on a CPU, and float32 by bfloat16."""
    return x.dtype == out.dtype and serves(x.dtype, w.dtype, w.is_cpu)


def serves(x: torch.dtype, w: torch.dtype, is_cpu: bool) -> bool:
    """The same for what has these dtypes, and is on a CPU or not."""
    return x == torch.float32 and w == torch.bfloat16 and is_cpu and library.is_available()


def serves_as_float32(x: torch.Tensor, w: torch.dtype, most_rows: int) -> bool:
    """Whether these kernels serve rows in bfloat16, once they are float32, and they are few enough for it."""
    return x.dtype == torch.bfloat16 and len(x) <= most_rows and serves(torch.float32, w, x.is_cpu)


def linear(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, instruction_set: str | None = None
) -> torch.Tensor:
    """out[..., m, n] = sum over k of x[..., m, k] * w[..., n, k].

    Args:
        x: [m, k] or [batch, m, k] float32; any strides but the last, which is 1. So are those of the others.
        w: [n, k] or [batch, n, k] bfloat16.
        out: [m, n] or [batch, m, n] float32, written.
        instruction_set: one of `library.instruction_sets()`; default: the best.
    """
    rows, depth = x.shape[-2:]
    assert w.shape[-1] == depth, (x.shape, w.shape)
    assert out.shape[-2:] == (rows, w.shape[-2]), (x.shape, w.shape, out.shape)
    return _call(_linear, x, w, out, w.shape[-2], instruction_set)


def combine(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, instruction_set: str | None = None
) -> torch.Tensor:
    """out[..., m, c] = sum over d of x[..., m, d] * w[..., d, c]: rows of w, weighted. As `linear`, but
    w is [d, c] or [batch, d, c]."""
    rows, depth = x.shape[-2:]
    assert w.shape[-2] == depth, (x.shape, w.shape)
    assert out.shape[-2:] == (rows, w.shape[-1]), (x.shape, w.shape, out.shape)
    return _call(_combine, x, w, out, w.shape[-1], instruction_set)


def multiply(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, instruction_set: str | None = None
) -> torch.Tensor:
    """As `linear`, without a batch, and also for tens of rows: from 24 on, blocks of the matrix are turned
    around and converted. Sums then run in another order, but no more than that depends on the other rows."""
    rows, depth = x.shape
    assert w.shape[1] == depth, (x.shape, w.shape)
    assert out.shape == (rows, w.shape[0]), (x.shape, w.shape, out.shape)
    assert x.dtype == out.dtype == torch.float32, (x.dtype, out.dtype)
    assert w.dtype == torch.bfloat16, w.dtype
    assert x.stride(1) == w.stride(1) == out.stride(1) == 1 or 0 in x.shape or 0 in out.shape
    _multiply(
        instruction_set,
        x.data_ptr(),
        x.stride(0),
        w.data_ptr(),
        w.stride(0),
        out.data_ptr(),
        out.stride(0),
        rows,
        w.shape[0],
        depth,
    )
    return out


def _call(
    function: Callable[..., None],
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    columns: int,
    instruction_set: str | None,
) -> torch.Tensor:
    assert x.dtype == out.dtype == torch.float32, (x.dtype, out.dtype)
    assert w.dtype == torch.bfloat16, w.dtype
    assert x.stride(-1) == w.stride(-1) == out.stride(-1) == 1 or 0 in x.shape or 0 in out.shape
    batch = x.shape[0] if x.ndim == 3 else 1
    steps = (x.stride(0), w.stride(0), out.stride(0)) if x.ndim == 3 else (0, 0, 0)
    function(
        instruction_set,
        batch,
        *steps,
        x.data_ptr(),
        x.stride(-2),
        w.data_ptr(),
        w.stride(-2),
        out.data_ptr(),
        out.stride(-2),
        x.shape[-2],
        columns,
        x.shape[-1],
    )
    return out
