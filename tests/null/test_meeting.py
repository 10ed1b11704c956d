"""Commands that start ranks find the engine, and are told when they do not fit it."""

from __future__ import annotations

import dataclasses
import select
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from prefold.cli.nodes import TORCHRUN_VARIABLES, join_torchrun, runs_engine
from prefold.cli.options import EngineOptions
from prefold.config import ClusterConfig, ParallelConfig, RuntimeConfig
from prefold.control import (
    NODE_FAILED,
    NODE_HELLO,
    NODE_REFUSED,
    NODE_START,
    RANK_HELLO,
    Channel,
    Message,
    NodeHello,
    NodeStart,
    RankHello,
    decode,
    encode,
)
from prefold.engine.errors import EngineDeadError
from prefold.engine.meeting import Meeting, free_port, model_digest, versions

HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Model:
    path: str = "/models/tiny"


class Engine:
    """A meeting that runs in a thread: 2 ranks on each of `nodes` nodes."""

    def __init__(self, nodes: int = 2, timeout_s: float = 20.0) -> None:
        self.port = free_port(HOST)
        self.config: Any = SimpleNamespace(
            parallel=ParallelConfig(prefill_context_parallel_size=2 * nodes, nnodes=nodes),
            cluster=ClusterConfig(nodes, 1, HOST, self.port, {"block_size": 8, "stop": (1, 2)}),
            runtime=RuntimeConfig(collective_timeout_s=timeout_s, threads_per_rank=3),
            model=Model(),
        )
        self.meeting = Meeting(self.config)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.meeting.run()
        except (ValueError, EngineDeadError) as error:
            self.error = error

    def join(self) -> BaseException | None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()
        return self.error

    def hello(self, **changes: Any) -> NodeHello:
        hello = NodeHello(
            versions(),
            1,
            self.config.cluster.processes,
            self.config.cluster.options,
            model_digest(Model()),
            "h",
        )
        for name, value in changes.items():
            setattr(hello, name, value)
        return hello

    def connect(self) -> Channel:
        deadline = time.monotonic() + 10
        while True:
            try:
                return Channel(socket.create_connection((HOST, self.port)))
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.join()
        engine.meeting.close("the test is over")


def read(channel: Channel) -> Message:
    """The next message."""
    while True:
        select.select([channel], [], [], 10)
        for message in channel.receive():
            return message


def test_nodes_meet_and_their_ranks_get_connections(engines: list[Engine]):
    engine = Engine(nodes=3)
    engines.append(engine)
    stranger = engine.connect()
    stranger._socket.send(b"GET / HTTP/1.1\r\n\r\n")
    nodes = {index: engine.connect() for index in (2, 1)}
    for index, node in nodes.items():
        node.send(NODE_HELLO, encode(engine.hello(index=index)))
    channels = [*nodes.values(), stranger]
    for index, node in nodes.items():
        kind, body = read(node)
        assert kind == NODE_START
        start: NodeStart = decode(body, NodeStart)
        assert (start.first, start.count, start.threads_per_rank) == (2 * index, 2, 3)
        if index == 2:
            wrong = engine.connect()
            wrong.send(RANK_HELLO, encode(RankHello("0" * 32, 2)))
            with pytest.raises(EOFError):
                read(wrong)
            channels.append(wrong)
        for rank in (start.first, start.first + 1):
            channels.append(engine.connect())
            channels[-1].send(RANK_HELLO, encode(RankHello(start.token, rank)))
    assert engine.join() is None
    assert sorted(engine.meeting.nodes) == [1, 2]
    assert sorted(engine.meeting.ranks) == [2, 3, 4, 5]
    with pytest.raises(EOFError):
        read(stranger)
    for channel in channels:
        channel.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {**versions(), "torch": "1.0"}}, r"node 1 \(h\) has torch 1.0, node 0 has "),
        ({"versions": {}}, r"node 1 \(h\) has prefold None, node 0 has "),
        ({"processes": 3}, "node 1 .* is one of 3, but node 0 expects nodes 1 of 2"),
        ({"index": 2}, "node 2 .* is one of 2, but node 0 expects nodes 1 of 2"),
        ({"index": 0}, "node 0 .* is one of 2, but node 0 expects nodes 1 of 2"),
        (
            {"options": {"block_size": 16, "stop": (1, 2)}},
            "started with block_size=16, node 0 with block_size=8",
        ),
        ({"options": {"block_size": 8}}, "started with stop=None"),
        ({"model": "0"}, "node 1 .* has another checkpoint than node 0 under /models/tiny"),
    ],
)
def test_a_node_that_does_not_fit(engines: list[Engine], changes: dict[str, Any], message: str):
    """Both sides are told the same."""
    engine = Engine()
    engines.append(engine)
    node = engine.connect()
    node.send(NODE_HELLO, encode(engine.hello(**changes)))
    kind, body = read(node)
    assert kind == NODE_REFUSED
    error = engine.join()
    assert isinstance(error, ValueError)
    assert str(error) == body.decode()
    with pytest.raises(ValueError, match=message):
        raise error
    node.close()


