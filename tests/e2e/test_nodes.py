"""Several machines: as groups of processes on loopback, as network namespaces, and under torchrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from prefold import LLM, SamplingParams, run_node
from prefold.engine.executor import EngineDeadError
from prefold.engine.meeting import free_port
from prefold.testing.checkpoints import make_checkpoint

PROMPT = [i % 200 for i in range(100)]
NUM_TOKENS = 8
COMMON = ["--threads-per-rank", "1", "--num-blocks", "200", "--collective-timeout-s", "60"]
WAIT_S = 300
"""For commands to end on a busy machine."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("nodes"), num_hidden_layers=2)
    )


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[int]:
    """Tokens of a single rank."""
    llm = LLM(checkpoint, threads_per_rank=1, skip_tokenizer_init=True, num_blocks=200)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    return llm.generate([PROMPT], params)[0].outputs[0].token_ids


@pytest.fixture
def arguments(checkpoint: str, tmp_path: Path) -> list[str]:
    """`prefold generate` with the prompt."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(PROMPT))
    prompt = ["--prompt-token-ids", str(ids), "--json", "--max-tokens", str(NUM_TOKENS)]
    return ["-m", "prefold", "generate", checkpoint, *prompt, *COMMON]


Start = Callable[[list[str]], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command; what still runs at the end is killed."""
    with ExitStack() as stack:

        def run(command: list[str]) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def nodes_options(port: int, node: int, host: str = "127.0.0.1", count: int = 2) -> list[str]:
    return [
        *("--nnodes", str(count), "--node-rank", str(node)),
        *("--master-addr", host, "--master-port", str(port)),
    ]


def tokens_of(output: str) -> list[int]:
    return json.loads(output)["outputs"][0]["token_ids"]


def test_two_nodes_on_loopback(arguments: list[str], expected: list[int], start: Start) -> None:
    """TP inside a node, PCP over both; the engine waits for the second node."""
    port = free_port("127.0.0.1")
    nodes = []
    for node in range(2):
        options = ["-tp", "2", "-pcp", "2", *nodes_options(port, node)]
        nodes.append(start([sys.executable, *arguments, *options]))
        time.sleep(1.0)
    output, errors = nodes[0].communicate(timeout=WAIT_S)
    assert nodes[0].returncode == 0, errors
    assert tokens_of(output) == expected
    output, notes = nodes[1].communicate(timeout=WAIT_S)
    assert nodes[1].returncode == 0, notes
    assert output == ""
    assert f"node 1: ranks 2-3; looking for the engine at 127.0.0.1:{port}" in notes
    assert "node 1: the engine has ended" in notes


NAMESPACES = ("prefold-test-0", "prefold-test-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Two network namespaces that are joined by a pair of interfaces, as two machines are by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the `ip` command")
    try:
        for name in NAMESPACES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "pf0",
            "netns",
            NAMESPACES[0],
            "type",
            "veth",
            "peer",
            "pf0",
            "netns",
            NAMESPACES[1],
        )
        for name, address in zip(NAMESPACES, ADDRESSES):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "pf0")
            for interface in ("pf0", "lo"):
                ip("-n", name, "link", "set", interface, "up")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


