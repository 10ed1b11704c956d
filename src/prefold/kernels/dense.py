"""Dense attention merged into the running softmax of its rows, in native code (dense.cpp).

A row is a (token, query head) of a KV head, tokens outermost. Its sums are those of exp(score - reference),
where a score is q . k * scale. Sums, scores and exponentials are float32.

Queries, keys and values are float32 or bfloat16. The instruction sets `PAIRS` and `TILES` multiply bfloat16
as it is, for which the exponentials are rounded to bfloat16; others widen it to float32.
"""

from __future__ import annotations

import ctypes

import torch

from prefold.kernels import library

UNSEEN_REFERENCE = -3e38
"""The reference of a row that has seen no key."""

_Arguments = library.structure(
    "DenseArguments",
    (
        *("num_kv_heads", "dim", "v_dim", "first_row", "num_rows", "rows_per_head", "rows_per_token"),
        *("num_keys", "is_causal", "is_bfloat16", "products", "q_head_stride", "q_stride"),
        *("k_head_stride", "k_stride", "v_head_stride", "v_stride", "out_head_stride", "out_stride"),
        "selected_stride",
    ),
    ("q", "k", "v", "out", "references", "sums", "unseen", "scale", "selected"),
)
_SelectArguments = library.structure(
    "SelectArguments",
    (
        *("num_rows", "num_indices", "num_words", "first_key", "is_int64"),
        *("index_stride", "selected_stride"),
    ),
    ("indices", "selected"),
)
_attend_dense = library.declare("attend_dense", ctypes.c_void_p)
_select_keys = library.declare("select_keys", ctypes.c_void_p)

WORD_KEYS = 64
"""Keys whose bits are a word of `selected`."""

PAIRS = "avx512_bf16"
TILES = "amx_bf16"
EMULATED_TILES = "amx_emulated"
"""TILES on processors that have PAIRS only, for tests: the same code, but the tiles are in memory."""

_PRODUCTS = {PAIRS: 1, TILES: 2, EMULATED_TILES: 3}  # as dense.cpp numbers them


def instruction_sets() -> tuple[str, ...]:
    """What this kernel can use on this processor, best last: those of the library, PAIRS and TILES."""
    pairs, tiles = library.has_pairs(), library.has_tiles()
    return (*library.instruction_sets(), *((PAIRS,) if pairs else ()), *((TILES,) if tiles else ()))


def best(dtype: torch.dtype) -> str | None:
    """The instruction set for inputs of this dtype; None: the library's best."""
    if dtype == torch.bfloat16 and library.has_tiles():
        return TILES
    return PAIRS if dtype == torch.bfloat16 and library.has_fast_pairs() else None


def describe(dtype: torch.dtype) -> str:
    """Which kernels compute in this dtype on a CPU, for people: `native, avx512; attention by amx_bf16`, or
    `torch`."""
    if not library.is_available():
        return "torch"
    instruction_set = best(dtype)
    attention = "" if instruction_set is None else f"; attention by {instruction_set}"
    return f"native, {library.instruction_sets()[-1]}{attention}"


