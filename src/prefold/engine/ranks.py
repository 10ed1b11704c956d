"""The engine's view of its ranks: who has answered, who is gone, and who is to blame.

A rank that dies, however it dies, closes its connection, which is noticed at once. A rank that is
stopped, or whose machine has vanished, does not answer pings: silence counts while the engine listens,
and only after everything that has arrived was read, so that a busy engine accuses nobody. A rank that
answers but uses no processor time in the middle of a step is stuck: in a lock, or in input and output.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from prefold.control import (
    ERROR,
    OUTPUT,
    PING,
    PONG,
    RANK_ENDED,
    READY,
    Channel,
    Pong,
    RankEnded,
    WorkerFailure,
    decode,
)
from prefold.engine.launch import LocalRanks, describe_exit

STUCK_SHARE = 0.005
"""A rank that uses less of one core than this computes nothing; answering pings takes a tenth of it."""
STUCK_LIMITS = 2.0
"""How many time-outs a rank may be stuck for: one that waits in a collective fails by itself after one."""
ROOT_CAUSE_S = 1.5
"""After a collective has failed, how long to listen for the reason why it did."""
DEATH_REPORT_S = 3.0
"""How long the cause of a rank's death may take to become known after its connection has closed."""


@dataclass
class Rank:
    """A rank as the engine sees it.

    Attributes:
        node: which command has started it; 0 is this process.
        place: the same for messages.
        silent_s: how long nothing was heard of it, as far as that counts.
        asked_s: when the ping was sent that it is to answer; None: it has answered.
        lived_s: when the ping was sent that it answered last: it has lived since.
        step: what it was computing when last heard of.
        stuck_s: how long it has been in a step without using processor time.
        ready: its WorkerInfo, encoded, once it is ready.
        exit_code: once known.
    """

    rank: int
    channel: Channel
    pid: int | None = None
    node: int = 0
    place: str = ""
    silent_s: float = 0.0
    asked_s: float | None = None
    lived_s: float = float("-inf")
    step: int | None = None
    stuck_s: float = 0.0
    cpu_s: float = 0.0
    ponged: float = 0.0
    ready: bytes | None = None
    failure: WorkerFailure | None = None
    gone: bool = False
    exit_code: int | None = None
    num_received: int = 0

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else ""
        about = ", ".join(filter(None, [process, self.place]))
        return f"rank {self.rank} ({about})" if about else f"rank {self.rank}"


