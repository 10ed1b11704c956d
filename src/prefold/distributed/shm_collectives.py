"""Collectives over a shared-memory channel, for the ranks of one host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from prefold.distributed.shm import Channel, Exchange, Waiter

PIECE_BYTES = 4 << 20
"""Large tensors move in pieces of this size. Smaller ones were slower: each costs a hand-over."""

SUM_BLOCK = 16384
"""Elements summed at a time: the partial sums stay in the second-level cache."""

SLICED_SUM_BYTES = 1 << 16
"""From this size on each of 3 or more ranks sums a slice and the slices are gathered."""


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


class ShmCollectives:
    """See `group.Collectives`.

    Started gathers have a channel of their own: whatever their number, they never hold the slots that
    other ops need. Their result is read in place and must fit into a slot, so their slots
    grow when needed, on all ranks together. The other ops move large tensors in pieces.

    Args:
        slot_bytes: first size of the slots for started gathers.
    """

    def __init__(self, rank: int, size: int, slot_bytes: int, waiter: Waiter, exchange: Exchange) -> None:
        self._rank = rank
        self._size = size
        self._waiter = waiter
        self._exchange = exchange
        self._channel = Channel(rank, size, min(slot_bytes, PIECE_BYTES), waiter, exchange)
        self._gathers = Channel(rank, size, slot_bytes, waiter, exchange)
        with torch.inference_mode(False):
            self._sum = torch.empty(SUM_BLOCK, dtype=torch.float32)
            self._term = torch.empty(SUM_BLOCK, dtype=torch.float32)

    def all_reduce(self, x: torch.Tensor) -> None:
        # With two ranks a sliced sum reads as much as a whole one and waits once more.
        if self._size > 2 and x.nbytes >= SLICED_SUM_BYTES:
            for piece in self._pieces(x):
                self._sliced_sum(x[piece])
            return
        for piece, parts in self._swaps(x):
            self._sum_into(x[piece], parts)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
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

    def start_all_gather(self, x: torch.Tensor) -> ShmGather:
        if x.nbytes > self._gathers.slot_bytes:
            # Nobody may be missing when memory is exchanged. Gathers still in flight keep the old channel.
            self.barrier()
            slot_bytes = max(2 * self._gathers.slot_bytes, 1 << (x.nbytes - 1).bit_length())
            self._gathers = Channel(self._rank, self._size, slot_bytes, self._waiter, self._exchange)
        sequence = self._gathers.put(x)
        return ShmGather(self._gathers, self._size, sequence, x.numel(), x.dtype)

    def _pieces(self, x: torch.Tensor) -> Iterator[slice]:
        """Ranges of the last dim of `x` that fit into a slot."""
        length = x.shape[-1]
        step = self._channel.slot_bytes // (x.nbytes // length)
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


def _parts(channel: Channel, size: int, sequence: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [channel.read(rank, sequence, numel, dtype) for rank in range(size)]
