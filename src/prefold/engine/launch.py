"""Starts the processes of ranks on this machine, and says what became of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import prefold

MAX_ANSWER = 100
KILL_S = 5.0
"""How long the fork server may take for what it does at once, if it has a core; then it is killed."""
START_SILENCE_S = 180.0
"""How long a process that starts may be silent at least, the engine's or a rank: importing torch may take
minutes from a cold network disk or on an overloaded machine. One that ends is noticed at once anyway."""


class LocalRanks:
    """Rank processes of this machine: children of a fork server, which is a child of this process
    (see worker.fork_server).

    Args:
        threads_per_rank: how many threads a rank will compute with.
    """

    def __init__(self, threads_per_rank: int) -> None:
        self._threads_per_rank = threads_per_rank
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}

    def start(self, rank: int, sock: socket.socket) -> None:
        """Start a rank that has `sock` as its connection to the engine. Does not wait; the rank inherits
        the socket, which is closed here."""
        if self._control is None:
            self._start_server()
            assert self._control is not None
        self._running.add(rank)
        with sock, contextlib.suppress(OSError):  # the server has ended: the rank's connection closes
            socket.send_fds(self._control, [f"start {rank}".encode()], [sock.fileno()])

    def _start_server(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = python_environment()
        environment["OMP_NUM_THREADS"] = str(self._threads_per_rank)
        # numpy's library would start threads as soon as it is imported, and a process with threads must
        # not fork. Ranks compute with torch.
        environment["OPENBLAS_NUM_THREADS"] = "1"
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "prefold.worker.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def __contains__(self, rank: int) -> bool:
        return rank in self._running or rank in self._codes

    def exit_code(self, rank: int, wait_s: float) -> int | None:
        """Exit code of a rank, or minus the signal that ended it; None if it still runs after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while rank in self._running and self._listen(deadline - time.monotonic()):
            pass
        return self._codes.get(rank)

    def ended(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        while self._running and self._listen(0.0):
            pass
        return dict(self._codes)

    def kill(self) -> None:
        """End all of them at once."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(b"kill")

    def reap(self, grace_s: float) -> None:
        """Wait for all to end; kill those that have not after `grace_s`. May be called again."""
        if self._server is None or self._control is None:
            return
        deadline = time.monotonic() + grace_s
        while self._running and self._listen(deadline - time.monotonic()):
            pass
        self.kill()
        deadline = time.monotonic() + KILL_S
        while self._running and self._listen(deadline - time.monotonic()):
            pass
        self._control.close()
        self._control = None
        # Its ranks end with it, however it ends: the kernel sees to that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(timeout=KILL_S)
        self._server.kill()
        self._server.wait()

    def _listen(self, timeout_s: float) -> bool:
        """Take in one answer of the server; False if none came in time."""
        assert self._server is not None
        assert self._control is not None
        if not select.select([self._control], [], [], max(0.0, timeout_s))[0]:
            return False
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # it has ended without reading what it was told
            answer = self._control.recv(MAX_ANSWER)
        if not answer:
            # The server is gone, and its ranks with it.
            code = self._server.wait()
            self._codes.update(dict.fromkeys(self._running, code))
            self._running.clear()
            return True
        what, rank, number = answer.decode().split()
        if what == "ended":
            self._running.discard(int(rank))
            self._codes[int(rank)] = int(number)
        return True


def python_environment() -> dict[str, str]:
    """This process's, for a Python that is to find this very package, installed or not."""
    package_root = str(Path(prefold.__file__).parents[1])
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def describe_exit(code: int) -> str:
    """
    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'exited with code 3')
    """
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
