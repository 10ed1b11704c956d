"""How the engine finds the ranks that other commands have started: on other machines, or by torchrun.

Each of these commands connects, says what it was started with and, once all have come and agree,
opens a connection for each of its ranks (see `node`). The engine listens only until all are there.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import secrets
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

import msgspec

import prefold
from prefold.config import EngineConfig, ModelConfig
from prefold.control import (
    MAX_MESSAGE,
    NODE_FAILED,
    NODE_HELLO,
    NODE_REFUSED,
    NODE_START,
    RANK_HELLO,
    Channel,
    NodeHello,
    NodeStart,
    RankHello,
    decode,
    encode,
    keep_alive,
)
from prefold.engine.errors import EngineDeadError

logger = logging.getLogger("prefold")

FIRST_NOTE_S = 3.0
NOTE_EVERY_S = 30.0
MAX_HELLO = 1 << 20
"""Longest message, in bytes, from somebody who has not said who it is."""


def versions() -> dict[str, str]:
    """What must be equal on all machines."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"prefold": prefold.__version__, "torch": version("torch"), "python": python}


def model_digest(model: ModelConfig) -> str:
    """Of a checkpoint's configuration as read on this machine."""
    return hashlib.sha256(msgspec.json.encode(asdict(model), order="sorted")).hexdigest()[:16]