def attend_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    references: torch.Tensor,
    sums: torch.Tensor,
    tokens: slice,
    rows_per_token: int,
    scale: float,
    causal: bool,
    unseen: torch.Tensor | None = None,
    instruction_set: str | None = None,
    selected: torch.Tensor | None = None,
) -> None:
    """Add keys and values to the sums of some tokens' rows.

    Elements of a row of q, k, v and out lie side by side; other strides are free.

    Args:
        q: [num_kv_heads, rows, dim], float32 or bfloat16 as k and v.
        k, v: [num_kv_heads, n, dim], [num_kv_heads, n, v_dim].
        out: [num_kv_heads, rows, v_dim] float32, sums of exp(score - reference) * value.
        references, sums: [num_kv_heads, rows] float32, contiguous. At first UNSEEN_REFERENCE and 0.
        tokens: whose rows.
        scale: above 0.
        causal: token tokens.start + i sees keys 0..i.
        unseen: [tokens] int64: token tokens.start + i does not see the first unseen[i] keys.
        instruction_set: one of `instruction_sets()`; default: the library's best. PAIRS and TILES need
            bfloat16.
        selected: [tokens, at least num_keys / 64] int64, words of a row side by side: of the keys, token
            tokens.start + i sees only those j whose bit is set, bit j % 64 of word j // 64 of row i.
    """
    num_heads, num_rows, dim = q.shape
    num_keys, v_dim = v.shape[1:]
    num_tokens = tokens.stop - tokens.start
    assert all(t.dtype == torch.float32 for t in (out, references, sums))
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.dtype in (torch.float32, torch.bfloat16), q.dtype
    products = _PRODUCTS.get(instruction_set or "", 0)
    assert not products or (q.dtype == torch.bfloat16 and library.has_pairs())
    assert instruction_set != TILES or library.has_tiles()
    assert scale > 0, scale
    assert k.shape == (num_heads, num_keys, dim), (q.shape, k.shape, v.shape)
    assert out.shape == (num_heads, num_rows, v_dim), (q.shape, out.shape, v.shape)
    assert references.shape == sums.shape == (num_heads, num_rows)
    assert references.is_contiguous()
    assert sums.is_contiguous()
    assert tokens.stop * rows_per_token <= num_rows, (tokens, rows_per_token, num_rows)
    assert not causal or num_tokens == num_keys, (tokens, num_keys)
    if unseen is not None:
        assert unseen.dtype == torch.int64
        assert unseen.shape == (num_tokens,)
        unseen = unseen.contiguous()
    if selected is not None:
        assert selected.dtype == torch.int64
        assert len(selected) == num_tokens, (tokens, selected.shape)
        assert selected.shape[1] * WORD_KEYS >= num_keys, (num_keys, selected.shape)
        assert selected.stride(1) == 1 or selected.shape[1] == 1
    if num_tokens == 0 or num_keys == 0:
        return
    assert all(t.stride(2) == 1 or t.shape[2] == 1 for t in (q, k, v, out))
    factor = ctypes.c_float(scale)
    arguments = _Arguments(
        num_kv_heads=num_heads,
        dim=dim,
        v_dim=v_dim,
        first_row=tokens.start * rows_per_token,
        num_rows=num_tokens * rows_per_token,
        rows_per_head=num_rows,
        rows_per_token=rows_per_token,
        num_keys=num_keys,
        is_causal=causal,
        is_bfloat16=q.dtype == torch.bfloat16,
        products=products,
        q_head_stride=q.stride(0),
        q_stride=q.stride(1),
        k_head_stride=k.stride(0),
        k_stride=k.stride(1),
        v_head_stride=v.stride(0),
        v_stride=v.stride(1),
        out_head_stride=out.stride(0),
        out_stride=out.stride(1),
        selected_stride=0 if selected is None else selected.stride(0),
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        references=references.data_ptr(),
        sums=sums.data_ptr(),
        unseen=None if unseen is None else unseen.data_ptr(),
        scale=ctypes.addressof(factor),
        selected=None if selected is None else selected.data_ptr(),
    )
    _attend_dense(None if products else instruction_set, ctypes.byref(arguments))


def select_(indices: torch.Tensor, first_key: int, selected: torch.Tensor) -> None:
    """Write `selected`, see `attend_`: bit j of row i tells whether indices[i] has key first_key + j.

    Args:
        indices: [n, k] int32 or int64, in any order; those of no bit, such as -1, count for nothing. Rows may
            lie apart.
        selected: [n, words] int64; rows may lie apart.

    >>> selected = torch.zeros(1, 2, dtype=torch.int64)
    >>> select_(torch.tensor([[-1, 13, 10, 75]]), 10, selected)
    >>> selected.tolist()
    [[9, 2]]
    """
    assert len(indices) == len(selected), (indices.shape, selected.shape)
    assert indices.dtype in (torch.int32, torch.int64), indices.dtype
    assert selected.dtype == torch.int64
    assert all(t.stride(1) == 1 or t.shape[1] <= 1 for t in (indices, selected))
    arguments = _SelectArguments(
        num_rows=len(indices),
        num_indices=indices.shape[1],
        num_words=selected.shape[1],
        first_key=first_key,
        is_int64=indices.dtype == torch.int64,
        index_stride=indices.stride(0),
        selected_stride=selected.stride(0),
        indices=indices.data_ptr(),
        selected=selected.data_ptr(),
    )
    _select_keys(None, ctypes.byref(arguments))
