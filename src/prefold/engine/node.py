"""The command on another machine (or another process of torchrun): starts ranks for the engine and waits."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prefold.config import EngineConfig
from prefold.control import (
    NODE_DONE,
    NODE_FAILED,
    NODE_HELLO,
    NODE_REFUSED,
    NODE_START,
    RANK_ENDED,
    RANK_HELLO,
    Channel,
    NodeHello,
    NodeStart,
    RankEnded,
    RankHello,
    decode,
    encode,
    keep_alive,
)
from prefold.engine.args import EngineArgs
from prefold.engine.errors import EngineDeadError, EngineFailedElsewhere
from prefold.engine.launch import LocalRanks
from prefold.engine.meeting import model_digest, versions

logger = logging.getLogger("prefold")

RETRY_S = 0.2
CHECK_S = 0.2
"""How often the ranks' processes are looked at."""
GRACE_S = 5.0
"""How long ranks may take to leave at the end."""

Note = Callable[[str], None]


def run_node(model: str, *, note: Note = logger.info, **options: Any) -> None:
    """Start this node's ranks for the engine on node 0, and return when the engine has ended well.

    Args:
        model: as on node 0: every node has the checkpoint under the same path.
        note: told what is going on, in a line.
        options: fields of `EngineArgs`; as on node 0, but for `node_rank`.

    Raises:
        ValueError: the options or the checkpoint here do not fit those of node 0.
        EngineDeadError: the engine could not be reached, or has failed.
    """
    args = EngineArgs(model, **options)
    args.check()
    try:
        config = args.resolve()
    except ValueError as error:
        raise ValueError(f"{error} (node {args.node_rank} needs a copy of node 0's checkpoint)") from None
    if args.process_index == 0:
        raise ValueError("node 0 runs the engine: run_node is for the others")
    node = _Node(config, args.process_index, note)
    try:
        node.run()
    except BaseException:
        node.kill()
        raise
    finally:
        node.close()


class _Node:
    def __init__(self, config: EngineConfig, index: int, note: Note) -> None:
        self._config = config
        self._cluster = config.cluster
        self._index = index
        self._note = note
        self._name = config.cluster.name(index)
        self._where = f"{self._cluster.master_addr}:{self._cluster.master_port}"
        self._local: LocalRanks | None = None
        self._channel: Channel | None = None
        self._reported: set[int] = set()

    def run(self) -> None:
        count = self._config.parallel.world_size // self._cluster.processes
        ranks = (
            f"ranks {self._index * count}-{(self._index + 1) * count - 1}"
            if count > 1
            else f"rank {self._index}"
        )
        self._note(f"{self._name}: {ranks}; looking for the engine at {self._where}")
        self._channel = channel = Channel(self._connect())
        hello = NodeHello(
            versions(),
            self._index,
            self._cluster.processes,
            self._cluster.options,
            model_digest(self._config.model),
            socket.gethostname(),
        )
        channel.send(NODE_HELLO, encode(hello))
        self._note(f"{self._name}: found it; waiting for the other nodes")
        while True:
            select.select([channel], [], [], CHECK_S)
            self._report_ended()
            try:
                messages = channel.receive()
            except EOFError:
                raise EngineDeadError(f"the engine at {self._where} is gone") from None
            for kind, body in messages:
                if kind == NODE_START:
                    self._start(decode(body, NodeStart))
                    self._note(f"{self._name}: {ranks} started")
                elif kind == NODE_DONE:
                    self._note(f"{self._name}: the engine has ended")
                    return
                elif kind == NODE_REFUSED:
                    raise ValueError(body.decode())
                else:
                    assert kind == NODE_FAILED, kind
                    raise EngineFailedElsewhere(body.decode())

    def _connect(self) -> socket.socket:
        """A connection to the engine, which may not listen yet."""
        limit_s = self._config.runtime.collective_timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                address = (self._cluster.master_addr, self._cluster.master_port)
                sock = socket.create_connection(address, timeout=max(1.0, limit_s / 4))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise EngineDeadError(
                        f"no engine at {self._where} within {limit_s:g} s ({error}): start node 0 with "
                        f"--node-rank 0 and the same --master-addr and --master-port"
                    ) from None
                time.sleep(RETRY_S)
                continue
            if sock.getsockname() == sock.getpeername():  # the free port of this end was the engine's
                sock.close()
                continue
            keep_alive(sock, limit_s)
            return sock

    def _start(self, start: NodeStart) -> None:
        self._local = LocalRanks(start.threads_per_rank)
        for rank in range(start.first, start.first + start.count):
            sock = self._connect()
            Channel(sock).send(RANK_HELLO, encode(RankHello(start.token, rank)))
            self._local.start(rank, sock)

    def _report_ended(self) -> None:
        """Tell the engine what became of ranks that have ended."""
        assert self._channel is not None
        for rank, code in (self._local.ended() if self._local else {}).items():
            if rank not in self._reported:
                self._reported.add(rank)
                with suppress(OSError):  # `receive` will say so
                    self._channel.send(RANK_ENDED, encode(RankEnded(rank, code)))

    def kill(self) -> None:
        if self._local is not None:
            self._local.kill()

    def close(self) -> None:
        """Leave nothing behind. Ranks that were not killed have a moment to leave by themselves."""
        if self._channel is not None:
            self._channel.close()
        if self._local is not None:
            self._local.reap(GRACE_S)
