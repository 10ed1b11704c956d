"""Messages between the ranks of one host through shared memory, read in place.

Each rank owns one segment that all ranks of the group map:

    published | consumed | slot 0 | slot 1

Message s (1, 2, ...) of a rank goes into its slot `s % 2`; then `published = s` tells the others that
they may read it. `consumed = s` tells that this rank no longer reads message s of anybody, so
the owner of a slot may write message s + 2 as soon as everyone has consumed s. Each counter has
one writer and a cache line of its own.

The counters are plain loads and stores, no atomics. That is sound where stores become visible in
program order and loads are not reordered with loads, as on x86-64 (total store order):
`shared_memory_is_supported` says so, and other machines use gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable

import torch

from prefold.distributed.errors import CollectiveError, RanksMissing

PAGE = 4096
NUM_SLOTS = 2
PUBLISHED = 0
CONSUMED = 8
"""Places of the counters in a segment's header, in int64: one cache line (64 bytes) apart."""
SPIN_S = 100e-6
FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3
PARENT_CHECK_S = 0.2
"""How often a rank that waits for long looks whether its parent process is alive."""

Exchange = Callable[[object], list]
"""Gives every rank's argument to every rank, in rank order; all ranks of the group call it together."""


def shared_memory_is_supported() -> bool:
    """Whether plain loads and stores order messages on this machine (x86-64 Linux)."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class Waiter:
    """Waits for what another process does: spins for a moment, then sleeps, longer and longer up to 1 ms.

    With more ranks than cores the rank that everyone waits for has to get a core, so then it yields
    instead of spinning. Where each rank has a core it must not yield: if anything else runs on the machine,
    a yield gives that a whole time slice, and a short sleep does not.
    """

    def __init__(self, timeout_s: float, can_spin: bool) -> None:
        self._timeout_s = timeout_s
        self._can_spin = can_spin
        self._parent = os.getppid()

    def wait(self, ready: Callable[[], bool]) -> bool:
        """True as soon as `ready()`, False after the time-out; CollectiveError if the parent ended."""
        if ready():
            return True
        start = time.monotonic()
        while time.monotonic() - start < SPIN_S:
            if not self._can_spin:
                os.sched_yield()
            if ready():
                return True
        next_check = start + PARENT_CHECK_S
        pause = FIRST_SLEEP_S
        while not ready():
            now = time.monotonic()
            if now - start > self._timeout_s:
                return False
            if now > next_check:
                next_check = now + PARENT_CHECK_S
                if os.getppid() != self._parent:
                    raise CollectiveError("the parent process of this rank ended")
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_SLEEP_S)
        return True


class Channel:
    """Every rank's stream of messages to all ranks of a group. Knows nothing of collectives.

    All ranks put the same number of messages, in the same order; message numbers are equal on all ranks.

    Args:
        rank, size: of the group.
        slot_bytes: largest message, rounded up to pages; equal on all ranks.

    Raises CollectiveError on all ranks if one of them cannot get or map the memory; it names the size.

    The memory has no name in any file system (memfd): it goes with the last process that maps it,
    however that ends, and the size of /dev/shm (64 MB in a default container) is no limit.
    """

    def __init__(self, rank: int, size: int, slot_bytes: int, waiter: Waiter, exchange: Exchange) -> None:
        self.slot_bytes = -(-slot_bytes // PAGE) * PAGE
        self._rank = rank
        self._size = size
        self._waiter = waiter
        self._sequence = 0
        self._released: set[int] = set()
        segments = _map_all(rank, PAGE + NUM_SLOTS * self.slot_bytes, exchange)
        self._segments = segments
        self._counters = [memoryview(segment)[:PAGE].cast("q") for segment in segments]
        self._slots: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def put(self, x: torch.Tensor | None) -> int:
        """Copy `x` (at most `slot_bytes`; any strides) into a slot, publish it, return the message's number.

        None publishes a message without contents, at once. Waits until all have consumed the slot's
        last message. RanksMissing names those that did not.
        """
        sequence = self._sequence + 1
        if x is not None:
            last = sequence - NUM_SLOTS
            assert self._counters[self._rank][CONSUMED] >= last, (
                f"message {last} must be released before message {sequence} is put"
            )
            self._wait(CONSUMED, last)
            self.read(self._rank, sequence, x.numel(), x.dtype).view(x.shape).copy_(x)
        self._sequence = sequence
        self._counters[self._rank][PUBLISHED] = sequence
        return sequence

    def wait(self, sequence: int, source: int | None = None) -> None:
        """Until message `sequence` of all ranks (or of `source`) may be read. RanksMissing: time-out."""
        self._wait(PUBLISHED, sequence, source)

    def read(self, rank: int, sequence: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] the beginning of the slot of message `sequence` of `rank`, in place."""
        place = sequence % NUM_SLOTS
        slot = self._slots.get((rank, place, dtype))
        if slot is None:
            offset = PAGE + place * self.slot_bytes
            # A normal tensor even if the caller is in inference mode: slots are written in both modes.
            with torch.inference_mode(False):
                slot = torch.frombuffer(
                    self._segments[rank], dtype=dtype, count=self.slot_bytes // dtype.itemsize, offset=offset
                )
            self._slots[(rank, place, dtype)] = slot
        return slot[:numel]

    def release(self, sequence: int) -> None:
        """This rank no longer reads message `sequence` of anybody. Any order."""
        self._released.add(sequence)
        consumed = self._counters[self._rank][CONSUMED]
        while consumed + 1 in self._released:
            consumed += 1
            self._released.remove(consumed)
        self._counters[self._rank][CONSUMED] = consumed

    def _wait(self, counter: int, sequence: int, source: int | None = None) -> None:
        counters = self._counters if source is None else [self._counters[source]]

        def ready() -> bool:
            for header in counters:  # noqa: SIM110 (all() takes twice as long, and this is polled)
                if header[counter] < sequence:
                    return False
            return True

        if not self._waiter.wait(ready):
            late = [rank for rank, header in enumerate(self._counters) if header[counter] < sequence]
            raise RanksMissing(late if source is None else [source])


def _map_all(rank: int, num_bytes: int, exchange: Exchange) -> list[mmap.mmap]:
    """Reserve this rank's segment of `num_bytes` and map those of all ranks, in rank order."""
    fd = os.memfd_create("prefold")
    try:
        offers = exchange((os.getpid(), fd, _reserve(fd, num_bytes)))
        errors = [f"rank {peer} of the group: {error}" for peer, (_, _, error) in enumerate(offers) if error]
        segments = []
        if not errors:
            try:
                segments = [_map(pid, peer_fd, num_bytes) for pid, peer_fd, _ in offers]
            except OSError as error:
                errors = [f"rank {rank} of the group: {error}"]
            # Also keeps every file open until all have mapped it.
            errors = [error for rank_errors in exchange(errors) for error in rank_errors]
    finally:
        os.close(fd)
    if errors:
        raise CollectiveError(f"no {num_bytes:,} bytes of shared memory on every rank: {'; '.join(errors)}")
    return segments


def _reserve(fd: int, num_bytes: int) -> str | None:
    """Give the file its pages now (finding none at the first write would be a SIGBUS), or say why not."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        return str(error)
    return None


def _map(pid: int, fd: int, num_bytes: int) -> mmap.mmap:
    own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return mmap.mmap(own_fd, num_bytes)
    finally:
        os.close(own_fd)
