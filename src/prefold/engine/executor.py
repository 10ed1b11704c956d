"""Runs steps on the ranks: in this process, or in one process per rank.

The only file of the engine that knows workers. A worker that dies, however it dies, closes its
socket, which the engine notices at once; then all of them are ended and every call raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

import prefold
from prefold.config import EngineConfig
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.worker.main import ERROR, OUTPUT, QUIT, READY, STEP, WorkerFailure, WorkerSetup

if TYPE_CHECKING:
    from prefold.worker.worker import Worker

logger = logging.getLogger("prefold")

SHUTDOWN_GRACE_S = 5.0
"""How long workers may take to leave when asked; then they are killed."""


class EngineDeadError(RuntimeError):
    """A worker has failed; the engine cannot go on. The message says which, and how."""


class Executor(Protocol):
    """All ranks of an engine. Replica d is ranks [d * replica_size, (d + 1) * replica_size)."""

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        """Hand a step to the ranks of a replica, which run their steps in order. Does not wait.

        Raises:
            EngineDeadError: a rank has failed, now or before.
        """
        ...

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        """(replica, output) of the next step to end. Outputs of a replica come in the order of its steps.

        Raises:
            EngineDeadError: a rank has failed, now or before.
        """
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on replica 0: `submit` and `receive`."""
        ...

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: a rank has failed, now or before.
        """
        ...

    def shutdown(self) -> None:
        """End all ranks. May be called again."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """One rank runs in this process, where a debugger reaches it; more get processes of their own."""
    if config.parallel.world_size == 1:
        return InProcessExecutor(config)
    return MultiProcessExecutor(config)


class InProcessExecutor:
    """The single rank."""

    def __init__(self, config: EngineConfig) -> None:
        from prefold.worker.worker import start_worker  # imports torch: only where a rank runs

        self._worker: Worker | None = start_worker(config, rank=0, init_file=None)
        self._steps: deque[SchedulerOutput] = deque()

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        """See Executor.submit."""
        assert replica == 0, replica
        self.check_health()
        self._steps.append(step)

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        """Run the oldest step."""
        self.check_health()
        assert self._worker is not None
        output = self._worker.execute(self._steps.popleft())
        assert output is not None
        return 0, output

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """See Executor.execute."""
        self.submit(0, step)
        return self.receive()[1]

    def check_health(self) -> None:
        """See Executor.check_health."""
        if self._worker is None:
            raise EngineDeadError("the engine was shut down")

    def shutdown(self) -> None:
        self._worker = None


class MultiProcessExecutor:
    """One process per rank on this host."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._failure: str | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ModelRunnerOutput)
        self._folder = tempfile.mkdtemp(prefix="prefold-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._finalizer = weakref.finalize(
            self, _end_workers, self._processes, self._connections, self._folder, SHUTDOWN_GRACE_S
        )
        try:
            for rank in range(config.parallel.world_size):
                self._start(rank)
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        # A worker finds this very package, installed or not.
        package_root = str(Path(prefold.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(
            [package_root, *filter(None, [environment.get("PYTHONPATH")])]
        )
        environment["OMP_NUM_THREADS"] = str(self._config.runtime.threads_per_rank)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefold.worker.main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)
        connection = Connection(ours.detach())
        self._connections.append(connection)
        setup = WorkerSetup(self._config, rank, str(Path(self._folder) / "rendezvous"))
        connection.send_bytes(pickle.dumps(setup))

    def _wait_until_ready(self) -> None:
        """Wait for every rank and check that all run the same configuration."""
        from prefold.worker.info import WorkerInfo

        waiting = set(range(len(self._connections)))
        while waiting:
            for rank in self._readable(waiting):
                info = msgspec.msgpack.decode(self._receive(rank, READY), type=WorkerInfo)
                if info.digest != self._config.digest():
                    self._fail(f"rank {rank} runs another configuration: {info.digest}")
                logger.info("rank %d is ready: process %d on cores %s", rank, info.pid, info.cores)
                waiting.discard(rank)

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        """See Executor.submit."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        message = STEP + self._encoder.encode(step)
        size = self._config.parallel.replica_size
        for rank in range(replica * size, (replica + 1) * size):
            try:
                self._connections[rank].send_bytes(message)
            except OSError:
                self._receive(rank, OUTPUT)  # says what became of it

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        """See Executor.receive."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        first = self._readable(range(len(self._connections)))[0]
        output = self._decoder.decode(self._receive(first, OUTPUT))
        return first // self._config.parallel.replica_size, output

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """See Executor.execute."""
        self.submit(0, step)
        return self.receive()[1]

    def check_health(self) -> None:
        """See Executor.check_health."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self._receive(rank, OUTPUT)

    def _readable(self, ranks: set[int] | range) -> list[int]:
        """Those of `ranks` that have sent something or are gone; waits for one."""
        ready = wait([self._connections[rank] for rank in ranks])
        # Errors of any rank come first: the sampling rank's output may be their consequence.
        return sorted((rank for rank in ranks if self._connections[rank] in ready), reverse=True)

    def _receive(self, rank: int, kind: bytes) -> memoryview:
        """The next message of a rank, which must be of `kind`; anything else ends the engine."""
        try:
            message = self._connections[rank].recv_bytes()
        except (EOFError, OSError):
            self._fail(f"rank {rank} {self._cause_of_death(rank)}")
        if message[:1] == ERROR:
            failure = msgspec.msgpack.decode(memoryview(message)[1:], type=WorkerFailure)
            if failure.user_error:
                self.shutdown()
                raise ValueError(failure.message)
            logger.error("rank %d failed:\n%s", rank, failure.traceback)
            self._fail(f"rank {rank} failed: {failure.message}")
        assert message[:1] == kind, (rank, message[:1], kind)
        return memoryview(message)[1:]

    def _cause_of_death(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            code = process.wait(timeout=SHUTDOWN_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"(process {process.pid}) closed its connection"
        if code < 0:
            return f"(process {process.pid}) was killed by {signal.Signals(-code).name}"
        return f"(process {process.pid}) exited with code {code}"

    def _fail(self, message: str) -> None:
        self._failure = f"the engine is dead: {message}"
        self._kill()
        raise EngineDeadError(self._failure)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.shutdown()

    def shutdown(self) -> None:
        """See Executor.shutdown."""
        if self._failure is None:
            self._failure = "the engine was shut down"
        self._finalizer()


def _end_workers(
    processes: list[subprocess.Popen[bytes]], connections: list[Connection], folder: str, grace_s: float
) -> None:
    """Ask workers to leave, kill those that do not, and reap all."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(QUIT)
        connection.close()
    for process in processes:
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
