"""Sums of few numbers over ranks that share memory, in native code (shared_sum.cpp).

A token's all-reduces are of some kilobytes, and there are two in each layer: Python takes longer to write,
wait, read and add than ranks take to exchange them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch

from prefold.kernels import library

_Arguments = library.structure(
    "SumArguments",
    (
        *("rank", "size", "num_slots", "published", "consumed", "slot_sizes"),
        *("spin_ns", "is_bfloat16", "count", "status"),
    ),
    ("headers", "slots", "mapped", "x"),
)
_shared_sum = library.declare("shared_sum", ctypes.c_void_p)

DTYPES = (torch.float32, torch.bfloat16)


class Status(IntEnum):
    """How far a sum has come: if not to its end, somebody is late, or a slot has to be mapped."""

    NOTHING, PUBLISHED, DONE = range(3)


class SharedSum:
    """Sums over the ranks of one channel; see distributed.shm for how messages lie in memory.

    Args:
        rank: this one.
        headers: of all ranks, int64.
        places: of the counters of published and of consumed messages, and of the slots' sizes in a header.
        num_slots: of a rank.
        spin_s: how long a rank waits for others.
    """

    def __init__(
        self,
        rank: int,
        headers: Sequence[memoryview],
        places: tuple[int, int, int],
        num_slots: int,
        spin_s: float,
    ) -> None:
        count = len(headers) * num_slots
        buffers = [(ctypes.c_int64 * len(header)).from_buffer(header) for header in headers]
        headers_at = (ctypes.c_void_p * len(headers))(*[ctypes.addressof(buffer) for buffer in buffers])
        self._num_slots = num_slots
        self._slots, self._mapped = (ctypes.c_void_p * count)(), (ctypes.c_int64 * count)()
        self._kept = buffers, headers_at
        self._arguments = arguments = _Arguments(rank=rank, size=len(headers), num_slots=num_slots)
        arguments.published, arguments.consumed, arguments.slot_sizes = places
        arguments.spin_ns = int(spin_s * 1e9)
        arguments.headers, arguments.slots, arguments.mapped = (
            ctypes.addressof(array) for array in (headers_at, self._slots, self._mapped)
        )

    def map_slot(self, rank: int, slot: int, memory: torch.Tensor) -> None:
        """Where a rank's slot lies now: all of it, as bytes. It must stay there until the next call."""
        place = rank * self._num_slots + slot
        self._slots[place], self._mapped[place] = memory.data_ptr(), memory.nbytes

    def __call__(self, x: torch.Tensor) -> Status:
        """Sum x [n], contiguous, float32 or bfloat16, over the ranks, in place, as message `published + 1`.

        Not DONE: x is as it was.
        """
        assert x.is_contiguous()
        assert x.dtype in DTYPES, x.dtype
        arguments = self._arguments
        arguments.is_bfloat16, arguments.count = x.dtype == torch.bfloat16, x.numel()
        arguments.x = x.data_ptr()
        _shared_sum(None, ctypes.addressof(arguments))
        return Status(arguments.status)
