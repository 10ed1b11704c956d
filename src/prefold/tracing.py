"""Traces of steps, to be looked at in Perfetto (ui.perfetto.dev) or chrome://tracing.

Every process appends its spans to a part file of its own, `F.<name>.part` beside the trace `F`; `merge`
joins them when the engine ends. A part is a trace as well (Chrome's format does without the closing
bracket), so one that a crash has left behind can be loaded as it is. Times are of the machine's monotonic
clock, which its processes share.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

PART = ".part"


class Span(NamedTuple):
    """Something that took time: from `start` to `end` by `time.perf_counter`. Spans of one `row` of a process
    nest by their times. `facts` are shown when it is selected."""

    name: str
    start: float
    end: float
    facts: dict[str, Any] | None = None
    row: int = 0


class _Event(msgspec.Struct, omit_defaults=True):
    """An entry of Chrome's trace format, times in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int = -1
    ts: float = -1.0
    dur: float = -1.0
    args: dict[str, Any] | None = None


class TraceWriter:
    """One process' part of a trace.

    Args:
        trace: the file that the parts are merged to.
        process: number by which processes are ordered; ranks have their own.
        name: of the part's file, without spaces.
        title: what the process is called in the picture.

    Attributes:
        close: call it to close the part; otherwise that happens with the writer's end.

    Raises:
        OSError: the part can not be written.
    """

    def __init__(self, trace: str, process: int, name: str, title: str) -> None:
        self._process = process
        self._encoder = msgspec.json.Encoder()
        # Unbuffered: a rank is ended without notice.
        self._fd = os.open(part_path(trace, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.close = weakref.finalize(self, os.close, self._fd)
        named = _Event("process_name", "M", process, args={"name": title})
        ordered = _Event("process_sort_index", "M", process, args={"sort_index": process})
        self._write(b"[\n")
        self._append([named, ordered])

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans, in any order."""
        self._append(
            _Event(
                span.name,
                "X",
                self._process,
                span.row,
                round(span.start * 1e6, 3),
                round(max(0.0, span.end - span.start) * 1e6, 3),
                span.facts,
            )
            for span in spans
        )

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens inside, written when it is over."""
        started = time.perf_counter()
        yield
        self.write([Span(name, started, time.perf_counter())])

    def _append(self, events: Iterable[_Event]) -> None:
        self._write(b"".join(self._encoder.encode(event) + b",\n" for event in events))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]


def part_path(trace: str, name: str) -> Path:
    """
    >>> part_path("/tmp/trace.json", "rank0").name
    'trace.json.rank0.part'
    """
    return Path(f"{trace}.{name}{PART}")


def parts_of(trace: str) -> list[Path]:
    """The parts that are there, by name."""
    path = Path(trace)
    return sorted(p for p in path.parent.glob(f"*{PART}") if p.name.startswith(f"{path.name}."))


def remove_parts(trace: str) -> None:
    """Of an earlier run, before a new one begins."""
    for part in parts_of(trace):
        part.unlink()


def checked_trace_path(trace: str) -> str:
    """The path made absolute; ValueError unless a file can be there."""
    path = Path(trace).expanduser().absolute()
    if path.is_dir():
        raise ValueError(f"trace={trace!r} is a folder: give the path of a file")
    if not path.parent.is_dir():
        raise ValueError(f"trace={trace!r} cannot be written: there is no folder {path.parent}")
    return str(path)


def merge(trace: str) -> int:
    """Join the parts to one file and remove them. Returns the number of spans.

    What a process had not written completely when it ended is left out.
    """
    parts = parts_of(trace)
    num_spans = 0
    with open(trace, "wb") as merged:
        merged.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b"\n"
        for part in parts:
            with part.open("rb") as lines:
                for line in lines:
                    if not line.endswith(b"},\n"):
                        continue
                    merged.write(separator + line.removesuffix(b",\n"))
                    separator = b",\n"
                    num_spans += b'"ph":"X"' in line[:200]
        merged.write(b"\n]}\n")
    for part in parts:
        part.unlink()
    return num_spans
