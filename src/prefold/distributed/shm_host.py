"""The ranks of one host meet: they map each other's headers and can see each other end."""

from __future__ import annotations

import mmap
import os
import platform
import select
import sys
import weakref
from collections.abc import Callable, Sequence

WORD = 8
"""Bytes of an int64."""

Exchange = Callable[[object], list]
"""Gives every rank's argument to every rank of the world, in rank order; all call it together."""


def shared_memory_is_supported() -> bool:
    """Whether plain loads and stores order messages on this machine (x86-64 Linux)."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class Host:
    """What a rank needs of the other ranks of its host.

    Args:
        segments: by world rank: its headers, [words] int64.
        pids: by world rank.
    """

    def __init__(self, segments: dict[int, memoryview], pids: dict[int, int]) -> None:
        self._segments = segments
        self.pids = pids
        self._pidfds = {}
        for rank, pid in pids.items():
            try:
                self._pidfds[rank] = os.pidfd_open(pid)
            except OSError:  # Without it, the end of a process shows in a time-out.
                continue
        weakref.finalize(self, _close_all, list(self._pidfds.values()))

    def headers(self, ranks: Sequence[int], start: int, words: int) -> list[memoryview]:
        """[words] from `start` of each rank's segment."""
        return [self._segments[rank][start : start + words] for rank in ranks]

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Which of these world ranks are processes that have ended."""
        poll = select.poll()
        fds = {self._pidfds[rank]: rank for rank in ranks if rank in self._pidfds}
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return sorted(fds[fd] for fd, _ in poll.poll(0))


def meet(rank: int, neighbours: Sequence[int], words: int, exchange: Exchange) -> Host | str:
    """The Host of `rank`; or why some rank of the world cannot share memory, the same on all ranks.

    Args:
        neighbours: world ranks of this host, this one included.
        words: int64 of headers per rank, zero at first; equal on all ranks.
    """
    fd, error = -1, None
    try:
        if not shared_memory_is_supported():
            raise OSError("shared memory needs x86-64 Linux")
        fd = os.memfd_create("prefold")
        os.posix_fallocate(fd, 0, words * WORD)
    except OSError as os_error:
        error = f"rank {rank}: no {words * WORD:,} bytes of shared memory: {os_error}"
    try:
        offers = exchange((os.getpid(), fd, error))
        segments = {}
        try:
            for peer in neighbours:
                pid, peer_fd, peer_error = offers[peer]
                if peer_error is None:
                    segments[peer] = _map(pid, peer_fd, words)
        except OSError as os_error:
            error = f"rank {rank}: {os_error}"
        # Also keeps every file open until all have mapped it.
        errors = [error for error in exchange(error) if error is not None]
    finally:
        if fd >= 0:
            os.close(fd)
    if errors:
        return "; ".join(errors)
    return Host(segments, {peer: offers[peer][0] for peer in neighbours})


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _map(pid: int, fd: int, words: int) -> memoryview:
    own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return memoryview(mmap.mmap(own_fd, words * WORD)).cast("q")
    finally:
        os.close(own_fd)
