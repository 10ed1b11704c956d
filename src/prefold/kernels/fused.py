"""What lies between matrix products, one pass and one call each, in native code (fused.cpp).

Norms, rotary embedding, gates, the choice of experts; and MLPs of few rows, whose products are
`native.multiply`. Where `can_fuse` says no, callers take torch: the same but for rounding.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from prefold.kernels import library

_normalise = library.declare(
    "normalise",
    *(c_int, *[c_int64] * 3, c_void_p, c_int64, c_int64, c_void_p, c_int64),
    *(c_void_p, c_void_p, c_int64, c_int64, c_float),
)
_rotate = library.declare(
    "rotate",
    *(c_int, *[c_int64] * 3, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int),
)
_gate = library.declare("gate", c_int, c_void_p, *[c_int64] * 3)
_copy_rows = library.declare("copy_rows", c_int, c_int, c_int64, c_int64, *(c_void_p, c_int64, c_void_p) * 2)
_scale_add = library.declare("scale_add", c_int, c_void_p, *[c_int64] * 3, c_float, c_void_p)
_score = library.declare("score", c_int, *[c_int64] * 3, c_void_p, c_int64, c_void_p, c_void_p)
_route = library.declare("route", *[c_int64] * 5, *[c_int] * 3, *[c_void_p] * 4, c_float)
_experts = library.declare(
    "experts",
    *(*[c_int64] * 6, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64),
    *(c_void_p, c_void_p, c_void_p, c_int64),
)
_gated_mlp = library.declare(
    "gated_mlp", *[c_int64] * 3, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64
)


def can_fuse(x: torch.Tensor) -> bool:
    """Whether these kernels serve activations like x."""
    return x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu" and library.is_available()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    instruction_set: str | None = None,
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last dim.

    Args:
        x: [n, size] or [n, heads, size], float32 or bfloat16, as is everything else. Any strides but the
            last, which is 1. So are those of the others.
        out: like x, and may be x.
        residual: [n, size], for x [n, size]: residual += x first, and the norm is of that sum.
    """
    if x.ndim == 2:
        assert residual is None or residual.shape == x.shape, (x.shape, residual.shape)
        x_head_stride = out_head_stride = 0
        num_heads = 1
    else:
        assert residual is None
        num_heads, x_head_stride, out_head_stride = x.shape[1], x.stride(1), out.stride(1)
    assert out.shape == x.shape, (x.shape, out.shape)
    assert weight.shape == x.shape[-1:], (x.shape, weight.shape)
    assert x.dtype == out.dtype == weight.dtype, (x.dtype, out.dtype, weight.dtype)
    assert x.stride(-1) == out.stride(-1) == 1
    assert residual is None or (residual.dtype == x.dtype and residual.stride(1) == 1)
    _normalise(
        instruction_set,
        x.dtype == torch.bfloat16,
        x.shape[0],
        num_heads,
        x.shape[-1],
        x.data_ptr(),
        x.stride(0),
        x_head_stride,
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        out_head_stride,
        eps,
    )


