"""The best keys of queries under sparse attention, in native code (indexer.cpp).

A score is the sum over heads of weight * relu(query . key), in float32. Of the keys that a query sees, those
with the highest scores win, and of equal scores the lowest position. Scores are made a few keys at a time
and only candidates are kept, so there is no matrix of scores. A score has the same bits whatever the tiles in
which keys come: a key has a vector's lane to itself, and the order of the sums is that of dims and heads.
"""

from __future__ import annotations

import ctypes

import torch

from prefold.kernels import library

ABSENT = -1
"""The position where a query sees fewer keys than it may select."""

_SPARE = 64  # more keys than any instruction set scores at a time

_Arguments = library.structure(
    "IndexArguments",
    (
        *("num_queries", "num_heads", "dim", "num_keys", "topk", "capacity", "first_position"),
        *("q_stride", "q_head_stride", "weights_stride", "key_stride", "is_bfloat16"),
    ),
    ("q", "weights", "keys", "limits", "orders", "positions", "counts", "thresholds"),
)
_tile = library.declare("index_tile", ctypes.c_void_p)
_finish = library.declare("index_finish", ctypes.c_void_p)


def can_select(q: torch.Tensor, key_dtype: torch.dtype) -> bool:
    """Whether `TopKeys` serves such queries and keys."""
    is_served = q.dtype == torch.float32 and key_dtype in (torch.float32, torch.bfloat16)
    return is_served and q.device.type == "cpu" and library.is_available()


def capacity(topk: int) -> int:
    """Candidates that are kept per query."""
    return 2 * topk + _SPARE


class TopKeys:
    """The best keys of n queries, while their keys come in tiles of ascending positions.

    Args:
        q: [n, num_heads, dim] float32, elements side by side.
        weights: [n, num_heads] float32, side by side.
        limits: [n] int64: query i sees the keys at positions below limits[i].
        topk: keys per query, at least 1.
        candidates: [2, n, capacity(topk)] int32, contiguous; written.
        instruction_set: one of `library.instruction_sets()`; default: the best.
    """

    def __init__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        limits: torch.Tensor,
        topk: int,
        candidates: torch.Tensor,
        instruction_set: str | None = None,
    ) -> None:
        num_queries, num_heads, dim = q.shape
        assert q.dtype == weights.dtype == torch.float32
        assert weights.shape == (num_queries, num_heads)
        assert q.stride(-1) == 1 or dim == 0
        assert weights.stride(-1) == 1 or num_heads <= 1
        assert limits.dtype == torch.int64
        assert limits.shape == (num_queries,)
        assert limits.is_contiguous()
        assert topk >= 1
        assert candidates.shape == (2, num_queries, capacity(topk))
        assert candidates.dtype == torch.int32
        assert candidates.is_contiguous()
        self._instruction_set = instruction_set
        self._orders, self._positions = candidates[0], candidates[1]
        self._counts = torch.zeros(num_queries, dtype=torch.int64)
        self._thresholds = torch.full((num_queries,), torch.iinfo(torch.int32).min, dtype=torch.int32)
        self._tensors = (q, weights, limits)  # kept alive: the kernel has their addresses
        self._arguments = _Arguments(
            num_queries=num_queries,
            num_heads=num_heads,
            dim=dim,
            topk=topk,
            capacity=capacity(topk),
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            weights_stride=weights.stride(0),
            q=q.data_ptr(),
            weights=weights.data_ptr(),
            limits=limits.data_ptr(),
            orders=self._orders.data_ptr(),
            positions=self._positions.data_ptr(),
            counts=self._counts.data_ptr(),
            thresholds=self._thresholds.data_ptr(),
        )

    def add(self, keys: torch.Tensor, first_position: int) -> None:
        """Keys [m, dim] float32 or bfloat16 at positions first_position, first_position + 1, ...: after all
        that were added before. Rows may lie apart."""
        arguments = self._arguments
        assert keys.shape[1] == arguments.dim
        assert keys.stride(1) == 1 or arguments.dim <= 1
        assert keys.dtype in (torch.float32, torch.bfloat16), keys.dtype
        arguments.num_keys, arguments.key_stride = len(keys), keys.stride(0)
        arguments.keys, arguments.is_bfloat16 = keys.data_ptr(), keys.dtype == torch.bfloat16
        arguments.first_position = first_position
        _tile(self._instruction_set, ctypes.byref(arguments))

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(orders, positions) [n, topk] int32 of the best, positions ascending: views of `candidates`.

        Orders compare as the scores do: they are a score's bits, those of negative ones turned around.
        A query that sees fewer keys than topk has the lowest order and ABSENT behind them.
        """
        _finish(self._instruction_set, ctypes.byref(self._arguments))
        topk = self._arguments.topk
        return self._orders[:, :topk], self._positions[:, :topk]
