"""An engine whose ranks are threads of this process: any layout starts in a fraction of a second.

The ranks run what worker processes run (`ModelRunner`), and steps and results go through the same
encoding, but collectives are `testing.threads`, which checks what the real ones leave to discipline.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
import weakref
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch

from prefold.config import EngineConfig
from prefold.distributed.group import Group
from prefold.distributed.mesh import Mesh
from prefold.engine.args import EngineArgs
from prefold.engine.engine import LLMEngine
from prefold.engine.executor import EngineDeadError
from prefold.engine.llm import LLM
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.testing.threads import TIMEOUT_S, ThreadGroup, ThreadWorld
from prefold.worker.model_runner import ModelRunner

Inbox = queue.SimpleQueue  # of encoded steps; an Event: set it; None: leave
Outbox = queue.SimpleQueue  # of (rank, encoded output, None: ready, or an exception)


class ThreadExecutor:
    """See `engine.executor.Executor`. Each rank runs the steps of its replica in order, as they come, so
    that the stages of a pipeline overlap.

    Args:
        config: resolved; `threads_per_rank` does not count, every rank computes with one thread.
        timeout_s: how long a rank waits for others in a collective, and `receive` for an output.

    Attributes:
        groups: the groups of each rank. Set their `trace` to lists to record collectives.
        runners: the ModelRunner of each rank.
    """

    def __init__(self, config: EngineConfig, timeout_s: float = TIMEOUT_S) -> None:
        self._mesh = Mesh.of(config.parallel)
        self._replica_size = config.parallel.replica_size
        self._world = ThreadWorld(self._mesh, timeout_s)
        self._failure: str | None = None
        self._timeout_s = timeout_s
        self._inboxes: list[Inbox] = [Inbox() for _ in range(self._mesh.world_size)]
        self._outbox: Outbox = Outbox()
        self.groups = [self._world.groups(rank) for rank in range(self._mesh.world_size)]
        self.runners: list[ModelRunner | None] = [None] * self._mesh.world_size
        self._finalizer = weakref.finalize(self, _leave, self._inboxes)
        for rank, inbox in enumerate(self._inboxes):
            threading.Thread(
                target=_rank_main,
                args=(rank, config, self._world, self.groups[rank], self.runners, inbox, self._outbox),
                name=f"rank {rank}",
                daemon=True,
            ).start()
        for _ in self._inboxes:
            self._next()

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        """Give a step to all ranks of a replica."""
        self.check_health()
        message = msgspec.msgpack.encode(step)
        start = replica * self._replica_size
        for inbox in self._inboxes[start : start + self._replica_size]:
            inbox.put(message)

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        """(replica, output) of the step that is done next. EngineDeadError if a rank has failed."""
        self.check_health()
        rank, message = self._next()
        return rank // self._replica_size, msgspec.msgpack.decode(message, type=ModelRunnerOutput)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """One step of the only replica."""
        self.submit(0, step)
        return self.receive()[1]

    def synchronize(self) -> None:
        """Wait until every rank has done all that was submitted: outputs can come before that."""
        done = [threading.Event() for _ in self._inboxes]
        for inbox, event in zip(self._inboxes, done):
            inbox.put(event)
        for event in done:
            while not event.wait(0.01):
                self.check_health()

    def check_health(self) -> None:
        """EngineDeadError if a rank has failed or the engine was shut down."""
        if self._failure is None and self._world.failure is not None:
            self._failure = f"the engine is dead: {self._world.failure}"
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def wait(self, timeout_s: float) -> None:
        """Nobody wakes this executor."""
        self.check_health()
        time.sleep(timeout_s)

    def shutdown(self) -> None:
        """End the ranks; they are not waited for."""
        if self._failure is None:
            self._failure = "the engine was shut down"
        self._finalizer()

    def _next(self) -> tuple[int, bytes]:
        """What a rank sends next. A ValueError while it starts is the user's; all else ends the engine."""
        try:
            # Ranks that wait for each other are to say so before this does.
            rank, message = self._outbox.get(timeout=2 * self._timeout_s)
        except queue.Empty:
            self._failure = f"the engine is dead: no rank has sent anything for {2 * self._timeout_s:g} s"
            self._finalizer()
            raise EngineDeadError(self._failure) from None
        if isinstance(message, BaseException):
            first = self._world.failure or message
            self._failure = f"the engine is dead: rank {rank} failed: {type(first).__name__}: {first}"
            self._finalizer()
            if isinstance(first, ValueError) and None in self.runners:
                raise first
            raise EngineDeadError(self._failure) from first
        return rank, message


def _rank_main(
    rank: int,
    config: EngineConfig,
    world: ThreadWorld,
    groups: dict[str, ThreadGroup],
    runners: list[ModelRunner | None],
    inbox: Inbox,
    outbox: Outbox,
) -> None:
    """A rank's thread. Holds nothing of the executor, so that this can be collected."""
    try:
        torch.set_num_threads(1)
        runners[rank] = runner = ModelRunner(config, cast(dict[str, Group], groups))
        outbox.put((rank, b""))
        while (message := inbox.get()) is not None:
            if isinstance(message, threading.Event):
                message.set()
                continue
            output = runner.execute(msgspec.msgpack.decode(message, type=SchedulerOutput))
            if output is not None:
                outbox.put((rank, msgspec.msgpack.encode(output)))
    except BaseException as error:
        if world.failure is None:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            world.fail(error)
            outbox.put((rank, error))
    world.end(rank)


def _leave(inboxes: list[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class ThreadLLM(LLM):
    """`LLM` on token ids with a ThreadExecutor, whatever the layout.

    Args:
        options: as LLM's, and fields of RuntimeConfig that are no options.
    """

    def __init__(self, model: str, **options: Any) -> None:
        known = EngineArgs.__dataclass_fields__
        arguments: dict[str, Any] = {"threads_per_rank": 1}
        runtime: dict[str, Any] = {}
        for name, value in options.items():
            (arguments if name in known else runtime)[name] = value
        config = EngineArgs(model, **arguments).resolve()
        config = replace(config, runtime=replace(config.runtime, **runtime))
        self.tokenizer = None
        self.executor = ThreadExecutor(config)
        self.engine = LLMEngine(config, None, self.executor)
        self._request_ids = itertools.count()