def rotate(
    x: torch.Tensor,
    angles: torch.Tensor,
    out: torch.Tensor,
    interleaved: bool,
    instruction_set: str | None = None,
) -> None:
    """Rotate pairs of elements by their position's angles.

    Args:
        x: [n, heads, dim], float32 or bfloat16, any strides but the last, which is 1.
        angles: [n, dim] float32, contiguous. Interleaved: (cosine, sine) of each pair of neighbours; else the
            cosines of pairs (i, i + dim / 2), then their sines.
        out: like x, and may be x.
    """
    num_rows, num_heads, dim = x.shape
    assert out.shape == x.shape, (x.shape, out.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    assert angles.shape == (num_rows, dim), (x.shape, angles.shape)
    assert angles.is_contiguous()
    assert x.stride(2) == out.stride(2) == 1
    assert dim % 2 == 0, dim
    _rotate(
        instruction_set,
        x.dtype == torch.bfloat16,
        num_rows,
        num_heads,
        dim,
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        angles.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        interleaved,
    )


def gate_(gate_up: torch.Tensor, instruction_set: str | None = None) -> torch.Tensor:
    """silu(gate) * up into gate, which is returned; gate_up [n, 2 * width] is gate | up."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    is_bfloat16 = gate_up.dtype == torch.bfloat16
    _gate(instruction_set, is_bfloat16, gate_up.data_ptr(), gate_up.stride(0), num_rows, width)
    return gate_up[:, :width]


def copy_rows(
    x: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    instruction_set: str | None = None,
) -> None:
    """out[places[i]] = x[rows[i]], rounded to out's dtype.

    Args:
        x, out: [n, width], float32 or bfloat16 each, rows may lie apart.
        rows, places: [n] int64, contiguous; None: row i, place i. No place twice.
    """
    width, num_rows = x.shape[1], (x if rows is None else rows).shape[0]
    assert out.shape[1] == width, (x.shape, out.shape)
    assert x.stride(1) == out.stride(1) == 1 or width == 1
    assert num_rows == (out if places is None else places).shape[0], (x.shape, out.shape)
    assert rows is None or (rows.is_contiguous() and rows.dtype == torch.int64)
    assert places is None or (places.is_contiguous() and places.dtype == torch.int64)
    _copy_rows(
        instruction_set,
        x.dtype == torch.bfloat16,
        out.dtype == torch.bfloat16,
        num_rows,
        width,
        x.data_ptr(),
        x.stride(0),
        None if rows is None else rows.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        None if places is None else places.data_ptr(),
    )


def put_rows(
    x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, places: torch.Tensor | None = None
) -> None:
    """`copy_rows`, or torch for devices and dtypes that it does not serve."""
    if can_fuse(x) and can_fuse(out):
        copy_rows(x, out, rows, places)
    elif places is None:
        out.copy_(x.index_select(0, rows))
    else:
        out.index_copy_(0, places, x.index_select(0, rows).to(out.dtype))


def convert(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = x in out's dtype; both [n, width] or [n, heads, width], rows may lie apart."""
    are_rows = all(t.ndim == 2 or t.stride(1) == t.shape[2] for t in (x, out))
    if not (are_rows and can_fuse(x) and can_fuse(out)):
        return out.copy_(x)
    copy_rows(x.flatten(1), out.flatten(1))
    return out


def scale_add_(
    x: torch.Tensor,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    instruction_set: str | None = None,
) -> torch.Tensor:
    """x = x * scale + bias for x [n, width], whose rows may lie apart, and bias [width] of x's dtype."""
    if not can_fuse(x):
        x = x if scale == 1.0 else x.mul_(scale)
        return x if bias is None else x.add_(bias)
    assert bias is None or (bias.dtype == x.dtype and bias.shape == x.shape[1:] and bias.is_contiguous())
    assert x.stride(1) == 1 or x.shape[1] == 1
    if scale != 1.0 or bias is not None:
        bias_at = None if bias is None else bias.data_ptr()
        is_bfloat16 = x.dtype == torch.bfloat16
        _scale_add(instruction_set, is_bfloat16, x.data_ptr(), x.stride(0), *x.shape, scale, bias_at)
    return x


def score(
    x: torch.Tensor, weight: torch.Tensor, scores: torch.Tensor, instruction_set: str | None = None
) -> torch.Tensor:
    """scores = x @ weight.T, for few rows.

    Args:
        x: [n, size] float32 or bfloat16, rows may lie apart.
        weight: [num_experts, size] float32, contiguous.
        scores: [n, num_experts] float32, contiguous, written.
    """
    (num_rows, size), num_experts = x.shape, weight.shape[0]
    assert weight.shape == (num_experts, size), (x.shape, weight.shape)
    assert scores.shape == (num_rows, num_experts), (scores.shape, x.shape, weight.shape)
    assert weight.dtype == scores.dtype == torch.float32
    assert weight.is_contiguous()
    assert scores.is_contiguous()
    assert x.stride(1) == 1 or size == 1
    is_bfloat16, at = x.dtype == torch.bfloat16, (x.data_ptr(), x.stride(0))
    _score(
        instruction_set, is_bfloat16, num_rows, num_experts, size, *at, weight.data_ptr(), scores.data_ptr()
    )
    return scores


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    softmax: bool,
    groups: tuple[int, int, bool],
    normalised: bool,
    scale: float,
    instruction_set: str | None = None,
) -> None:
    """Choose each row's experts: those with the largest score + bias, the lowest id among equals.

    Args:
        logits: [n, num_experts] float32. Scores are their softmax or sigmoid.
        weights, ids: [n, top_k] float32 and int64, written: scores of those experts, and which they are.
        groups: (how many, from how many of them a row may choose, whether a group is judged by its best two
            experts' sum instead of its best one).
        normalised: weights sum to 1 before they are multiplied with `scale`.
    """
    num_rows, num_experts = logits.shape
    assert logits.dtype == weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.shape == ids.shape
    assert 0 < ids.shape[1] <= num_experts, (ids.shape, num_experts)
    assert logits.is_contiguous()
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    assert num_experts % groups[0] == 0, (num_experts, groups)
    assert groups[1] <= groups[0], groups
    _route(
        instruction_set,
        num_rows,
        num_experts,
        ids.shape[1],
        groups[0],
        groups[1],
        softmax,
        groups[2],
        normalised,
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        scale,
    )


