"""Starts the ranks of a machine: `python -m prefold.worker.fork_server FD`.

Importing torch takes seconds of a core. This process does it once, without starting a thread, and forks a
rank for each request, so that eight ranks start about as fast as one, and share what they have imported.

FD is one end of a SEQPACKET socket pair; the other end is `engine.launch.LocalRanks`. A request is
"start RANK" with the rank's connection attached, or "kill". An answer is "started RANK PID" or
"ended RANK CODE" (CODE: exit code, or minus a signal). When the socket closes, or this process ends in
whatever way, its ranks end, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
MAX_REQUEST = 100
LEAVE_S = 2.0
"""How long ranks may take to leave when the engine is gone."""


class ForkServer:
    """Serves requests from `control` until it closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, int] = {}  # by process id
        self._wakeup, wakeup = socket.socketpair()
        for sock in (self._wakeup, wakeup):
            sock.setblocking(False)
        self._signalled = wakeup
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up tells; without a handler none comes
        signal.set_wakeup_fd(wakeup.fileno())

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
                self._report_ended()
            if self._control.fileno() in ready:
                try:
                    request, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST, 1)
                except ConnectionResetError:  # the engine was killed before it had read all answers
                    return
                if not request:
                    return
                if request == b"kill":
                    self.kill()
                else:
                    self._start(int(request.removeprefix(b"start ")), fds[0])

    def _start(self, rank: int, fd: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(rank, fd, server)
        os.close(fd)
        self._ranks[pid] = rank
        self._answer(f"started {rank} {pid}")

    def _become_rank(self, rank: int, fd: int, server: int) -> None:
        from prefold.worker.main import leave, main

        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (self._control, self._wakeup, self._signalled):
                sock.close()
            _set_name(f"prefold-rank-{rank}")
            _end_with_parent(server)
            main(fd)
        finally:  # whatever happens, a rank must not go on as a server
            leave(1)

    def _report_ended(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._answer(f"ended {self._ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}")

    def _answer(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: `run` will see that
            self._control.send(text.encode())

    def close(self) -> None:
        """Ranks leave, and clear up, by themselves when the engine is gone; those that do not are killed."""
        deadline = time.monotonic() + LEAVE_S
        while self._ranks and time.monotonic() < deadline:
            self._report_ended()
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)


def _set_name(name: str) -> None:
    """What `top` and `ps` call this process; at most 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def _end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, and notice if that came first."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent has ended")


def main(fd: int) -> None:
    # These reach the whole process group, or all processes of a service. The engine decides what becomes of
    # its workers: it may have requests to complete. Ranks inherit this; they end with their engine anyway.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import prefold.worker.main
    import prefold.worker.worker  # noqa: F401  (what a rank needs: torch above all)

    # Ranks do not copy what they share just because the collector looks at it.
    gc.collect()
    gc.freeze()
    server = ForkServer(socket.socket(fileno=fd))
    try:
        server.run()
    finally:
        server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
