"""Writes docs/cli.md from the help of `prefold` itself. `--check` only compares (exit code 1)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

COMMANDS = (
    "",
    "generate",
    "serve",
    "bench latency",
    "bench serve",
    "layouts",
    "doctor",
    "demo",
    "explain",
    "convert-mla",
)

HEAD = """# Command line

Made by `scripts/make_cli_docs.py` from the command's own help; do not edit. Exit codes: 0 success,
1 the engine failed (or the demo's two runs differ), 2 wrong usage or input, 130 interrupted.
"""


def help_of(command: str) -> str:
    """What `prefold COMMAND --help` prints, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    arguments = [sys.executable, "-m", "prefold", *command.split(), "--help"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    lines = (line.rstrip() for line in text.strip().splitlines())
    return "\n".join(
        textwrap.fill(line, 100, break_on_hyphens=False) if len(line) > 100 else line for line in lines
    )


def page() -> str:
    parts = [HEAD]
    for command in COMMANDS:
        parts.append(f"## {f'prefold {command}'.strip()}\n\n```text\n{help_of(command)}\n```\n")
    return "\n".join(parts)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
