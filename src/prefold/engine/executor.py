"""Runs steps on the ranks: in this process, or in one process per rank, here and on other machines.

The only file of the engine that knows workers. A rank that fails, dies or falls silent ends the engine:
all of them are ended then, and every call raises.
"""

from __future__ import annotations

import contextlib
import logging
import select
import shutil
import socket
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec

from prefold.config import EngineConfig
from prefold.control import NODE_DONE, NODE_FAILED, QUIT, SETUP, STEP, Channel, WorkerSetup, decode, encode
from prefold.engine.errors import EngineDeadError
from prefold.engine.launch import START_SILENCE_S, LocalRanks
from prefold.engine.meeting import Meeting, free_port
from prefold.engine.ranks import Rank, RankFailure, Ranks
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.tracing import remove_parts

if TYPE_CHECKING:
    from prefold.worker.worker import Worker

__all__ = ["EngineDeadError", "Executor", "InProcessExecutor", "MultiProcessExecutor", "make_executor"]

logger = logging.getLogger("prefold")

SHUTDOWN_GRACE_S = 5.0
"""How long workers may take to leave when asked; then they are killed."""
POLL_S = 1.0


class Executor(Protocol):
    """All ranks of an engine. Replica d is ranks [d * replica_size, (d + 1) * replica_size)."""

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        """Hand a step to the ranks of a replica, which run their steps in order. Does not wait.

        Raises:
            EngineDeadError: a rank has failed, now or before.
        """
        ...

    def receive(self) -> tuple[int, ModelRunnerOutput] | None:
        """(replica, output) of the next step to end. Outputs of a replica come in the order of its steps.
        None: somebody has woken the executor (see `make_executor`), and no step has ended yet.

        Raises:
            EngineDeadError: a rank has failed, now or before.
        """
        ...

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: a rank has failed, now or before.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep, while there is no step in flight, until somebody wakes the executor, or the time is over.

        Raises:
            EngineDeadError: a rank has failed, now or before.
        """
        ...

    def shutdown(self) -> None:
        """End all ranks. May be called again."""
        ...


def make_executor(config: EngineConfig, wakeup: int | None = None) -> Executor:
    """One rank runs in this process, where a debugger reaches it; more get processes of their own.

    Args:
        wakeup: a file descriptor; while it can be read, nobody waits for anything here (but for a step that
            runs in this process).
    """
    if config.runtime.trace:
        remove_parts(config.runtime.trace)
    if config.parallel.world_size == 1:
        return InProcessExecutor(config, wakeup)
    return MultiProcessExecutor(config, wakeup)


class InProcessExecutor:
    """The single rank."""

    def __init__(self, config: EngineConfig, wakeup: int | None = None) -> None:
        from prefold.worker.worker import start_worker  # imports torch: only where a rank runs

        self._worker: Worker | None = start_worker(config, 0, None)
        info = self._worker.info()
        logger.info(
            "rank 0 is ready: %.0f MiB of weights, kernels: %s", info.weight_bytes / 2**20, info.kernels
        )
        if info.kernels_problem:
            logger.warning("%s", info.kernels_problem)
        self._wakeup = wakeup
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

    def check_health(self) -> None:
        """See Executor.check_health."""
        if self._worker is None:
            raise EngineDeadError("the engine was shut down")

    def wait(self, timeout_s: float) -> None:
        """See Executor.wait."""
        self.check_health()
        select.select([] if self._wakeup is None else [self._wakeup], [], [], timeout_s)

    def shutdown(self) -> None:
        self._worker = None


class MultiProcessExecutor:
    """One process per rank, on this machine and on those that `config.cluster` names."""

    def __init__(self, config: EngineConfig, wakeup: int | None = None) -> None:
        parallel = config.parallel
        self._wakeup = wakeup
        # As the ranks will decode it, so that digests can be compared.
        self._config = decode(encode(WorkerSetup(config, 0, "")), WorkerSetup).config
        self._failure: str | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ModelRunnerOutput)
        self._in_flight: list[deque[int]] = [deque() for _ in range(parallel.data_parallel_size)]
        self._folder = tempfile.mkdtemp(prefix="prefold-")
        self._local = LocalRanks(config.runtime.threads_per_rank)
        self._channels: list[Channel] = []
        self._nodes: dict[int, Channel] = {}
        self._finalizer = weakref.finalize(
            self, _end_workers, self._local, self._channels, self._nodes, self._folder
        )
        try:
            self._ranks = self._start()
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> Ranks:
        """Meet the other nodes, start the ranks of this one, tell all ranks what to do."""
        parallel, cluster = self._config.parallel, self._config.cluster
        rendezvous = f"file://{self._folder}/rendezvous"
        remote: dict[int, Channel] = {}
        if cluster.processes > 1:
            meeting = Meeting(self._config)
            meeting.run()
            remote = meeting.ranks
            self._nodes.update(meeting.nodes)
        if parallel.nnodes > 1:
            rendezvous = f"tcp://{cluster.master_addr}:{free_port(cluster.master_addr)}"
        ranks = []
        for number in range(parallel.world_size):
            if number in remote:
                node = number * cluster.processes // parallel.world_size
                rank = Rank(number, remote[number], node=node, place=cluster.name(node))
            else:
                ours, theirs = socket.socketpair()
                self._local.start(number, theirs)
                rank = Rank(number, Channel(ours))
            ranks.append(rank)
            self._channels.append(rank.channel)
        limit_s = max(self._config.runtime.collective_timeout_s, START_SILENCE_S)
        connections = Ranks(ranks, self._nodes, self._local, limit_s, self._wakeup)
        for rank in ranks:
            connections.send(rank.rank, SETUP, encode(WorkerSetup(self._config, rank.rank, rendezvous)))
        return connections

    def _wait_until_ready(self) -> None:
        """Wait for every rank and check that all run the same configuration."""
        from prefold.worker.info import WorkerInfo

        digest = self._config.digest()
        waiting, problem = list(self._ranks.ranks), ""
        while waiting:
            self._poll(POLL_S)
            for rank in [rank for rank in waiting if rank.ready is not None]:
                info: WorkerInfo = decode(rank.ready or b"", WorkerInfo)
                rank.pid = info.pid
                if info.digest != digest:
                    self._fail(RankFailure(f"rank {rank.rank} runs another configuration: {info.digest}"))
                logger.info(
                    "rank %d is ready: process %d on cores %s, %.0f MiB of weights, kernels: %s",
                    rank.rank,
                    info.pid,
                    info.cores,
                    info.weight_bytes / 2**20,
                    info.kernels,
                )
                problem = problem or info.kernels_problem
                waiting.remove(rank)
        if problem:
            logger.warning("%s", problem)
        self._ranks.limit_s = self._config.runtime.collective_timeout_s

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its own machine."""
        return [rank.pid or 0 for rank in self._ranks.ranks]

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        """See Executor.submit."""
        self.check_health()
        self._in_flight[replica].append(step.step_id)
        body = self._encoder.encode(step)
        size = self._config.parallel.replica_size
        for rank in range(replica * size, (replica + 1) * size):
            self._ranks.send(rank, STEP, body)

    def receive(self) -> tuple[int, ModelRunnerOutput] | None:
        """See Executor.receive."""
        # Look for failures first: an output may be the consequence of one.
        self.check_health()
        assert any(self._in_flight), "nothing was submitted"
        while not self._ranks.outputs:
            self._poll(POLL_S)
            if not self._ranks.outputs and self._ranks.is_woken():
                return None
        rank, body = self._ranks.outputs.popleft()
        replica = rank // self._config.parallel.replica_size
        output = self._decoder.decode(body)
        expected = self._in_flight[replica].popleft()
        assert output.step_id == expected, (rank, output.step_id, expected)
        return replica, output

    def check_health(self) -> None:
        """See Executor.check_health."""
        self.wait(0.0)

    def ask_ranks(self, limit_s: float, answer: Callable[[list[str]], None]) -> None:
        """Whoever waits here calls `answer` with the names of the ranks that gave no sign of life within
        `limit_s`; sooner if all have."""
        self._ranks.ask(limit_s, answer)

    def wait(self, timeout_s: float) -> None:
        """See Executor.wait."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        self._poll(timeout_s)

    def _poll(self, timeout_s: float) -> None:
        oldest = [steps[0] for steps in self._in_flight if steps]
        try:
            self._ranks.poll(timeout_s, min(oldest, default=None))
        except RankFailure as failure:
            self._fail(failure)

    def _fail(self, failure: RankFailure) -> NoReturn:
        if failure.trace:
            logger.error("%s:\n%s", failure, failure.trace)
        self._failure = f"the engine is dead: {failure}"
        for channel in self._nodes.values():
            with contextlib.suppress(OSError):
                channel.send(NODE_FAILED, self._failure.encode())
        self._local.kill()
        self.shutdown()
        if failure.user_error:
            raise ValueError(str(failure))
        raise EngineDeadError(self._failure)

    def shutdown(self) -> None:
        """See Executor.shutdown."""
        if self._failure is None:
            self._failure = "the engine was shut down"
        self._finalizer()


def _end_workers(local: LocalRanks, channels: list[Channel], nodes: dict[int, Channel], folder: str) -> None:
    """Ask workers to leave, kill those of this machine that do not, and reap them."""
    for kind, group in ((QUIT, channels), (NODE_DONE, nodes.values())):
        for channel in group:
            with contextlib.suppress(OSError):
                channel.send(kind)
            channel.close()
    local.reap(SHUTDOWN_GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)
