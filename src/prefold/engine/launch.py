"""Starts the processes of ranks on this machine, and says what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import prefold


class LocalRanks:
    """Rank processes that this process has started."""

    def __init__(self, threads_per_rank: int) -> None:
        self._threads_per_rank = threads_per_rank
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, sock: socket.socket) -> int:
        """Start a rank that has `sock` as its connection to the engine; returns its process id.

        The process inherits the socket; it is closed here.
        """
        environment = dict(os.environ)
        # A worker finds this very package, installed or not.
        package_root = str(Path(prefold.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(
            [package_root, *filter(None, [environment.get("PYTHONPATH")])]
        )
        environment["OMP_NUM_THREADS"] = str(self._threads_per_rank)
        with sock:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefold.worker.main", str(sock.fileno())],
                pass_fds=[sock.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._processes[rank] = process
        return process.pid

    def __contains__(self, rank: int) -> bool:
        return rank in self._processes

    def exit_code(self, rank: int, wait_s: float = 0.0) -> int | None:
        """Exit code of a rank, or minus the signal that ended it; None if it still runs after `wait_s`."""
        try:
            return self._processes[rank].wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None

    def ended(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def kill(self) -> None:
        """End all of them at once."""
        for process in self._processes.values():
            process.kill()

    def reap(self, grace_s: float) -> None:
        """Wait for all to end; kill those that have not after `grace_s`."""
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()


def describe_exit(code: int) -> str:
    """
    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'exited with code 3')
    """
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
