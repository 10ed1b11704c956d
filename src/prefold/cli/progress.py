"""Progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

FIRST_LINE_AFTER_S = 2.0
LINE_EVERY_S = 10.0


class Progress(Protocol):
    """Told before the first step and after every one what has been done so far."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *error: object) -> None: ...

    def update(self, prefilled: int, to_prefill: int, generated: int) -> None:
        """Prompt tokens done, prompt tokens in all, tokens generated."""
        ...

    def stop(self) -> None:
        """Leave the screen to others. May be called again."""
        ...


def make_progress(what: str = "", file: TextIO | None = None) -> Progress:
    """`what` names the run in front of the bar or line; `file` is stderr unless given."""
    out = file or sys.stderr
    return ProgressBar(what) if out.isatty() else ProgressLines(what, out)


class ProgressLines:
    """For logs and pipes: silent while a run is short, then a line every few seconds."""

    def __init__(self, what: str, file: TextIO) -> None:
        self._what = f"{what}: " if what else ""
        self._file = file
        self._start: float | None = None
        self._next = 0.0
        self._stopped = False

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def update(self, prefilled: int, to_prefill: int, generated: int) -> None:
        now = time.monotonic()
        if self._start is None:
            self._start, self._next = now, now + FIRST_LINE_AFTER_S
        if self._stopped or now < self._next:
            return
        self._next = now + LINE_EVERY_S
        if prefilled < to_prefill:
            rate = prefilled / (now - self._start)
            line = f"prefill {prefilled:,} of {to_prefill:,} tokens, {rate:,.0f} tokens/s"
        else:
            line = f"tokens generated: {generated:,}"
        print(f"{self._what}{line}", file=self._file, flush=True)

    def stop(self) -> None:
        self._stopped = True


class ProgressBar:
    """For a terminal; vanishes when it is done."""

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._what = f"{what}  " if what else ""
        self._rich = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._start: float | None = None
        self._task = self._rich.add_task(f"{self._what}loading", total=None, count="")

    def __enter__(self) -> ProgressBar:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def update(self, prefilled: int, to_prefill: int, generated: int) -> None:
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        phase, count = "decode", f"{generated:,} tokens"
        if prefilled < to_prefill:
            phase, count = "prefill", f"{prefilled:,} of {to_prefill:,} tokens"
            count += f", {prefilled / (now - self._start):,.0f} tokens/s" if prefilled else ""
        self._rich.update(
            self._task,
            description=f"{self._what}{phase}",
            total=to_prefill,
            completed=prefilled,
            count=count,
        )

    def stop(self) -> None:
        self._rich.stop()
