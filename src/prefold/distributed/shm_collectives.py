"""Collectives over a shared-memory channel, for the ranks of one host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from prefold.distributed import shm
from prefold.distributed.errors import CollectiveError
from prefold.distributed.shm import Box, Channel, Stream, Waiter
from prefold.distributed.slots import PIECE_BYTES
from prefold.kernels import library, shared_sum
from prefold.kernels.shared_sum import SharedSum, Status

SUM_BLOCK = 16384
"""Elements summed at a time: the partial sums stay in the second-level cache."""

SLICED_SUM_BYTES = 1 << 16
"""From this size on each of 3 or more ranks sums a slice and the slices are gathered."""


NATIVE_SUM_BYTES = 1 << 16
"""Up to this size an all-reduce takes as long as its Python, and is one native call."""

SMALL_BYTES = 1024
"""Up to this size an all-gather takes as long as its Python: it then does without pieces."""


class ShmGather:
    """An all-gather in flight; holds its slots from `start` to `release`."""

    def __init__(self, channel: Channel, size: int, sequence: int, numel: int, dtype: torch.dtype) -> None:
        self._channel = channel
        self._size = size
        self._sequence = sequence
        self._numel = numel
        self._dtype = dtype

    def wait(self) -> list[torch.Tensor]:
        self._channel.wait(self._sequence)
        return _parts(self._channel, self._size, self._sequence, self._numel, self._dtype)

    def release(self) -> None:
        self._channel.release(self._sequence)


class ShmExchange:
    """An all-to-all in flight. Each sender's rows lie in its slot, sorted by receiver: a receiver finds its
    own by the sender's counts. Rows of a rank to itself stay where they are."""

    def __init__(
        self,
        channel: Channel,
        rank: int,
        sequence: int,
        own: torch.Tensor,
        receive_counts: Sequence[int] | None,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._sequence = sequence
        self._own = own
        self._receive_counts = receive_counts

    def wait(self) -> list[torch.Tensor]:
        self._channel.wait(self._sequence)
        return [
            self._own if source == self._rank else self._received(source)
            for source in range(self._channel.size)
        ]

    def _received(self, source: int) -> torch.Tensor:
        counts = self._channel.counts(source, self._sequence)
        start, count = sum(counts[: self._rank]), counts[self._rank]
        expected = self._receive_counts
        if expected is not None and expected[source] != count:
            raise CollectiveError(
                f"rank {source} of the group sent {count} rows where {expected[source]} were expected"
            )
        width, dtype = self._own.shape[1], self._own.dtype
        if not count:
            return self._own.new_empty(0, width)
        flat = self._channel.read(source, self._sequence, (start + count) * width, dtype)
        return flat[start * width :].view(count, width)

    def release(self) -> None:
        self._channel.release(self._sequence)


class ShmCollectives:
    """See `group.Collectives`.

    Started gathers and exchanges have a channel each: whatever their number, they never hold the slots
    that other ops need. Their result is read in place, so it is one message. The other ops move
    large tensors in pieces.

    Args:
        rank: in the group.
        headers: one per rank of the group, [header_words] int64 each.
        pids: one per rank of the group.
        piece_bytes: see above; PIECE_BYTES measured best.
    """

    def __init__(
        self,
        rank: int,
        headers: Sequence[memoryview],
        pids: Sequence[int],
        waiter: Waiter,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._rank = rank
        self._size = len(pids)
        self._piece_bytes = piece_bytes
        words = shm.header_words(self._size)

        def box(owner: int, index: int) -> Box:
            return Box(headers[owner][index * words : (index + 1) * words], pids[owner])

        boxes = [[box(owner, index) for owner in range(self._size)] for index in range(3)]
        self._channel, self._gathers, self._exchanges = (Channel(rank, own, waiter) for own in boxes)
        self._boxes = boxes[0]
        self._sum_natively = _shared_sum(rank, self._boxes) if waiter.can_spin else None
        self._outgoing: dict[int, Stream] = {}
        self._incoming: dict[int, Stream] = {}
        # Box i of a rank serves the pair with rank i: what it sends to i, and how far it has read from i.
        for peer in range(self._size):
            own, other = box(rank, 3 + peer), box(peer, 3 + rank)
            self._outgoing[peer] = Stream(rank, peer, own, other, waiter)
            self._incoming[peer] = Stream(peer, rank, other, own, waiter)
        with torch.inference_mode(False):
            self._sum = torch.empty(SUM_BLOCK, dtype=torch.float32)
            self._term = torch.empty(SUM_BLOCK, dtype=torch.float32)

    @staticmethod
    def header_words(size: int) -> int:
        """int64 of shared memory per rank that a group of `size` ranks starts with."""
        return (3 + size) * shm.header_words(size)

    def all_reduce(self, x: torch.Tensor) -> None:
        # With two ranks a sliced sum reads as much as a whole one and waits once more.
        if self._size > 2 and x.nbytes >= SLICED_SUM_BYTES:
            for piece in self._pieces(x):
                self._sliced_sum(x[piece])
        elif self._sum_natively is not None and x.nbytes <= NATIVE_SUM_BYTES and x.dtype in shared_sum.DTYPES:
            self._small_sum(x, self._sum_natively)
        else:
            for piece, parts in self._swaps(x):
                self._sum_into(x[piece], parts)

    def _small_sum(self, x: torch.Tensor, sum_natively: SharedSum) -> None:
        """In one call, if the other ranks are in time and their slots are where they were."""
        status = sum_natively(x)
        if status == Status.DONE:
            return
        sequence = self._channel.sequence if status == Status.PUBLISHED else self._channel.put(x)
        for _, parts in self._received(slice(0, x.numel()), sequence, x):
            self._sum_into(x, parts)
        slot = sequence % shm.NUM_SLOTS
        for rank, box in enumerate(self._boxes):
            sum_natively.map_slot(rank, slot, box.read(slot, box.header[shm.SLOT_SIZES + slot], torch.uint8))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if x.nbytes <= SMALL_BYTES:
            sequence = self._channel.put(x)
            self._channel.wait(sequence)
            for rank, row in enumerate(out.unbind(0)):
                row.copy_(self._channel.read(rank, sequence, x.numel(), x.dtype))
            self._channel.release(sequence)
            return
        for piece, parts in self._swaps(x):
            for rank, part in enumerate(parts):
                out[rank, piece].copy_(part)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for piece, parts in self._swaps(x):
            self._sum_into(out[piece], [part.view(self._size, -1)[self._rank] for part in parts])

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        for piece in self._pieces(x):
            part = x[piece]
            sequence = self._channel.put(part if self._rank == src else None)
            self._channel.wait(sequence, source=src)
            if self._rank != src:
                part.copy_(self._channel.read(src, sequence, part.numel(), part.dtype))
            self._channel.release(sequence)

    def barrier(self) -> None:
        sequence = self._channel.put(None)
        self._channel.wait(sequence)
        self._channel.release(sequence)

    def gather_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._gathers.claim(numel * dtype.itemsize, numel, dtype)

    def start_all_gather(self, x: torch.Tensor) -> ShmGather:
        sequence = self._gathers.put(x)
        return ShmGather(self._gathers, self._size, sequence, x.numel(), x.dtype)

    def start_all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], capacity: int, receive_counts: Sequence[int] | None
    ) -> ShmExchange:
        """Slots hold `capacity` rows from the start: their growth does not depend on this rank's rows."""
        before = sum(send_counts[: self._rank])
        after = before + send_counts[self._rank]
        width = x.shape[1]
        rows = self._exchanges.claim(capacity * width * x.element_size(), x.numel(), x.dtype).view(x.shape)
        rows[:before].copy_(x[:before])
        rows[after:].copy_(x[after:])
        sequence = self._exchanges.publish(send_counts)
        return ShmExchange(self._exchanges, self._rank, sequence, x[before:after], receive_counts)

    def send(self, x: torch.Tensor, dst: int) -> None:
        self._outgoing[dst].put(x)

    def recv(self, out: torch.Tensor, src: int) -> None:
        self._incoming[src].take(out)

    def _pieces(self, x: torch.Tensor) -> Iterator[slice]:
        """Ranges of the last dim of `x` that fit into a slot."""
        length = x.shape[-1]
        step = self._piece_bytes // (x.nbytes // length)
        return (slice(i, min(i + step, length)) for i in range(0, length, step))

    def _swaps(self, x: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """(range of the last dim, every rank's part of it, flat, in place until the next step).

        The next piece is put before the parts of one are waited for: ranks that are out of step
        by a piece do not wait for each other. Must be run to the end.
        """
        last = None
        for piece in self._pieces(x):
            part = x[..., piece]
            sequence = self._channel.put(part)
            if last is not None:
                yield from self._received(*last)
            last = (piece, sequence, part)
        if last is not None:
            yield from self._received(*last)

    def _received(
        self, piece: slice, sequence: int, like: torch.Tensor
    ) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        self._channel.wait(sequence)
        yield piece, _parts(self._channel, self._size, sequence, like.numel(), like.dtype)
        self._channel.release(sequence)

    def _sliced_sum(self, x: torch.Tensor) -> None:
        sequence = self._channel.put(x)
        self._channel.wait(sequence)
        parts = _parts(self._channel, self._size, sequence, x.numel(), x.dtype)
        bounds = [x.numel() * rank // self._size for rank in range(self._size + 1)]
        slices = [slice(low, high) for low, high in pairwise(bounds)]
        own = slices[self._rank]
        self._sum_into(x[own], [part[own] for part in parts])
        self._channel.release(sequence)
        sequence = self._channel.put(x[own])
        self._channel.wait(sequence)
        for rank, place in enumerate(slices):
            if rank != self._rank:
                x[place].copy_(self._channel.read(rank, sequence, place.stop - place.start, x.dtype))
        self._channel.release(sequence)

    def _sum_into(self, out: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """`out` = sum of `parts` in rank order, so the bits are the same on whichever rank does it.

        Half-precision parts are summed in float32 and rounded once. `out` is no part's memory.
        """
        if out.numel() <= SUM_BLOCK:
            self._sum_block(out, parts)
            return
        for start in range(0, out.numel(), SUM_BLOCK):
            block = slice(start, start + SUM_BLOCK)
            self._sum_block(out[block], [part[block] for part in parts])

    def _sum_block(self, out: torch.Tensor, parts: list[torch.Tensor]) -> None:
        if out.dtype not in (torch.bfloat16, torch.float16):
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
            return
        total, term = self._sum[: out.numel()], self._term[: out.numel()]
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(term.copy_(part))
        out.copy_(total)


def _shared_sum(rank: int, boxes: Sequence[Box]) -> SharedSum | None:
    if not library.is_available():
        return None
    places = shm.PUBLISHED, shm.CONSUMED, shm.SLOT_SIZES
    return SharedSum(rank, [box.header for box in boxes], places, shm.NUM_SLOTS, shm.SPIN_S)


def _parts(channel: Channel, size: int, sequence: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [channel.read(rank, sequence, numel, dtype) for rank in range(size)]
