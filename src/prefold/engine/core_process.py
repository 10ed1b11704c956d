"""The engine process of a server: `python -m prefold.engine.core_process FD`.

FD is the engine's end of a socket pair; the other end is `engine.core_client.CoreClient`. Its messages are
those of core_messages.py. What computes never waits for the HTTP process: a thread does the reading and
writes what the socket does not take at once. That thread also answers pings while a step runs in this
process, and ends the process, ranks first, when it is told to or when the HTTP process is gone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from types import FrameType
from typing import NoReturn

import msgspec

from prefold.control import Channel, Message, decode, encode
from prefold.engine import core_messages as kinds
from prefold.engine.core import EngineCore
from prefold.engine.core_messages import (
    CheckReport,
    CoreFailure,
    CoreOutputs,
    CoreReady,
    CoreRequest,
    CoreSetup,
    LogLine,
    RanksAnswer,
    RanksQuestion,
    Refusal,
    ScheduledSample,
)
from prefold.engine.executor import SHUTDOWN_GRACE_S, EngineDeadError, MultiProcessExecutor
from prefold.engine.observer import EngineObserver

LEAVE = signal.SIGUSR1
"""How the thread that reads interrupts the main thread, whatever it is doing."""
SNAPSHOT_EVERY_S = 0.1
PREFILL_SNAPSHOT_EVERY_S = 0.02
"""Steps with a prefill may take long: most of them are to be seen while they do."""
MESSAGES_S = 0.02
"""How long messages are handled between two steps; at least one is."""
IDLE_S = 1.0
"""How long to sleep at most while there is nothing to do; whatever happens ends the sleep."""
LEAVE_S = SHUTDOWN_GRACE_S + 3.0
"""How long ending in good order may take; then the process just ends, and its ranks with it."""

logger = logging.getLogger("prefold")


class HttpLink:
    """This process's end of the connection. `wakeup` can be read while there are messages to take."""

    def __init__(self, sock: socket.socket) -> None:
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._unsent = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel = Channel(sock)
        self._sending = threading.Lock()
        self._inbox: deque[Message] = deque()
        threading.Thread(target=self._serve, name="http-link", daemon=True).start()

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """From any thread; never waits."""
        with self._sending:
            try:
                self._channel.send(kind, body)
            except OSError:
                return  # the reading thread sees it, too
            if self._channel.has_unsent:
                os.eventfd_write(self._unsent, 1)

    def flush(self) -> None:
        """Wait until the socket has taken everything, or the other side is gone."""
        while self._channel.has_unsent and select.select([], [self._channel], [], LEAVE_S)[1]:
            with self._sending:
                try:
                    self._channel.flush()
                except OSError:
                    return

    def take(self) -> list[Message]:
        """Messages for the main thread that have come."""
        try:
            os.eventfd_read(self.wakeup)
        except BlockingIOError:
            return []
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def _serve(self) -> None:
        try:
            self._read_and_write()
        except (OSError, EOFError):
            pass  # the HTTP process is gone
        except Exception:
            logger.exception("the engine process ends because of an error")
        _end_in_good_order()

    def _read_and_write(self) -> None:
        """Until it is told to quit."""
        while True:
            writers = [self._channel] if self._channel.has_unsent else []
            readable, writable, _ = select.select([self._channel, self._unsent], writers, [])
            if self._unsent in readable:
                os.eventfd_read(self._unsent)
            if writable:
                with self._sending:
                    self._channel.flush()
            for message in self._channel.receive() if self._channel in readable else ():
                if message.kind == kinds.PING:
                    self.send(kinds.PONG, message.body)
                elif message.kind == kinds.QUIT:
                    return
                else:
                    self._inbox.append(message)
                    os.eventfd_write(self.wakeup, 1)


def _end_in_good_order() -> NoReturn:
    """Let the main thread end the ranks, wherever it is; for the thread that reads."""
    signal.pthread_kill(threading.main_thread().ident or 0, LEAVE)
    time.sleep(LEAVE_S)
    os._exit(1)