def test_two_network_namespaces(
    namespaces: None, arguments: list[str], expected: list[int], start: Start
) -> None:
    """Neither has the other's loopback: everything goes over the wire between them."""
    commands = []
    for node, name in enumerate(NAMESPACES):
        options = ["-tp", "2", "-pcp", "2", *nodes_options(29501, node, ADDRESSES[0])]
        commands.append(start(["ip", "netns", "exec", name, sys.executable, *arguments, *options]))
    (output, errors), (_, notes) = (command.communicate(timeout=WAIT_S) for command in commands)
    assert [command.returncode for command in commands] == [0, 0], errors + notes
    assert tokens_of(output) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_rank_of_another_node_that_is_killed_or_stopped(
    checkpoint: str, arguments: list[str], start: Start, number: int
) -> None:
    """The engine names rank and node, both commands fail, and no rank is left on either."""
    port = free_port("127.0.0.1")
    quick = ["-pcp", "2", "--ignore-eos", "--collective-timeout-s", "60"]
    other = start([sys.executable, *arguments, *quick, *nodes_options(port, 1)])
    options = {"threads_per_rank": 1, "num_blocks": 200, "collective_timeout_s": 60, "nnodes": 2}
    llm = LLM(
        checkpoint,
        prefill_context_parallel_size=2,
        master_addr="127.0.0.1",
        master_port=port,
        skip_tokenizer_init=True,
        **options,
    )
    executor = llm.engine.core.executor
    pids = executor.pids  # type: ignore[attr-defined]
    executor._ranks.limit_s = 3.0  # type: ignore[attr-defined]  # the start may take longer than that
    llm.generate([PROMPT], SamplingParams(max_tokens=2))
    os.kill(pids[1], number)
    how = "was killed by SIGKILL" if number == signal.SIGKILL else r"has not answered for \d+ s in step \d+"
    message = rf"rank 1 \(process {pids[1]}, node 1\) {how}"
    with pytest.raises(EngineDeadError, match=message):
        llm.generate([PROMPT], SamplingParams(max_tokens=50))
    _, notes = other.communicate(timeout=WAIT_S)
    assert other.returncode == 1
    assert re.search(rf"error: the engine is dead: {message}", notes)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_node_whose_command_is_killed(checkpoint: str, arguments: list[str], start: Start) -> None:
    """Its ranks leave with it."""
    port = free_port("127.0.0.1")
    other = start([sys.executable, *arguments, "-pcp", "2", *nodes_options(port, 1)])
    llm = LLM(
        checkpoint,
        prefill_context_parallel_size=2,
        threads_per_rank=1,
        num_blocks=200,
        collective_timeout_s=60,
        nnodes=2,
        master_addr="127.0.0.1",
        master_port=port,
        skip_tokenizer_init=True,
    )
    pids = llm.engine.core.executor.pids  # type: ignore[attr-defined]
    other.kill()
    with pytest.raises(EngineDeadError, match="node 1"):
        llm.generate([PROMPT], SamplingParams(max_tokens=50))
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pids[1]) and psutil.Process(pids[1]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("when", ["waiting", "generating"])
def test_an_interrupt_of_node_0_ends_all_nodes(arguments: list[str], start: Start, when: str) -> None:
    port = free_port("127.0.0.1")
    endless = ["-pcp", "3", "--stream", "--ignore-eos", "--max-tokens", "3000"]
    arguments = [argument for argument in arguments if argument != "--json"]
    nodes = 3 if when == "waiting" else 2
    endless[1] = str(nodes)
    first, second = (
        start([sys.executable, *arguments, *endless, *nodes_options(port, node, count=nodes)])
        for node in range(2)
    )
    assert second.stderr is not None
    while "started" not in (line := second.stderr.readline()) and "waiting for the other" not in line:
        assert line
    if when == "generating":
        assert first.stdout is not None
        first.stdout.read(1)
    ranks = [p for p in psutil.process_iter(["name", "ppid"]) if is_rank_of(p, first, second)]
    assert len(ranks) == (0 if when == "waiting" else 2)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=WAIT_S)
    assert first.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    second.communicate(timeout=WAIT_S)
    assert second.returncode in (0, 1)
    assert not [rank for rank in ranks if rank.is_running()]


def is_rank_of(process: psutil.Process, *commands: subprocess.Popen[str]) -> bool:
    """Ranks are grandchildren of their commands."""
    try:
        grandparent = (
            psutil.Process(process.ppid()).ppid() if process.name().startswith("prefold-rank") else 0
        )
    except psutil.NoSuchProcess:
        return False
    return grandparent in [command.pid for command in commands]