def test_a_node_rank_that_is_given_twice(engines: list[Engine]):
    """The other nodes are told as well."""
    engine = Engine(nodes=3)
    engines.append(engine)
    first, second = engine.connect(), engine.connect()
    first.send(NODE_HELLO, encode(engine.hello()))
    time.sleep(0.3)
    second.send(NODE_HELLO, encode(engine.hello()))
    assert read(second) == (NODE_REFUSED, b"node rank 1 was given twice, the second time on h")
    assert read(first) == (NODE_FAILED, b"node rank 1 was given twice, the second time on h")
    assert isinstance(engine.join(), ValueError)
    first.close()
    second.close()


def test_a_node_that_does_not_come(engines: list[Engine]):
    engine = Engine(timeout_s=0.5)
    engines.append(engine)
    error = engine.join()
    assert isinstance(error, EngineDeadError)
    assert "2 of 4 ranks: node 1 (run the same command there, with --node-rank 1 " in str(error)
    assert f"--master-addr 127.0.0.1 --master-port {engine.port})" in str(error)
    assert "within 0.5 s" in str(error)


def test_a_node_that_leaves(engines: list[Engine]):
    engine = Engine(nodes=3)
    engines.append(engine)
    node = engine.connect()
    node.send(NODE_HELLO, encode(engine.hello()))
    time.sleep(0.3)
    node.close()
    assert "node 1 has left" in str(engine.join())


def test_a_port_that_is_taken(engines: list[Engine]):
    with socket.create_server((HOST, 0)) as taken:
        engine = Engine.__new__(Engine)
        engine.port = taken.getsockname()[1]
        cluster = ClusterConfig(2, 1, HOST, engine.port)
        config: Any = SimpleNamespace(
            parallel=ParallelConfig(prefill_context_parallel_size=2, nnodes=2), cluster=cluster
        )
        with pytest.raises(
            ValueError, match=rf"cannot listen on 127.0.0.1:{engine.port}: Address already in use"
        ):
            Meeting(config).run()
    config.cluster = ClusterConfig(2, 1, "192.0.2.1", 29501)
    with pytest.raises(ValueError, match="--master-addr must be an address of node 0"):
        Meeting(config).run()


# torchrun

ENVIRONMENT = dict(zip(TORCHRUN_VARIABLES, ["4", "3", "2", "1", "1", "10.0.0.1", "29500", "none"]))


def test_torchrun_says_who_this_process_is():
    options = EngineOptions(prefill_context_parallel_size=2, tensor_parallel_size=2, seed=5)
    joined = join_torchrun(options, ENVIRONMENT)
    expected = {"nnodes": 2, "node_rank": 1, "nproc_per_node": 2, "local_rank": 1}
    address = {"master_addr": "10.0.0.1", "master_port": 29501}
    assert joined == dataclasses.replace(options, **expected, **address)
    assert not runs_engine(joined)
    first = ENVIRONMENT | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    assert runs_engine(join_torchrun(options, first))


@pytest.mark.parametrize("missing", TORCHRUN_VARIABLES)
def test_without_torchrun_nothing_changes(missing: str):
    """Some of the names are common: a job scheduler may set them."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != missing}
    assert join_torchrun(EngineOptions(), environment) == EngineOptions()


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {}, r"started 4 processes, but the layout is DP 1 x PP 1 x PCP 1 x TP 1 = 1 ranks"),
        ({"tensor_parallel_size": 4, "nnodes": 2}, {}, "--nnodes, --node-rank and --master-addr go before"),
        ({"tensor_parallel_size": 4, "master_addr": "a"}, {}, "--master-addr go before"),
        ({"tensor_parallel_size": 4}, {"LOCAL_WORLD_SIZE": "3", "RANK": "3"}, "equally many processes"),
        ({"tensor_parallel_size": 4}, {"RANK": "2"}, "equally many processes"),
    ],
)
def test_torchrun_that_does_not_fit(options: dict[str, Any], changes: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        join_torchrun(EngineOptions(**options), ENVIRONMENT | changes)
