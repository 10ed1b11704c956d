"""Ranks as threads of one process: enough to test code that takes a group, in milliseconds.

For ranks as processes, with the real collectives, see `run_ranks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadGroup:
    """The collectives of `distributed.group.Group` that layers use, between threads."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, slots: list[torch.Tensor | None]
    ) -> None:
        self.name, self.rank, self.size = "tp", rank, size
        self.num_gathers = 0
        self._barrier, self._slots = barrier, slots

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place, added in the order of the ranks on each of them."""
        parts = self._exchange(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x of every rank: [size, *x.shape]."""
        return torch.stack(self._exchange(x), out=out)

    def start_all_gather(self, x: torch.Tensor) -> ThreadGather:
        """x of every rank, later. Counts as `num_gathers`."""
        assert x.is_contiguous()
        self.num_gathers += 1
        return ThreadGather(self, x)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [x]
        self._slots[self.rank] = x.clone()
        self._barrier.wait(timeout=60)
        parts = [slot for slot in self._slots if slot is not None]
        assert all(part.shape == x.shape for part in parts)
        self._barrier.wait(timeout=60)
        return parts


class ThreadGather:
    """See `distributed.group.Gather`. What breaks its rules shows: `x` changed before `wait`, or
    parts read after `release`."""

    def __init__(self, group: ThreadGroup, x: torch.Tensor) -> None:
        self._group = group
        self._x = x
        self._at_start = x.clone()
        self._parts: list[torch.Tensor] = []

    def wait(self) -> list[torch.Tensor]:
        same_bits = torch.equal(self._x.view(torch.uint8), self._at_start.view(torch.uint8))
        assert same_bits, "changed while it was gathered"
        self._parts = [part.clone() for part in self._group._exchange(self._at_start)]
        return self._parts

    def release(self) -> None:
        for part in self._parts:
            part.fill_(torch.nan if part.is_floating_point() else 77)


def run_threads(size: int, function: Callable[[ThreadGroup], T]) -> list[T]:
    """`function(group)` on `size` threads that share a group; results by rank. The first error is raised."""
    barrier = threading.Barrier(size)
    slots: list[torch.Tensor | None] = [None] * size

    def rank_main(rank: int) -> T:
        try:
            return function(ThreadGroup(rank, size, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def single_rank() -> ThreadGroup:
    """A group of one: every collective is the identity."""
    return ThreadGroup(0, 1, threading.Barrier(1), [None])