def test_bench_latency_on_two_nodes(checkpoint: str, start: Start) -> None:
    port = free_port("127.0.0.1")
    arguments = ["-m", "prefold", "bench", "latency", checkpoint, "--input-len", "50", "--output-len", "4"]
    arguments += ["--repeats", "1", "--warmup", "0", "--json", "-pcp", "2", "--threads-per-rank", "1"]
    commands = [start([sys.executable, *arguments, *nodes_options(port, node)]) for node in range(2)]
    (output, errors), (_, notes) = (command.communicate(timeout=WAIT_S) for command in commands)
    assert [command.returncode for command in commands] == [0, 0], errors + notes
    (row,) = json.loads(output)["rows"]
    assert row["world_size"] == 2
    assert sum(row["rank_tokens"]) == 53


def test_nodes_with_different_options(arguments: list[str], start: Start) -> None:
    """Both say what differs, before anything is loaded."""
    port = free_port("127.0.0.1")
    commands = [
        start([sys.executable, *arguments, "-pcp", "2", "--block-size", size, *nodes_options(port, node)])
        for node, size in enumerate(("32", "16"))
    ]
    for command in commands:
        _, errors = command.communicate(timeout=WAIT_S)
        assert command.returncode == 2
        assert "was started with block_size=16, node 0 with block_size=32" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "nnodes=2 needs master_addr"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h"}, r"node_rank=2 is outside \[0, nnodes=2\)"),
        ({"nnodes": 3, "master_addr": "h"}, "not divisible by nnodes=3"),
        ({"nnodes": 2, "master_addr": "h", "master_port": 70000}, "master_port=70000 is outside"),
        (
            {"nnodes": 2, "master_addr": "h", "node_rank": 1},
            "LLM runs on node 0; on node 1 call prefold.run_node",
        ),
    ],
)
def test_wrong_options(checkpoint: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, prefill_context_parallel_size=2, threads_per_rank=1, **options)


def test_a_node_that_has_no_checkpoint_or_no_engine(checkpoint: str) -> None:
    port = free_port("127.0.0.1")
    where = {"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": port}
    with pytest.raises(ValueError, match=r"node 1 needs a copy of node 0's checkpoint"):
        run_node("/nowhere", **where)
    with pytest.raises(ValueError, match=r"node_rank=5 is outside \[0, nnodes=2\)$"):
        run_node(checkpoint, **where | {"node_rank": 5})
    with pytest.raises(EngineDeadError, match=rf"no engine at 127.0.0.1:{port} within 0.5 s"):
        run_node(checkpoint, prefill_context_parallel_size=2, collective_timeout_s=0.5, **where)


def torchrun(nodes: int, per_node: int, port: int, node: int = 0) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--node-rank",
        str(node),
    ]
    return [
        *command,
        "--nproc-per-node",
        str(per_node),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    ]


def test_torchrun_on_two_nodes(arguments: list[str], expected: list[int], start: Start) -> None:
    """One process prints, all succeed."""
    port = free_port("127.0.0.1")
    layout = ["-tp", "2", "-pcp", "2"]
    commands = [start([*torchrun(2, 2, port, node), *arguments, *layout]) for node in range(2)]
    outputs = [command.communicate(timeout=WAIT_S) for command in commands]
    assert [command.returncode for command in commands] == [0, 0], outputs
    assert tokens_of(outputs[0][0]) == expected
    assert outputs[1][0] == ""
    assert "node" not in outputs[1][1].replace("--node", "")


def test_torchrun_with_the_wrong_number_of_processes(arguments: list[str], start: Start) -> None:
    command = start([*torchrun(1, 2, free_port("127.0.0.1")), *arguments, "-tp", "2", "-pcp", "2"])
    _, errors = command.communicate(timeout=WAIT_S)
    assert command.returncode != 0
    assert "started 2 processes, but the layout is DP 1 x PP 1 x PCP 2 x TP 2 = 4 ranks" in errors
