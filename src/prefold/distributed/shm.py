"""Messages between the ranks of one host through shared memory, read in place.

What a rank has to say on a channel is in its `Box`:

    published | consumed | slots | counts        a header, mapped by all from the start
    slot 0, slot 1                               memory that grows with what is sent

Message s (1, 2, ...) of a rank goes into its slot `s % 2`; then `published = s` tells the others that
they may read it. `consumed = s` tells that this rank no longer reads message s of anybody, so
the owner of a slot may write message s + 2 as soon as everyone has consumed s. Each counter has
one writer and a cache line of its own.

Nobody has to agree on the size of a slot: when a message does not fit, its sender replaces the slot, which
nobody reads any more, by a larger one and announces that in its header; receivers map it when they first
read from it. So a channel that is not used takes no memory but its header.

The counters are plain loads and stores, no atomics. That is sound where stores become visible in
program order and loads are not reordered with loads, as on x86-64 (total store order):
`shm_host.shared_memory_is_supported` says so, and other machines use gloo.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from prefold.distributed.errors import CollectiveError, RanksMissing
from prefold.distributed.slots import NUM_SLOTS, slot_bytes

LINE = 8
"""int64 per cache line (64 bytes)."""
PUBLISHED, CONSUMED, SLOT_FDS, SLOT_SIZES, COUNTS = 0, LINE, 2 * LINE, 2 * LINE + NUM_SLOTS, 3 * LINE
"""Places in a header, in int64. The counts of an all-to-all: one per receiver and slot."""
SPIN_S = 100e-6
FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-4
"""A rank that wakes late keeps all others waiting. Sleeps of 0.1 ms cost a few percent of an idle core."""
LONGEST_SLEEP_CROWDED_S = 1e-3
"""With more ranks than cores every wake-up takes time from a rank that computes."""
CHECK_S = 0.2
"""How often a rank that waits for long looks whether the processes that it depends on are alive."""


def header_words(size: int) -> int:
    """int64 of a box's header in a group of `size` ranks: whole cache lines."""
    return -(-(COUNTS + NUM_SLOTS * size) // LINE) * LINE


class Waiter:
    """Waits for what another process does: spins for a moment, then sleeps, longer and longer up to a limit.

    With more ranks than cores the rank that everyone waits for has to get a core, so then it yields
    instead of spinning. Where each rank has a core it must not yield: if anything else runs on the machine,
    a yield gives that a whole time slice, and a short sleep does not.

    Args:
        timeout_s: how long to wait.
        can_spin: whether each rank has a core.
        ended: which of these ranks of the group are processes that have ended.
    """

    def __init__(self, timeout_s: float, can_spin: bool, ended: Callable[[Sequence[int]], list[int]]) -> None:
        self.can_spin = can_spin
        self._timeout_s = timeout_s
        self._ended = ended
        self._parent = os.getppid()

    def wait(self, ready: Callable[[], bool], awaited: Callable[[], list[int]]) -> None:
        """Return as soon as `ready()`.

        Args:
            ready: asked over and over.
            awaited: ranks of the group that are not ready yet.

        RanksMissing: after the time-out, or as soon as awaited ranks are seen to have ended.
        CollectiveError: the parent process ended.
        """
        if ready():
            return
        start = time.monotonic()
        while time.monotonic() - start < SPIN_S:
            if not self.can_spin:
                os.sched_yield()
            if ready():
                return
        next_check = start + CHECK_S
        pause, longest = FIRST_SLEEP_S, LONGEST_SLEEP_S if self.can_spin else LONGEST_SLEEP_CROWDED_S
        while not ready():
            now = time.monotonic()
            if now - start > self._timeout_s:
                raise RanksMissing(awaited())
            if now > next_check:
                next_check = now + CHECK_S
                self._check_processes(ready, awaited)
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def _check_processes(self, ready: Callable[[], bool], awaited: Callable[[], list[int]]) -> None:
        if os.getppid() != self._parent:
            raise CollectiveError("the parent process of this rank ended")
        ended = self._ended(awaited())
        # It may have done its part and left since `ready` was asked.
        if ended and not ready():
            raise RanksMissing(ended, "a process ended")


class Box:
    """One rank's end of a channel: header and two slots, written by their owner and read by all.

    Slots are memory without a name in any file system (memfd): it goes with the last process that uses
    it, however that ends, and the size of /dev/shm (64 MB in a default container) is no limit.

    Args:
        header: [header_words] int64, shared.
        pid: of the owner.
    """

    def __init__(self, header: memoryview, pid: int) -> None:
        self.header = header
        self._pid = pid
        self._mapped = [0] * NUM_SLOTS
        self._views: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in range(NUM_SLOTS)]
        self._files: list[weakref.finalize | None] = [None] * NUM_SLOTS

    def reserve(self, slot: int, num_bytes: int) -> None:
        """Owner only, and while nobody reads the slot: make it hold `num_bytes`, or raise CollectiveError.

        Gives the file its pages now: finding none at the first write would be a SIGBUS.
        """
        if num_bytes <= self.header[SLOT_SIZES + slot]:
            return
        size = slot_bytes(num_bytes)
        fd = os.memfd_create("prefold")
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise CollectiveError(f"no {size:,} bytes of shared memory: {error}") from error
        if (old := self._files[slot]) is not None:
            old()
        # Open as long as a reader may come for it.
        self._files[slot] = weakref.finalize(self, os.close, fd)
        self.header[SLOT_FDS + slot] = fd
        self.header[SLOT_SIZES + slot] = size

    def read(self, slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] the beginning of a slot, in place."""
        # Sizes only grow, so a new size is a new file.
        if self._mapped[slot] != self.header[SLOT_SIZES + slot]:
            self._mapped[slot] = self.header[SLOT_SIZES + slot]
            self._views[slot] = {}
        view = self._views[slot].get(dtype)
        if view is None:
            view = self._views[slot][dtype] = self._view(slot, dtype)
        return view[:numel]

    def _view(self, slot: int, dtype: torch.dtype) -> torch.Tensor:
        path = f"/proc/{self._pid}/fd/{self.header[SLOT_FDS + slot]}"
        try:
            fd = os.open(path, os.O_RDWR)
            try:
                memory = mmap.mmap(fd, self._mapped[slot])
            finally:
                os.close(fd)
        except OSError as error:
            raise CollectiveError(f"cannot map {path}: {error}") from error
        # A normal tensor even if the caller is in inference mode: slots are written in both modes.
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=dtype)


class Channel:
    """Every rank's stream of messages to all ranks of a group. Knows nothing of collectives.

    All ranks put the same number of messages, in the same order; message numbers are equal on all ranks.

    Args:
        rank: in the group.
        boxes: of all ranks of the group, for this channel alone.
    """

    def __init__(self, rank: int, boxes: Sequence[Box], waiter: Waiter) -> None:
        self.size = len(boxes)
        self._rank = rank
        self._boxes = list(boxes)
        self._waiter = waiter
        self._headers = [box.header for box in boxes]
        self._own = self._headers[rank]
        self._released: set[int] = set()

    @property
    def sequence(self) -> int:
        """Number of the last message that this rank has published."""
        return self._own[PUBLISHED]

    def put(self, x: torch.Tensor | None) -> int:
        """Copy `x` (any strides) into a slot, unless it is what `claim` returned; publish it, and return the
        message's number.

        None publishes a message without contents, at once. Waits until all have consumed the slot's
        last message. RanksMissing names those that did not.
        """
        if x is None:
            return self.publish()
        slot = self.claim(x.nbytes, x.numel(), x.dtype)
        if slot.data_ptr() != x.data_ptr():
            (slot if x.dim() == 1 else slot.view(x.shape)).copy_(x)
        return self.publish()

    def claim(self, num_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] the next message's slot, to be written before `publish`; it holds at least `num_bytes`."""
        sequence = self.sequence + 1
        last = sequence - NUM_SLOTS
        assert self._own[CONSUMED] >= last, (
            f"message {last} must be released before message {sequence} is put"
        )
        self._wait(CONSUMED, last)
        self._boxes[self._rank].reserve(sequence % NUM_SLOTS, num_bytes)
        return self.read(self._rank, sequence, numel, dtype)

    def publish(self, counts: Sequence[int] = ()) -> int:
        """Let the others read the slot (and `counts`, one per rank); return the message's number."""
        sequence = self.sequence + 1
        place = COUNTS + sequence % NUM_SLOTS * self.size
        for index, count in enumerate(counts, place):
            self._own[index] = count
        self._own[PUBLISHED] = sequence
        return sequence

    def wait(self, sequence: int, source: int | None = None) -> None:
        """Until message `sequence` of all ranks (or of `source`) may be read. RanksMissing: see Waiter."""
        self._wait(PUBLISHED, sequence, source)

    def read(self, rank: int, sequence: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] the beginning of message `sequence` of `rank`, in place."""
        return self._boxes[rank].read(sequence % NUM_SLOTS, numel, dtype)

    def counts(self, rank: int, sequence: int) -> list[int]:
        """[size] what `rank` published with message `sequence`."""
        place = COUNTS + sequence % NUM_SLOTS * self.size
        return self._headers[rank][place : place + self.size].tolist()

    def release(self, sequence: int) -> None:
        """This rank no longer reads message `sequence` of anybody. Any order."""
        self._released.add(sequence)
        consumed = self._own[CONSUMED]
        while consumed + 1 in self._released:
            consumed += 1
            self._released.remove(consumed)
        self._own[CONSUMED] = consumed

    def _wait(self, counter: int, sequence: int, source: int | None = None) -> None:
        headers = self._headers if source is None else [self._headers[source]]

        def ready() -> bool:
            for header in headers:  # noqa: SIM110 (all() takes twice as long, and this is polled)
                if header[counter] < sequence:
                    return False
            return True

        def awaited() -> list[int]:
            late = [rank for rank, header in enumerate(self._headers) if header[counter] < sequence]
            return late if source is None else [source]

        self._waiter.wait(ready, awaited)


class Stream:
    """Messages from one rank to one other, in order. The sender uses `put`, the receiver `take`.

    Args:
        sender, receiver: their ranks in the group, for errors.
        outbox: the sender's box; its counter of published messages and its slots are used.
        inbox: the receiver's box; its counter of consumed messages is used.
    """

    def __init__(self, sender: int, receiver: int, outbox: Box, inbox: Box, waiter: Waiter) -> None:
        self._sender = sender
        self._receiver = receiver
        self._outbox = outbox
        self._inbox = inbox
        self._waiter = waiter
        self._sequence = 0

    def put(self, x: torch.Tensor) -> None:
        """Copy the flat `x`; waits only if the two messages before it are unread."""
        sequence = self._sequence + 1
        slot, last = sequence % NUM_SLOTS, sequence - NUM_SLOTS
        self._waiter.wait(lambda: self._inbox.header[CONSUMED] >= last, lambda: [self._receiver])
        self._outbox.reserve(slot, x.nbytes)
        self._outbox.read(slot, x.numel(), x.dtype).copy_(x)
        self._outbox.header[PUBLISHED] = self._sequence = sequence

    def take(self, out: torch.Tensor) -> None:
        """The next message into the flat `out`."""
        sequence = self._sequence + 1
        self._waiter.wait(lambda: self._outbox.header[PUBLISHED] >= sequence, lambda: [self._sender])
        out.copy_(self._outbox.read(sequence % NUM_SLOTS, out.numel(), out.dtype))
        self._inbox.header[CONSUMED] = self._sequence = sequence