def free_port(host: str) -> int:
    """A port of this machine that nobody uses now."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


class Meeting:
    """Waits for the other commands and their ranks.

    Args:
        config: resolved; `config.cluster` says how many commands there are, and where to listen.

    Attributes:
        nodes: channels to the commands, by their number (from 1).
        ranks: channels to their ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.nodes: dict[int, Channel] = {}
        self.ranks: dict[int, Channel] = {}
        self._config = config
        self._cluster = config.cluster
        self._per_process = config.parallel.world_size // config.cluster.processes
        self._token = secrets.token_hex(16)
        self._strangers: set[Channel] = set()
        self._expected = range(1, config.cluster.processes)

    def run(self) -> None:
        """Return when every rank has a channel.

        Raises:
            ValueError: a command was started differently (it is told, too), or the port is taken.
            EngineDeadError: a command did not come in time, or has left.
        """
        try:
            with _listen(self._cluster.master_addr, self._cluster.master_port) as listener:
                self._wait(listener, len(self._expected), lambda: len(self.nodes))
                for node, channel in self.nodes.items():
                    first, count = node * self._per_process, self._per_process
                    threads = self._config.runtime.threads_per_rank
                    channel.send(NODE_START, encode(NodeStart(self._token, first, count, threads)))
                count = self._config.parallel.world_size - self._per_process
                self._wait(listener, count, lambda: len(self.ranks))
        except BaseException as error:
            self.close(str(error) or type(error).__name__)
            raise
        finally:
            for channel in self._strangers:
                channel.close()

    def close(self, reason: str) -> None:
        """Tell the commands that have come why nothing becomes of it."""
        for channel in self.nodes.values():
            with suppress(OSError):
                channel.send(NODE_FAILED, reason.encode())
        for channel in (*self.nodes.values(), *self.ranks.values()):
            channel.close()

    def _wait(self, listener: socket.socket, expected: int, count: Callable[[], int]) -> None:
        """Accept connections and read what they say, until `count()` is `expected`."""
        limit_s = self._config.runtime.collective_timeout_s
        start = time.monotonic()
        next_note = start + FIRST_NOTE_S
        while count() < expected:
            now = time.monotonic()
            if now > start + limit_s:
                raise EngineDeadError(f"{self._missing()} did not come within {limit_s:g} s")
            if now > next_note:
                next_note = now + NOTE_EVERY_S
                logger.warning("%s", f"waiting for {self._missing()}")
            self._listen_once(listener)

    def _listen_once(self, listener: socket.socket) -> None:
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        readers: dict[int, Callable[[], None]] = {listener.fileno(): partial(self._accept, listener)}
        for channel in self._strangers:
            poller.register(channel, select.POLLIN)
            readers[channel.fileno()] = partial(self._read, channel)
        for node, channel in self.nodes.items():
            poller.register(channel, select.POLLIN)
            readers[channel.fileno()] = partial(self._lost, node)
        for fd, _ in poller.poll(200):
            readers[fd]()

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        keep_alive(sock, self._config.runtime.collective_timeout_s)
        self._strangers.add(Channel(sock, MAX_HELLO))

    def _lost(self, node: int) -> None:
        name = self._cluster.name(node)
        raise EngineDeadError(f"{name} has left before the start: see what it says there")

    def _read(self, channel: Channel) -> None:
        """A stranger's first message. Whoever speaks another language is sent away."""
        try:
            messages = channel.receive()
            if not messages:
                return
            kind, body = messages[0]
            if kind == NODE_HELLO:
                self._welcome(channel, decode(body, NodeHello))
            elif kind == RANK_HELLO:
                self._welcome_rank(channel, decode(body, RankHello))
            else:
                raise EOFError
        except (EOFError, _NotOurs):
            logger.warning("a connection to port %d was none of ours", self._cluster.master_port)
            channel.close()
        self._strangers.discard(channel)

    def _welcome(self, channel: Channel, hello: NodeHello) -> None:
        """ValueError, on both sides, if the command does not fit this one."""
        problem = self._mismatch(hello)
        if problem is not None:
            channel.send(NODE_REFUSED, problem.encode())
            raise ValueError(problem)
        self.nodes[hello.index] = channel

    def _mismatch(self, hello: NodeHello) -> str | None:
        """What keeps a command from taking part."""
        who = f"{self._cluster.name(hello.index)} ({hello.host})"
        ours = versions()
        for name in ours:
            if hello.versions.get(name) != ours[name]:
                return f"{who} has {name} {hello.versions.get(name)}, node 0 has {ours[name]}"
        if hello.processes != self._cluster.processes or hello.index not in self._expected:
            return (
                f"{who} is one of {hello.processes}, but node 0 expects nodes "
                f"{', '.join(map(str, self._expected))} of {self._cluster.processes}"
            )
        if hello.index in self.nodes:
            return f"node rank {hello.index} was given twice, the second time on {hello.host}"
        mine = self._cluster.options
        # As the other side's came: a tuple is a list after the journey.
        mine = msgspec.msgpack.decode(msgspec.msgpack.encode(mine))
        for name in sorted(mine.keys() | hello.options.keys()):
            if hello.options.get(name) != mine.get(name):
                return (
                    f"{who} was started with {name}={hello.options.get(name)!r}, "
                    f"node 0 with {name}={mine.get(name)!r}: give all nodes the same options"
                )
        if hello.model != model_digest(self._config.model):
            return f"{who} has another checkpoint than node 0 under {self._config.model.path}"
        return None

    def _welcome_rank(self, channel: Channel, hello: RankHello) -> None:
        known = secrets.compare_digest(hello.token, self._token)
        if not known or hello.rank in self.ranks:
            raise _NotOurs
        channel.limit = MAX_MESSAGE
        self.ranks[hello.rank] = channel

    def _missing(self) -> str:
        """Which commands are missing, and how to start them."""
        cluster, world = self._cluster, self._config.parallel.world_size
        missing = [node for node in self._expected if node not in self.nodes]
        ranks = f"{len(missing) * self._per_process} of {world} ranks"
        names = ", ".join(map(cluster.name, missing))
        if cluster.processes_per_node > 1:
            return f"{ranks}: {names}"
        return (
            f"{ranks}: {names} (run the same command there, with --node-rank {missing[0] if missing else 1} "
            f"--master-addr {cluster.master_addr} --master-port {cluster.master_port})"
        )


class _NotOurs(Exception):
    """A connection of somebody else."""


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=256)
    except OSError as error:
        raise ValueError(
            f"node 0 cannot listen on {host}:{port}: {error.strerror or error}. --master-addr must be an "
            f"address of node 0, and --master-port a free port there"
        ) from None