def can_multiply(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether `gated_mlp` and `experts_` serve weights like these."""
    return (
        gate_up.dtype == down.dtype == torch.bfloat16
        and gate_up.is_contiguous()
        and down.is_contiguous()
        and can_fuse(gate_up)
    )


def gated_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    instruction_set: str | None = None,
) -> torch.Tensor:
    """out = down(silu(gate(x)) * up(x)), for few rows.

    Args:
        x, out: [n, hidden] float32, rows may lie apart.
        gate_up, down: [2 * width, hidden] (gate | up) and [hidden, width] bfloat16, contiguous.
    """
    hidden, width = down.shape
    assert gate_up.shape == (2 * width, hidden), (gate_up.shape, down.shape)
    assert x.shape == out.shape == (x.shape[0], hidden), (x.shape, out.shape, down.shape)
    assert x.dtype == out.dtype == torch.float32
    assert x.stride(1) == out.stride(1) == 1
    assert can_multiply(gate_up, down)
    _gated_mlp(
        instruction_set,
        x.shape[0],
        hidden,
        width,
        x.data_ptr(),
        x.stride(0),
        gate_up.data_ptr(),
        down.data_ptr(),
        out.data_ptr(),
        out.stride(0),
    )
    return out


def experts_(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    first: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    instruction_set: str | None = None,
) -> None:
    """out += the sum over each row's experts that are held here, times their weights; for few rows.

    Args:
        out, x: [n, hidden] float32, rows may lie apart.
        weights, ids: [n, top_k] float32 and int64, rows may lie apart.
        first: number of the first expert held.
        gate_up, down: [held, 2 * width, hidden] and [held, hidden, width] bfloat16, contiguous.
    """
    held, hidden, width = down.shape
    assert gate_up.shape == (held, 2 * width, hidden), (gate_up.shape, down.shape)
    assert x.shape == out.shape == (ids.shape[0], hidden), (x.shape, out.shape, ids.shape)
    assert weights.shape == ids.shape
    assert x.dtype == out.dtype == weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert out.stride(1) == x.stride(1) == 1
    assert ids.shape[1] == 1 or ids.stride(1) == weights.stride(1) == 1
    assert can_multiply(gate_up, down)
    _experts(
        instruction_set,
        ids.shape[0],
        ids.shape[1],
        hidden,
        width,
        first,
        held,
        x.data_ptr(),
        x.stride(0),
        weights.data_ptr(),
        weights.stride(0),
        ids.data_ptr(),
        ids.stride(0),
        gate_up.data_ptr(),
        down.data_ptr(),
        out.data_ptr(),
        out.stride(0),
    )
