"""Attention of few queries to rows of the cache, wherever they lie, in native code (rows.cpp).

A row is read once for all query heads that share it, as it is stored: float32, bfloat16 or FP8 (kernels.fp8);
everything else is float32. A query's result depends on nothing but its own rows and their order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from prefold.kernels import library
from prefold.kernels.fp8 import FP8Rows

_Arguments = library.structure(
    "RowsArguments",
    (
        *("num_queries", "num_kv_heads", "heads_per_kv_head", "dim", "v_dim"),
        *("q_stride", "q_head_stride", "row_stride"),
        *("out_stride", "out_head_stride", "lse_stride", "lse_head_stride"),
        *("key_step", "value_offset", "value_step", "bytes_per_element", "bytes_per_row"),
        *("num_scaled", "head_dim", "num_rotary"),
        *("num_slots", "slots_stride", "are_slots_int64", "blocks_stride", "block_size", "window"),
    ),
    ("q", "cache", "slots", "blocks", "tables", "lengths", "out", "lse"),
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


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Which rows queries attend to, if those lie in the blocks of a cache: query i to the tokens
    [lengths[i] - window, lengths[i]) of the blocks `blocks[tables[i]]`.

    Attributes:
        blocks: [num_tables, >= number of blocks] int64, block ids; those behind a query's last are not read.
        tables, lengths: [n] int64.
        block_size: rows of a block.
        window: None: from 0 on.
    """

    blocks: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    block_size: int
    window: int | None = None


def can_attend(q: torch.Tensor, cache: torch.Tensor, fp8: FP8Rows | None = None) -> bool:
    """Whether `attend` serves such queries and rows."""
    is_served = q.dtype == torch.float32 and cache.dtype in _stored_dtypes(fp8)
    return is_served and q.device.type == "cpu" and library.is_available()


def attend(
    q: torch.Tensor,
    keys: torch.Tensor | BlockRows,
    cache: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    heads: RowHeads | None = None,
    fp8: FP8Rows | None = None,
    instruction_set: str | None = None,
) -> None:
    """Attention of query i to its rows of the cache.

    Any strides, but elements of q, out and the cache's rows lie side by side, and slots of a query.

    Args:
        q: [n, num_heads, dim] float32.
        keys: slots [n, num_slots] int32 or int64, rows of the cache, negative ones passed over; or BlockRows.
        cache: [rows, width] float32 or bfloat16, or uint8 with `fp8`.
        out: [n, num_heads, v_dim] float32, written; 0 for a query without rows.
        lse: [n, num_heads] float32, written: natural log, -inf for a query without rows.
        heads: default: one KV head, whose value is the first v_dim elements of the key.
        fp8: the shape of rows, if they are stored in FP8.
        instruction_set: one of `library.instruction_sets()`; default: the best.
    """
    heads = RowHeads() if heads is None else heads
    (num_queries, num_heads, dim), v_dim = q.shape, out.shape[2]
    assert out.shape == (num_queries, num_heads, v_dim)
    assert lse.shape == (num_queries, num_heads)
    assert num_heads % heads.num_kv_heads == 0, (num_heads, heads)
    assert heads.value_offset or heads.value_step or v_dim <= dim, (dim, v_dim)
    _check_rows(q, cache, out, lse, heads, fp8)
    arguments = _Arguments(
        num_queries=num_queries,
        num_kv_heads=heads.num_kv_heads,
        heads_per_kv_head=num_heads // heads.num_kv_heads,
        dim=dim,
        v_dim=v_dim,
        q_stride=q.stride(0),
        q_head_stride=q.stride(1),
        row_stride=cache.stride(0),
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        lse_stride=lse.stride(0),
        lse_head_stride=lse.stride(1),
        key_step=heads.key_step,
        value_offset=heads.value_offset,
        value_step=heads.value_step,
        bytes_per_element=cache.element_size(),
        bytes_per_row=_key_value_end(q, out, heads) * cache.element_size() if fp8 is None else fp8.num_bytes,
        q=q.data_ptr(),
        cache=cache.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
    )
    arguments.num_scaled, arguments.head_dim, arguments.num_rotary = (
        (0, dim, 0) if fp8 is None else (fp8.num_scaled, fp8.head_dim, fp8.rotary_dim)
    )
    _set_keys(arguments, keys, num_queries)
    _attend_rows(instruction_set, ctypes.byref(arguments), scale)


def _stored_dtypes(fp8: FP8Rows | None) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16) if fp8 is None else (torch.uint8,)


def _check_rows(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    heads: RowHeads,
    fp8: FP8Rows | None,
) -> None:
    assert q.dtype == out.dtype == lse.dtype == torch.float32
    assert cache.dtype in _stored_dtypes(fp8), cache.dtype
    assert fp8 is None or cache.shape[1] >= fp8.num_bytes, (cache.shape, fp8)
    width = cache.shape[1] if fp8 is None else fp8.dim
    assert _key_value_end(q, out, heads) <= width, (q.shape, out.shape, cache.shape, heads, fp8)
    assert all(t.stride(-1) == 1 or t.shape[-1] <= 1 or t.numel() == 0 for t in (q, out, cache))


def _key_value_end(q: torch.Tensor, out: torch.Tensor, heads: RowHeads) -> int:
    """Elements of a row up to the end of the last key or value."""
    last = heads.num_kv_heads - 1
    key_end = last * heads.key_step + q.shape[2]
    return max(key_end, heads.value_offset + last * heads.value_step + out.shape[2])


def _set_keys(arguments, keys: torch.Tensor | BlockRows, num_queries: int) -> None:
    if isinstance(keys, BlockRows):
        assert keys.blocks.dtype == keys.tables.dtype == keys.lengths.dtype == torch.int64
        assert keys.tables.shape == keys.lengths.shape == (num_queries,)
        assert keys.tables.is_contiguous()
        assert keys.lengths.is_contiguous()
        assert keys.blocks.stride(-1) == 1 or keys.blocks.shape[-1] <= 1
        arguments.blocks_stride = keys.blocks.stride(0)
        arguments.block_size, arguments.window = keys.block_size, keys.window or 0
        arguments.blocks, arguments.tables = keys.blocks.data_ptr(), keys.tables.data_ptr()
        arguments.lengths = keys.lengths.data_ptr()
        return
    assert keys.dtype in (torch.int32, torch.int64), keys.dtype
    assert keys.shape[0] == num_queries
    assert keys.stride(-1) == 1 or keys.shape[-1] <= 1 or keys.numel() == 0
    arguments.num_slots, arguments.slots_stride = keys.shape[1], keys.stride(0)
    arguments.are_slots_int64 = keys.dtype == torch.int64
    arguments.slots = keys.data_ptr()
