"""One way to print tables and pictures: 100 columns, readable without a terminal too."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

WIDTH = 100


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (stdout unless given), 100 columns wide, or the terminal's if that is less."""
    out = file or sys.stdout
    console = Console(file=out, highlight=False)
    if not out.isatty():
        return Console(file=out, highlight=False, width=WIDTH)
    console.width = min(console.width, WIDTH)
    return console
