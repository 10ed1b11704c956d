"""The process of a rank, from the moment `fork_server` has forked it.

It has a socket whose other end the engine holds. First comes a `WorkerSetup`, then one message per
step. A thread does the reading, so that a rank answers the engine's pings while it computes, and leaves
at once when it is told to or when the engine is gone, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from prefold.control import (
    ERROR,
    OUTPUT,
    PING,
    PONG,
    QUIT,
    READY,
    SETUP,
    STEP,
    Channel,
    Pong,
    WorkerFailure,
    WorkerSetup,
    decode,
    encode,
)
from prefold.distributed.errors import CollectiveError
from prefold.step import SchedulerOutput

PARENT_CHECK_S = 1.0
"""How often a rank looks whether the command that started it is still there."""


class EngineLink:
    """The rank's end of its connection.

    Attributes:
        inbox: bodies of the messages for the main thread: the `WorkerSetup`, then the steps.
        step, busy: what the main thread is computing, or computed last.
        folder: to be removed if the engine cannot do so any more.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.step: int | None = None
        self.busy = False
        self.folder: Path | None = None
        self._channel = Channel(sock)
        self._sending = threading.Lock()
        self._parent = os.getppid()
        threading.Thread(target=self._read, name="engine-link", daemon=True).start()

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """Send from any thread; waits until the socket has taken it all."""
        with self._sending:
            try:
                self._channel.send(kind, body)
                while not self._channel.flush():
                    select.select([], [self._channel], [])
            except OSError:
                self._leave_orphaned()

    def _read(self) -> None:
        while True:
            select.select([self._channel], [], [], PARENT_CHECK_S)
            if os.getppid() != self._parent:
                self._leave_orphaned()
            try:
                messages = self._channel.receive()
            except EOFError:
                self._leave_orphaned()
            for kind, body in messages:
                if kind == PING:
                    self.send(PONG, encode(Pong(self.step, self.busy, time.process_time())))
                elif kind == QUIT:
                    leave(0)
                else:
                    assert kind in (SETUP, STEP), kind
                    self.inbox.put(body)

    def _leave_orphaned(self) -> NoReturn:
        """The engine is gone: nobody is left to tell, or to clear up."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        leave(1)


def leave(code: int) -> NoReturn:
    """End this process without tearing anything down: other ranks may wait for it in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(fd: int) -> NoReturn:
    """Be the rank whose connection is `fd`."""
    # Ctrl-C reaches the whole process group; the engine decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = EngineLink(socket.socket(fileno=fd))
    try:
        _serve(link)
    except BaseException as error:
        user_error = isinstance(error, ValueError)
        message = str(error) if user_error else f"{type(error).__name__}: {error}"
        failure = WorkerFailure(
            message, traceback.format_exc(), user_error, isinstance(error, CollectiveError)
        )
        link.send(ERROR, encode(failure))
        leave(1)


def _serve(link: EngineLink) -> NoReturn:
    """Set the rank up and run steps, until the link ends the process."""
    setup: WorkerSetup = decode(link.inbox.get(), WorkerSetup)
    config, rank = setup.config, setup.rank
    if setup.rendezvous.startswith("file://"):
        link.folder = Path(setup.rendezvous.removeprefix("file://")).parent
    # Before torch is imported: its thread pool inherits the binding.
    from prefold.worker.pinning import pin_to_cores

    if config.runtime.pin_threads and config.runtime.device == "cpu":
        local_size = config.parallel.world_size // config.parallel.nnodes
        pin_to_cores(rank % local_size, local_size, config.runtime.threads_per_rank)
    from prefold.worker.worker import start_worker

    worker = start_worker(config, rank, setup.rendezvous)
    link.send(READY, encode(worker.info()))
    while True:
        step: SchedulerOutput = decode(link.inbox.get(), SchedulerOutput)
        link.step, link.busy = step.step_id, True
        output = worker.execute(step)
        if output is not None:
            link.send(OUTPUT, encode(output))
        link.busy = False
