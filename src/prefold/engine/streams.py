"""Requests of a server that somebody reads: which have news for him, and which still wait for the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from enum import Enum

from prefold.engine.output_processor import LiveRequest


class Phase(Enum):
    """SENT: the engine has not said anything about it yet. WAITING: it was not taken into a step."""

    SENT = 0
    WAITING = 1
    RUNNING = 2


class Stream:
    """One request and its reader.

    Attributes:
        event: there is something new in `request`, or an `error`, which ends it.
    """

    def __init__(self, request_id: str, request: LiveRequest, num_samples: int) -> None:
        self.request_id = request_id
        self.request = request
        self.num_samples = num_samples
        self.phase = Phase.SENT
        self.event = asyncio.Event()
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.event.set()


class Streams:
    """All unfinished ones.

    Args:
        num_seats: samples that the engine runs at the same time, if it has memory for them.

    Attributes:
        changed: set whenever one is removed.
    """

    def __init__(self, num_seats: int) -> None:
        self.changed = asyncio.Event()
        self._num_seats = num_seats
        self._streams: dict[str, Stream] = {}
        self._num: Counter[Phase] = Counter()
        self._num_running_samples = 0

    def __len__(self) -> int:
        return len(self._streams)

    def all(self) -> list[Stream]:
        return list(self._streams.values())

    def get(self, request_id: str) -> Stream | None:
        return self._streams.get(request_id)

    @property
    def num_waiting_with_one_more(self) -> int:
        """How many would wait if one more came. What the engine has not spoken of yet takes the free seats,
        unless somebody waits: then there is no seat for him, and none for who comes later."""
        free = 0 if self._num[Phase.WAITING] else max(0, self._num_seats - self._num_running_samples)
        return self._num[Phase.WAITING] + max(0, self._num[Phase.SENT] + 1 - free)

    def add(self, stream: Stream) -> None:
        self._streams[stream.request_id] = stream
        self._num[stream.phase] += 1

    def mark_waiting(self, request_id: str) -> None:
        self._move(self._streams.get(request_id), Phase.WAITING)

    def mark_running(self, request_id: str) -> None:
        """Also of one that was preempted and runs again."""
        self._move(self._streams.get(request_id), Phase.RUNNING)

    def _move(self, stream: Stream | None, phase: Phase) -> None:
        if stream is not None and phase is not stream.phase:
            self._count(stream, -1)
            stream.phase = phase
            self._count(stream, 1)

    def _count(self, stream: Stream, change: int) -> None:
        self._num[stream.phase] += change
        if stream.phase is Phase.RUNNING:
            self._num_running_samples += change * stream.num_samples

    def remove(self, stream: Stream) -> bool:
        """Forget it; False if it was not there any more."""
        if self._streams.get(stream.request_id) is not stream:
            return False
        del self._streams[stream.request_id]
        self._count(stream, -1)
        self.changed.set()
        return True
