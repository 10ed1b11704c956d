"""The HTTP process's end of an engine process (core_process.py): starts it, talks to it, notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable

from prefold.config import EngineConfig
from prefold.control import Channel, decode, encode
from prefold.engine.core_messages import (
    ASK,
    FAILED,
    LOG,
    PING,
    PONG,
    QUIT,
    READY,
    SETUP,
    TOLD,
    CoreFailure,
    CoreReady,
    CoreSetup,
    LogLine,
    RanksAnswer,
    RanksQuestion,
)
from prefold.engine.launch import START_SILENCE_S, describe_exit, python_environment

QUIT_S = 10.0
"""How long an engine process may take to end its ranks and leave."""
LEAVE_S = 1.0
"""The same for one that has failed: it leaves by itself, unless it is stopped."""
KILL_S = 5.0
"""How long the kernel may take to end a killed process."""
PING_EVERY_S = 1.0
RANKS_SHARE = 0.6
"""Of the time that somebody waits for the ranks' signs of life: what is left is for the way back."""

logger = logging.getLogger("prefold")


class CoreFailed(Exception):
    """An engine process has ended before it was ready."""

    def __init__(self, failure: CoreFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class CoreClient:
    """An engine process, started in the constructor; all methods are for the event loop's thread.

    Args:
        on_message: called with kind and body of what is not handled here.
        on_lost: called once when a process that was ready has failed or is gone, unless it was told to `end`.

    Attributes:
        ready: told once the process is ready; CoreFailed if it ends before.
        alive: messages are still sent and received.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[bytes, bytes], None],
        on_lost: Callable[[CoreFailure], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_lost = on_message, on_lost
        self._limit_s = config.runtime.collective_timeout_s
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefold.engine.core_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=python_environment(),
                stdin=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self.ready: asyncio.Future[CoreReady] = self._loop.create_future()
        self.alive = True
        self._asked: dict[int, asyncio.Future[list[str]]] = {}
        self._num_asked = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._loop.add_reader(self._channel.fileno(), self._read)
        level = logging.getLogger("prefold").getEffectiveLevel()
        self.send(SETUP, encode(CoreSetup(config, level)))
        self._watcher = self._loop.create_task(self._watch())

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """Never waits. That the process is gone shows when it is read from; nothing is sent any more then."""
        if not self.alive:
            return
        with contextlib.suppress(OSError):
            self._channel.send(kind, body)
        if self._channel.has_unsent:
            self._loop.add_writer(self._channel.fileno(), self._flush)

    def _flush(self) -> None:
        done = True
        with contextlib.suppress(OSError):
            done = self._channel.flush()
        if done:
            self._loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._lose(None)
            return
        try:
            for kind, body in messages:
                if self.alive:
                    self._handle(kind, body)
        except Exception as error:  # nobody would be told of what comes next
            logger.exception("the engine is given up because of an error in the server")
            self._lose(CoreFailure(f"the engine is dead: {error!r}"))

    def _handle(self, kind: bytes, body: bytes) -> None:
        if kind == READY:
            self.ready.set_result(decode(body, CoreReady))
        elif kind == PONG:
            self._answer(int.from_bytes(body, "big"), [])
        elif kind == TOLD:
            told: RanksAnswer = decode(body, RanksAnswer)
            self._answer(told.number, told.silent)
        elif kind == LOG:
            line: LogLine = decode(body, LogLine)
            logger.log(line.level, "%s", line.text)
        elif kind == FAILED:
            self._lose(decode(body, CoreFailure))
        else:
            self._on_message(kind, body)

    async def silent_ranks(self, timeout_s: float) -> list[str]:
        """Names of the ranks that give no sign of life within most of the time. None do if the process itself
        is the only rank.

        Raises:
            TimeoutError: the process has not answered within the time.
            ConnectionError: it has failed or is gone.
        """
        if not self.alive:
            raise ConnectionError
        self._num_asked += 1
        number = self._num_asked
        self._asked[number] = self._loop.create_future()
        if self.ready.result().rank_pids:
            self.send(ASK, encode(RanksQuestion(number, RANKS_SHARE * timeout_s)))
        else:  # a thread answers, also in the middle of a step
            self.send(PING, number.to_bytes(8, "big"))
        try:
            return await asyncio.wait_for(self._asked[number], timeout_s)
        finally:
            del self._asked[number]

    def _answer(self, number: int, silent: list[str]) -> None:
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(silent)

    async def _watch(self) -> None:
        """A process that lives answers pings, whatever it does. Time counts only while this loop runs, so
        that a server that is busy or was suspended accuses nobody."""
        every_s, silent_s = min(PING_EVERY_S, self._limit_s / 4), 0.0
        while self.alive:
            received = self._channel.num_received
            self.send(PING)
            await asyncio.sleep(every_s)
            silent_s = 0.0 if self._channel.num_received > received else silent_s + every_s
            limit_s = self._limit_s if self.ready.done() else max(self._limit_s, START_SILENCE_S)
            if silent_s > limit_s and self.alive:
                message = f"its process ({self.pid}) has not answered for {silent_s:.0f} s"
                self._lose(CoreFailure(f"the engine is dead: {message}"))

    def _lose(self, failure: CoreFailure | None) -> None:
        """It has failed, or is gone (None): nothing is asked of it from here on."""
        self._detach()
        self._tasks.append(self._loop.create_task(self._report_end(failure)))

    async def _report_end(self, failure: CoreFailure | None) -> None:
        if failure is None:
            failure = CoreFailure(await asyncio.to_thread(self._describe_end))
        if not self.ready.done():
            self.ready.set_exception(CoreFailed(failure))
        elif not self.ready.cancelled():
            self._on_lost(failure)

    def _detach(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError())

    async def end(self) -> None:
        """Ask it to leave, kill it if it does not, and reap it. May be called again."""
        asked = self.alive
        self.send(QUIT)
        self._detach()
        self._watcher.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._watcher, *self._tasks, return_exceptions=True)
        self.ready.cancel()
        # Not to be left half-way: a second Ctrl-C must not leave a process behind.
        await asyncio.shield(asyncio.to_thread(self._reap, QUIT_S if asked else LEAVE_S))

    def _reap(self, grace_s: float) -> None:
        """Wait for its end; kill it if that takes longer. Its ranks end with it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._channel.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def _describe_end(self) -> str:
        try:
            how = describe_exit(self._process.wait(KILL_S))
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        return f"the engine is dead: its process ({self.pid}) {how}"
