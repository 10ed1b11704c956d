"""A live server of two PCP ranks: connections that are dropped, slow readers, aborts, killed workers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.live_server import Server, is_alive, serving, wait_for

MAX_MODEL_LEN = 600
OPTIONS = [
    *("--threads-per-rank", "1", "--block-size", "4", "--num-blocks", "300", "-pcp", "2"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "64"),
]
GREEDY = {"prompt": list(range(5, 45)), "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("abuse") / "tiny"
    return make_checkpoint("DeepseekV3ForCausalLM", folder, num_hidden_layers=2)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, *OPTIONS, "--restart-workers") as server:
        yield server


def answer(server: Server) -> str:
    response = httpx.post(f"{server.url}/v1/completions", json=GREEDY, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    """What the server answers to `GREEDY` before anything happens to it."""
    return answer(server)


def connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 80), timeout=60)


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def descriptors(server: Server) -> int:
    return server.processes()[0].num_fds()


def test_connections_that_are_dropped(server: Server, text: str):
    """200 at once, each after another part of a request; half of them without a farewell (RST)."""
    before = descriptors(server)
    rng = random.Random(0)
    connections = []
    for i in range(200):
        prompt = [rng.randrange(5, 300) for _ in range(20)]
        data = request_bytes({"prompt": prompt, "max_tokens": 200, "stream": i % 3 == 0, "ignore_eos": True})
        connection = connect(server)
        connection.sendall(data[: len(data) * (i % 20) // 19])
        connections.append(connection)
    wait_for(lambda: descriptors(server) > before + 100)  # accepted
    for i, connection in enumerate(connections):
        if i % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_for(server.is_idle, 30)
    wait_for(lambda: descriptors(server) <= before + 2, 30)
    assert answer(server) == text


def test_what_is_no_http(server: Server, text: str):
    for data in (b"\x00" * 5000, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"x" * 200_000):
        with connect(server) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                reply = connection.recv(1000)
            except TimeoutError:
                raise
            except OSError:  # the server had closed it before all was sent
                continue
            assert not reply or reply.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    assert answer(server) == text


def test_a_slow_reader_stops_nobody(server: Server, text: str):
    """Hundreds of kilobytes that nobody reads fill the buffers of both sides."""
    body = {**GREEDY, "max_tokens": 200, "n": 4, "logprobs": 20, "stream": True}
    with connect(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(request_bytes(body))
        wait_for(lambda: server.metric("num_requests_running") > 0)
        assert answer(server) == text
        wait_for(server.is_idle, 60)  # the engine does not wait for the reader either
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            piece = slow.recv(1 << 20)
            assert piece, received[-200:]
            received += piece
    assert b"data: [DONE]\n\n" in received[-100:]
    assert received.count(b'"finish_reason":"length"') == 4
    assert len(received) > 400_000


def test_an_abort_storm(server: Server, text: str):
    """50 long requests that are cancelled at random moments, in prefill or decode, streamed or not."""
    rng = random.Random(1)

    async def one(client: httpx.AsyncClient, i: int) -> bool:
        length = rng.randrange(100, 400)
        prompt = [rng.randrange(5, 300) for _ in range(length)]
        body = {"prompt": prompt, "max_tokens": MAX_MODEL_LEN - length, "stream": i % 2 == 0}
        try:
            async with asyncio.timeout(rng.uniform(0, 2)):
                response = await client.post("/v1/completions", json={**body, "ignore_eos": True})
                assert response.status_code == 200, response.text
        except TimeoutError:
            return True
        return False

    async def storm() -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            return sum(await asyncio.gather(*(one(client, i) for i in range(50))))

    assert asyncio.run(storm()) > 25
    wait_for(server.is_idle, 30)
    assert answer(server) == text


def killed_under_load(server: Server) -> tuple[list[str], float]:
    """Kills a rank while requests run; what they got instead of an answer, and how long that took."""
    answers: list[str] = []
    body = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}

    def ask(i: int) -> None:
        fields = {**body, "prompt": list(range(5 + i, 155 + i)), "stream": i % 2 == 0}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60).text)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("num_requests_running") >= 2)
    began = time.monotonic()
    ranks = server.ranks()
    assert len(ranks) == 2
    ranks[1].kill()
    for thread in threads:
        thread.join(60)
    return answers, time.monotonic() - began


def test_a_killed_worker_is_replaced(server: Server, text: str):
    """The last test of this server."""
    old = server.ranks()
    answers, seconds = killed_under_load(server)
    health = httpx.get(f"{server.url}/health")
    assert seconds < 10
    assert len(answers) == 6
    for got in answers:
        assert "SIGKILL" in got
        assert "service_unavailable_error" in got
    assert (health.status_code, "restarted" in health.text) == (503, True)
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not set(server.ranks()) & set(old)
    assert answer(server) == text
    assert server.is_idle()


def test_a_killed_worker_ends_the_server(folder: Path):
    with serving(folder, *OPTIONS) as server:
        answers, seconds = killed_under_load(server)
        assert seconds < 10
        assert len(answers) == 6
        assert all("SIGKILL" in got for got in answers)
        processes = server.processes()
        assert server.process.wait(20) == 1
        wait_for(lambda: not any(map(is_alive, processes)))
        wait_for(lambda: "SIGKILL" in server.output)
