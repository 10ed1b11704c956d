"""Attention of few queries to rows of the cache that lie anywhere, in native code (rows.cpp).

A row is read once for all query heads that share it, from float32 or bfloat16; everything else is float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from prefold.kernels import library

_Arguments = library.structure(
    "RowsArguments",
    (
        *("num_queries", "num_kv_heads", "heads_per_kv_head", "dim", "v_dim", "num_slots"),
        *("q_stride", "q_head_stride", "row_stride", "slots_stride"),
        *("out_stride", "out_head_stride", "lse_stride", "lse_head_stride"),
        *("key_offset", "key_step", "value_offset", "value_step", "is_bfloat16", "are_slots_int64"),
    ),
    ("q", "cache", "slots", "out", "lse"),
)
_attend_rows = library.declare("attend_rows", ctypes.c_void_p, ctypes.c_float)


@dataclass(frozen=True)
class RowHeads:
    """Where a row has keys and values: KV head i its key from element i * key_step on, its value from
    value_offset + i * value_step on. The default: one KV head, whose value is the key's beginning."""

    num_kv_heads: int = 1
    key_step: int = 0
    value_offset: int = 0
    value_step: int = 0


def can_attend(q: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether `attend` serves such queries and rows."""
    is_served = q.dtype == torch.float32 and cache.dtype in (torch.float32, torch.bfloat16)
    return is_served and q.device.type == "cpu" and library.is_available() and library.has_one_thread()


def attend(
    q: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    heads: RowHeads | None = None,
    instruction_set: str | None = None,
) -> None:
    """Attention of query i to the rows `slots[i]` of the cache.

    Any strides, but elements of q, out and the cache's rows lie side by side, and slots of a query.

    Args:
        q: [n, num_heads, dim] float32.
        slots: [n, num_slots] int32 or int64; negative ones are passed over.
        cache: [rows, width] float32 or bfloat16.
        out: [n, num_heads, v_dim] float32, written; 0 for a query without rows.
        lse: [n, num_heads] float32, written: natural log, -inf for a query without rows.
        heads: default: one KV head, whose value is the first v_dim elements of the key.
        instruction_set: one of `library.instruction_sets()`; default: the best.
    """
    heads = RowHeads() if heads is None else heads
    (num_queries, num_heads, dim), v_dim = q.shape, out.shape[2]
    assert q.dtype == out.dtype == lse.dtype == torch.float32
    assert cache.dtype in (torch.float32, torch.bfloat16), cache.dtype
    assert slots.dtype in (torch.int32, torch.int64), slots.dtype
    assert out.shape == (num_queries, num_heads, v_dim)
    assert lse.shape == (num_queries, num_heads)
    assert slots.shape[0] == num_queries
    assert num_heads % heads.num_kv_heads == 0, (num_heads, heads)
    last = heads.num_kv_heads - 1
    assert (
        max(last * heads.key_step + dim, heads.value_offset + last * heads.value_step + v_dim)
        <= (cache.shape[1])
    ), (q.shape, out.shape, cache.shape, heads)
    assert heads.value_offset or heads.value_step or v_dim <= dim, (dim, v_dim)
    assert all(t.stride(-1) == 1 or t.shape[-1] <= 1 or t.numel() == 0 for t in (q, out, cache, slots))
    arguments = _Arguments(
        num_queries=num_queries,
        num_kv_heads=heads.num_kv_heads,
        heads_per_kv_head=num_heads // heads.num_kv_heads,
        dim=dim,
        v_dim=v_dim,
        num_slots=slots.shape[1],
        q_stride=q.stride(0),
        q_head_stride=q.stride(1),
        row_stride=cache.stride(0),
        slots_stride=slots.stride(0),
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        lse_stride=lse.stride(0),
        lse_head_stride=lse.stride(1),
        key_offset=0,
        key_step=heads.key_step,
        value_offset=heads.value_offset,
        value_step=heads.value_step,
        is_bfloat16=cache.dtype == torch.bfloat16,
        are_slots_int64=slots.dtype == torch.int64,
        q=q.data_ptr(),
        cache=cache.data_ptr(),
        slots=slots.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
    )
    _attend_rows(instruction_set, ctypes.byref(arguments), scale)