class CoreProcess:
    """Takes messages, runs steps, sends outputs, until an exception ends it."""

    def __init__(self, link: HttpLink, setup: CoreSetup) -> None:
        self._link = link
        self._encoder = msgspec.msgpack.Encoder()
        self._snapshot_at = 0.0
        self._inbox: deque[Message] = deque()
        self._added: list[str] = []
        """First samples of the requests that came since the last step was scheduled."""
        config = setup.config
        self._observer = EngineObserver(config)
        self._core = EngineCore(config, observer=self._observer, wakeup=link.wakeup)

    def run(self) -> NoReturn:
        executor = self._core.executor
        pids = executor.pids if isinstance(executor, MultiProcessExecutor) else []
        self._link.send(kinds.READY, encode(CoreReady(pids)))
        was_busy = True
        while True:
            self._handle_messages()
            if self._core.has_unfinished_requests:
                self._step()
                was_busy = True
                continue
            if was_busy:
                self._send_snapshot(time.monotonic())
                was_busy = False
            if not self._inbox:
                self._core.wait(IDLE_S)

    def _handle_messages(self) -> None:
        """In the order in which they came. To hash the blocks of long prompts takes a while, and the requests
        that run do not wait for many of them."""
        self._inbox.extend(self._link.take())
        deadline = time.monotonic() + MESSAGES_S
        while self._inbox and time.monotonic() < deadline:
            self._handle(*self._inbox.popleft())

    def shutdown(self) -> None:
        self._core.shutdown()

    def _step(self) -> None:
        scheduled = self._core.schedule()
        self._say_who_runs(scheduled)
        self._send_snapshot_if_due()
        samples = self._core.collect()
        if samples:
            self._send(kinds.OUTPUTS, CoreOutputs(time.monotonic(), samples))

    def _say_who_runs(self, scheduled: list[ScheduledSample]) -> None:
        """Before the step is waited for: a prompt may take long, and its request does not wait any more."""
        added, self._added = self._added, []
        if scheduled or added:
            running = {sample.sample_id for sample in scheduled}
            waiting = [sample_id for sample_id in added if sample_id not in running]
            self._send(kinds.OUTPUTS, CoreOutputs(time.monotonic(), [], scheduled, waiting))

    def _handle(self, kind: bytes, body: bytes) -> None:
        if kind == kinds.ADD:
            self._add(body)
        elif kind == kinds.ABORT:
            sample_ids = msgspec.msgpack.decode(body, type=list[str])
            self._core.abort(sample_ids)
            # From here on outputs under these ids are those of other requests.
            self._link.send(kinds.ABORTED, body)
        elif kind == kinds.ASK:
            self._ask_ranks(decode(body, RanksQuestion))
        else:
            assert kind == kinds.CHECK, kind
            self._send(kinds.CHECKED, self._check())

    def _add(self, body: bytes) -> None:
        """A request that cannot be served is told so, whatever is wrong with it; the others go on."""
        try:
            request: CoreRequest = decode(body, CoreRequest)
            self._core.add_request(request)
            self._added.append(request.sample_ids[0])
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, ValueError):
                logger.exception("a request was refused because of an error in the engine")
            request_id = msgspec.msgpack.decode(body)[0]
            self._send(kinds.REFUSED, Refusal(request_id, str(error)))

    def _ask_ranks(self, question: RanksQuestion) -> None:
        executor = self._core.executor
        assert isinstance(executor, MultiProcessExecutor), "this process is the only rank, and answers pings"
        executor.ask_ranks(
            question.limit_s,
            lambda silent: self._send(kinds.TOLD, RanksAnswer(question.number, silent)),
        )

    def _check(self) -> CheckReport:
        error = ""
        pools = [scheduler.kv.pool for scheduler in self._core.schedulers]
        for scheduler in self._core.schedulers:
            try:
                scheduler.check_integrity()
            except AssertionError as failed:
                error = str(failed) or repr(failed)
        return CheckReport(error, sum(pool.num_blocks - pool.num_free_blocks for pool in pools))

    def _send_snapshot_if_due(self) -> None:
        """When a step has just been handed out, so that it shows what is computed until the next one."""
        now = time.monotonic()
        every_s = PREFILL_SNAPSHOT_EVERY_S if self._observer.is_in_prefill else SNAPSHOT_EVERY_S
        if now >= self._snapshot_at + every_s:
            self._send_snapshot(now)

    def _send_snapshot(self, now: float) -> None:
        self._snapshot_at = now
        self._send(kinds.SNAPSHOT, self._observer.snapshot(self._core.schedulers, now))

    def _send(self, kind: bytes, message: msgspec.Struct) -> None:
        self._link.send(kind, self._encoder.encode(message))


class _LogSender(logging.Handler):
    """Log lines go to the HTTP process, which shows them as its own."""

    def __init__(self, link: HttpLink) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        self._link.send(kinds.LOG, encode(LogLine(record.levelno, self.format(record))))


def main(fd: int) -> int:
    # These reach the whole process group, or all processes of a service. The HTTP process decides what
    # becomes of the engine: it may have requests to complete. Ranks ignore them as well.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(LEAVE, _leave)
    link = HttpLink(socket.socket(fileno=fd))
    process: CoreProcess | None = None
    failure: CoreFailure | None = None
    try:
        (kind, body), *_ = _wait_for_setup(link)
        assert kind == kinds.SETUP, kind
        setup: CoreSetup = decode(body, CoreSetup)
        logger.setLevel(setup.log_level)
        logger.addHandler(_LogSender(link))
        logger.propagate = False
        process = CoreProcess(link, setup)
        process.run()
    except (ValueError, EngineDeadError) as error:
        failure = CoreFailure(str(error), isinstance(error, ValueError))
    except Exception as error:
        logger.exception("the engine process ends because of an error")
        failure = CoreFailure(f"the engine is dead: {error!r}")
    finally:
        signal.signal(LEAVE, signal.SIG_IGN)
        if process is not None:
            process.shutdown()
    link.send(kinds.FAILED, encode(failure))
    link.flush()
    return 1


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _wait_for_setup(link: HttpLink) -> list[Message]:
    while True:
        select.select([link.wakeup], [], [])
        messages = link.take()
        if messages:
            return messages


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
