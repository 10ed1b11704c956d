"""Sizes of the shared memory that messages between ranks lie in. No torch: who plans memory asks, too."""

from __future__ import annotations

NUM_SLOTS = 2
"""Messages of a rank that are in flight at a time, on each channel: a slot for each."""

PAGE_BYTES = 1 << 12
MIN_SLOT_BYTES = 1 << 14

PIECE_BYTES = 4 << 20
"""Large tensors of collectives that are not started and waited for apart move in pieces of this size. Smaller
ones were slower: each costs a hand-over."""


def slot_bytes(num_bytes: int) -> int:
    """Size of a slot for a message: at most an eighth more, or less than a page. Sizes come in steps, so that
    messages which grow a little each time do not take a new slot each time.

    >>> [slot_bytes(n) for n in (1, 16384, 16385, 65537)]
    [16384, 16384, 20480, 73728]
    >>> slot_bytes(34 << 20) >> 20, slot_bytes(64 << 20) >> 20
    (36, 64)
    """
    if num_bytes <= MIN_SLOT_BYTES:
        return MIN_SLOT_BYTES
    step = max(PAGE_BYTES, 1 << (num_bytes - 1).bit_length() - 4)
    return -(-num_bytes // step) * step
