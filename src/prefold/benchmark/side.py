"""A process that measures when asked: one JSON line in, one JSON line out.

The parent holds a `Side`; the child calls `serve`. Between questions the child blocks on its
standard input and takes no CPU time. It leaves when that is closed, however the parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prefold

Handler = Callable[[dict[str, Any]], dict[str, Any]]

CLOSE_GRACE_S = 15.0
"""How long a side may take to leave; then it is killed."""


class SideError(RuntimeError):
    """A side failed or died; names it and says how."""


class Side:
    """The parent's handle on one measuring process.

    Args:
        name: for messages.
        module: run as `python -m module`; must call `serve`.
        setup: first message; the side answers it once it is ready, see `ready`.
        environment: variables on top of this process's.
    """

    def __init__(
        self, name: str, module: str, setup: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        package_root = str(Path(prefold.__file__).parents[1])
        path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            text=True,
        )
        self.send(setup)

    def send(self, message: dict[str, Any]) -> None:
        """Ask without waiting for the answer. SideError if the side is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._death() from None

    def receive(self) -> dict[str, Any]:
        """The answer. ValueError if the side met one (a wrong option), SideError for all else."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        answer = json.loads(line)
        if "error" in answer:
            kind = ValueError if answer["user_error"] else SideError
            raise kind(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """End the process. May be called again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it is gone, and something was left to flush
            self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _death(self) -> SideError:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return SideError(f"{self.name}: its process {how}")


def serve(start: Callable[[dict[str, Any]], tuple[Handler, dict[str, Any]]]) -> int:
    """The child's main loop.

    `start(setup)` returns (handler, what to answer when ready). An exception of either is sent to
    the parent and ends the process.
    """
    # Ctrl-C reaches every process of the terminal; the parent decides what becomes of this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among the answers

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        handler: Handler | None = None
        for line in sys.stdin:
            message = json.loads(line)
            if handler is None:
                handler, ready = start(message)
                answer(ready)
            else:
                answer(handler(message))
    except BrokenPipeError:  # nobody is left to answer
        return 1
    except Exception as error:
        user_error = isinstance(error, ValueError)
        if not user_error:
            traceback.print_exc()
        answer({"error": str(error) or type(error).__name__, "user_error": user_error})
        return 1
    return 0