class RankFailure(Exception):
    """Why the ranks cannot go on. `user_error`: a ValueError on a rank, for the user to mend."""

    def __init__(self, message: str, user_error: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.user_error = user_error
        self.trace = trace


class Round(NamedTuple):
    """Somebody asks whether the ranks live: all have to answer a ping sent after `start_s`, by `end_s`."""

    start_s: float
    end_s: float
    answer: Callable[[list[str]], None]


class Ranks:
    """Connections to all ranks.

    Args:
        ranks: in rank order.
        nodes: channels to the other commands that have started ranks, by their number.
        local: the ranks that are children of this process.
        limit_s: a rank that does not answer for so long has failed; may be changed.
        wakeup: a file descriptor; `poll` does not wait while it can be read.

    Attributes:
        outputs: (rank, encoded output) as they came.
    """

    def __init__(
        self,
        ranks: list[Rank],
        nodes: dict[int, Channel],
        local: LocalRanks,
        limit_s: float,
        wakeup: int | None = None,
    ) -> None:
        self.ranks = ranks
        self.outputs: deque[tuple[int, bytes]] = deque()
        self.limit_s = limit_s
        self._nodes = dict(nodes)
        self._names = {rank.node: rank.place for rank in ranks}
        self._local = local
        self._wakeup = wakeup
        self._lost_node: int | None = None
        self._next_ping = 0.0
        self._polled = time.monotonic()
        self._rounds: list[Round] = []

    @property
    def _ping_every_s(self) -> float:
        return min(1.0, self.limit_s / 4)

    def send(self, rank: int, kind: bytes, body: bytes = b"") -> None:
        """Never waits, and leaves it to `poll` to say that a rank is gone."""
        with contextlib.suppress(OSError):
            self.ranks[rank].channel.send(kind, body)

    def ask(self, limit_s: float, answer: Callable[[list[str]], None]) -> None:
        """Ask all ranks for a sign of life. `poll` calls `answer` with those that have given none within
        `limit_s`: at once when all have, else when that time is over."""
        now = time.monotonic()
        self._rounds.append(Round(now, now + limit_s, answer))

    def poll(self, timeout_s: float, step: int | None) -> None:
        """Read what has come, waiting up to `timeout_s` for something; outputs are put into `outputs`.

        Args:
            step: the oldest step that has no output yet, for messages.

        Raises:
            RankFailure: a rank has failed, is gone, or has been silent for too long.
        """
        self._listen(timeout_s)
        if self._lost_node is not None or any(map(self._has_failed, self.ranks)):
            raise self._find_cause(step)

    def is_woken(self) -> bool:
        """Whether `wakeup` can be read."""
        return self._wakeup is not None and bool(select.select([self._wakeup], [], [], 0.0)[0])

    def _has_failed(self, rank: Rank) -> bool:
        silent = rank.silent_s > self.limit_s
        return rank.failure is not None or rank.gone or silent or self._is_stuck(rank)

    def _is_stuck(self, rank: Rank) -> bool:
        return rank.stuck_s > STUCK_LIMITS * self.limit_s

    def _listen(self, timeout_s: float) -> None:
        """One round: ask for signs of life, write what is left to write, read what there is."""
        self._ping()
        poller = select.poll()
        readers: dict[int, Callable[[], None]] = {}
        for rank in self.ranks:
            if not rank.gone:
                poller.register(
                    rank.channel, select.POLLIN | (select.POLLOUT if rank.channel.has_unsent else 0)
                )
                readers[rank.channel.fileno()] = partial(self._read, rank)
        for node, channel in self._nodes.items():
            poller.register(channel, select.POLLIN)
            readers[channel.fileno()] = partial(self._read_node, node)
        if self._wakeup is not None:
            poller.register(self._wakeup, select.POLLIN)
            readers[self._wakeup] = _nothing
        ends = [asked.end_s - time.monotonic() for asked in self._rounds]
        ready = poller.poll(max(0.0, min(timeout_s, self._ping_every_s, *ends)) * 1000)
        # A longer gap than that means that this process was busy or suspended, and so perhaps were the ranks.
        now = time.monotonic()
        gap, self._polled = min(now - self._polled, 2 * self._ping_every_s), now
        for rank in self.ranks:
            rank.silent_s += gap
        for fd, _ in ready:
            readers[fd]()
        for asked in list(self._rounds):
            silent = [str(rank) for rank in self.ranks if rank.lived_s < asked.start_s]
            if not silent or now >= asked.end_s:
                self._rounds.remove(asked)
                asked.answer(silent)

    def _ping(self) -> None:
        """Now and then, or if somebody asks; a rank that does not answer gets one ping at most."""
        now = time.monotonic()
        is_due = now >= self._next_ping
        if is_due:
            self._next_ping = now + self._ping_every_s
        since = max((asked.start_s for asked in self._rounds), default=float("-inf"))
        for rank in self.ranks:
            if not rank.gone and rank.asked_s is None and (is_due or rank.lived_s < since):
                rank.asked_s = now
                self.send(rank.rank, PING)

    def _read(self, rank: Rank) -> None:
        try:
            with contextlib.suppress(OSError):
                rank.channel.flush()
            messages = rank.channel.receive()
        except EOFError:
            rank.gone = True
            return
        if rank.channel.num_received > rank.num_received:
            rank.num_received = rank.channel.num_received
            rank.silent_s = 0.0
        for kind, body in messages:
            if kind == OUTPUT:
                self.outputs.append((rank.rank, body))
            elif kind == PONG:
                self._note_pong(rank, decode(body, Pong))
            elif kind == READY:
                rank.ready = body
            else:
                assert kind == ERROR, kind
                rank.failure = decode(body, WorkerFailure)

    def _note_pong(self, rank: Rank, pong: Pong) -> None:
        now = time.monotonic()
        # Longer gaps are those of `_listen`: the rank was not asked, or could not answer.
        gap = min(now - rank.ponged, 2 * self._ping_every_s)
        still = pong.busy and pong.step == rank.step and pong.cpu_s - rank.cpu_s < STUCK_SHARE * gap
        rank.stuck_s = rank.stuck_s + gap if still else 0.0
        if rank.asked_s is not None:
            rank.lived_s, rank.asked_s = rank.asked_s, None
        rank.ponged = now
        rank.step, rank.cpu_s = pong.step, pong.cpu_s

    def _read_node(self, node: int) -> None:
        try:
            for kind, body in self._nodes[node].receive():
                assert kind == RANK_ENDED, kind
                ended: RankEnded = decode(body, RankEnded)
                self.ranks[ended.rank].exit_code = ended.code
        except EOFError:
            del self._nodes[node]
            self._lost_node = node

    def _find_cause(self, step: int | None) -> RankFailure:
        """Why the ranks cannot go on. A failed collective is a consequence, so its cause is waited for."""
        deadline = time.monotonic() + ROOT_CAUSE_S
        while time.monotonic() < deadline and not self._is_cause_known():
            self._listen(deadline - time.monotonic())
        failures = [(rank, rank.failure) for rank in self.ranks if rank.failure is not None]
        for _, failure in failures:
            if failure.user_error:
                return RankFailure(failure.message, user_error=True)
        for rank in self.ranks:
            if rank.gone and rank.failure is None:
                return RankFailure(f"{rank} {self._describe_death(rank)}")
        if self._lost_node is not None:
            name = self._names[self._lost_node]
            return RankFailure(f"{name} is gone: its command has ended, or its machine cannot be reached")
        failures.sort(key=lambda entry: entry[1].collective)
        reports, trace = [], ""
        for rank, failure in failures[:1]:
            reports, trace = [f"rank {rank.rank} failed: {failure.message}"], failure.traceback
        quiet_s = min(self.limit_s, 2.5 * self._ping_every_s)
        silent = [rank for rank in self.ranks if not rank.gone and rank.silent_s > quiet_s]
        if silent and all(failure.collective for _, failure in failures):
            reports.insert(0, _describe_silence(silent, step))
        for rank in filter(self._is_stuck, self.ranks):
            reports.append(
                f"{rank} is stuck in step {rank.step}: it has used no processor time for {rank.stuck_s:.0f} s"
            )
        return RankFailure("; ".join(reports), trace=trace)

    def _is_cause_known(self) -> bool:
        return any(rank.gone if rank.failure is None else not rank.failure.collective for rank in self.ranks)

    def _describe_death(self, rank: Rank) -> str:
        if rank.rank in self._local:
            rank.exit_code = self._local.exit_code(rank.rank, wait_s=DEATH_REPORT_S)
        deadline = time.monotonic() + DEATH_REPORT_S
        while rank.exit_code is None and rank.node in self._nodes and time.monotonic() < deadline:
            self._listen(deadline - time.monotonic())
        return "closed its connection" if rank.exit_code is None else describe_exit(rank.exit_code)


def _nothing() -> None:
    """Whoever is woken reads the wake-up himself."""


def _describe_silence(silent: list[Rank], step: int | None) -> str:
    steps = [at for at in (step, *(rank.step for rank in silent)) if at is not None]
    when = f"in step {max(steps)}" if steps else "while starting"
    verb, silence_s = "has" if len(silent) == 1 else "have", max(rank.silent_s for rank in silent)
    return (
        f"{', '.join(map(str, silent))} {verb} not answered for {silence_s:.0f} s {when}: "
        f"stopped, or on an overloaded or unreachable machine"
    )
