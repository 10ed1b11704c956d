"""The control connections: messages between the engine, its ranks, and the commands on other machines.

A message is a length, a kind (one byte) and a body in msgpack. Nothing that comes from a socket is
unpickled. Neither side is ever blocked by the other: see `Channel`.
"""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import msgspec

from prefold.config import EngineConfig

SETUP, STEP, PING, QUIT = b"U", b"S", b"P", b"Q"
"""Kinds of messages from the engine to a rank."""
READY, OUTPUT, ERROR, PONG = b"R", b"O", b"E", b"B"
"""Kinds of messages from a rank to the engine."""
NODE_HELLO, RANK_HELLO, RANK_ENDED = b"N", b"H", b"D"
"""From a command on another machine to the engine; `RANK_HELLO` opens a connection that its rank inherits."""
NODE_START, NODE_REFUSED, NODE_FAILED, NODE_DONE = b"T", b"X", b"F", b"G"
"""From the engine to a command on another machine."""

HEADER = 4
"""Bytes of the length in front of a message."""
MAX_MESSAGE = 1 << 31
READ_SIZE = 1 << 16
"""Of a channel's own buffer. New memory per read, cut to what came, would split the heap more and more."""


class WorkerSetup(msgspec.Struct):
    """What a rank is told first."""

    config: EngineConfig
    rank: int
    rendezvous: str
    """Where the ranks meet: "file:///..." (a path that does not exist yet) or "tcp://host:port"."""


class Pong(msgspec.Struct):
    """A sign of life: the answer to a PING, by a thread that does nothing else.

    `step`: what the rank is computing (`busy`), or computed last; None before the first one. `cpu_s`:
    processor time of the rank so far, of all its threads.
    """

    step: int | None
    busy: bool = False
    cpu_s: float = 0.0


class WorkerFailure(msgspec.Struct):
    """The error that ended a rank.

    `user_error`: a ValueError, for the user to mend. `collective`: other ranks did not do their part, so
    the cause is probably there.
    """

    message: str
    traceback: str
    user_error: bool = False
    collective: bool = False


class NodeHello(msgspec.Struct):
    """A command on another machine says what it was started with."""

    versions: dict[str, str]
    index: int
    """Which of `processes` commands it is: it stands for the index-th equal share of the ranks."""
    processes: int
    options: dict[str, Any]
    """`EngineArgs`, as the user gave them: equal on all machines."""
    model: str
    """Digest of the checkpoint's configuration, as read there."""
    host: str


class NodeStart(msgspec.Struct):
    """The engine agrees: start ranks [first, first + count), each on a connection of its own."""

    token: str
    first: int
    count: int
    threads_per_rank: int


class RankHello(msgspec.Struct):
    """First message of a connection that a rank will use."""

    token: str
    rank: int


class RankEnded(msgspec.Struct):
    """What became of a rank's process: its exit code, or minus the signal that ended it."""

    rank: int
    code: int


class Message(NamedTuple):
    kind: bytes
    body: bytes


class Channel:
    """Messages over a stream socket. Sending queues what the socket does not take at once, so that a peer
    that does not read (it is stopped, or its machine is gone) cannot block this side.

    One thread may send while another one receives.

    Args:
        sock: connected; the channel owns it.
        limit: longest message accepted, in bytes.

    Attributes:
        num_received: bytes so far.
    """

    def __init__(self, sock: socket.socket, limit: int = MAX_MESSAGE) -> None:
        sock.setblocking(False)
        self.limit = limit
        self.num_received = 0
        self._socket = sock
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._buffer = memoryview(bytearray(READ_SIZE))

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to write."""
        return bool(self._outgoing)

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """Queue a message, and write what the socket takes. OSError: the peer is gone."""
        self._outgoing += (len(body) + 1).to_bytes(HEADER, "big") + kind + body
        self.flush()

    def flush(self) -> bool:
        """Write what the socket takes; whether that was all. OSError: the peer is gone."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                return False
            del self._outgoing[:sent]
        return True

    def receive(self) -> list[Message]:
        """The messages that have arrived in full. EOFError: the peer is gone, and all were returned."""
        gone = False
        while not gone:
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                size = 0
            gone = size == 0
            self.num_received += size
            self._incoming += self._buffer[:size]
        messages = self._complete_messages()
        if gone and not messages:
            raise EOFError
        return messages

    def _complete_messages(self) -> list[Message]:
        messages, start, incoming = [], 0, self._incoming
        while len(incoming) >= start + HEADER:
            length = int.from_bytes(incoming[start : start + HEADER], "big")
            if not 1 <= length <= self.limit:
                raise EOFError(f"a message of {length} bytes: this is no connection of ours")
            end = start + HEADER + length
            if len(incoming) < end:
                break
            body = bytes(incoming[start + HEADER : end])
            messages.append(Message(body[:1], body[1:]))
            start = end
        del incoming[:start]
        return messages

    def detach(self) -> socket.socket:
        """The socket, for somebody else to own. Nothing may have been received beyond what was returned."""
        assert not self._incoming
        return self._socket

    def close(self) -> None:
        self._socket.close()


def keep_alive(sock: socket.socket, timeout_s: float) -> None:
    """Let a TCP connection break about `timeout_s` after the other machine has vanished."""
    probes = 3
    every = max(1, int(timeout_s / (probes + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(timeout_s * 1000)))


def decode(body: bytes, kind: type) -> Any:
    """A message's body. ValueError if it is not one of `kind`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from None


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)
