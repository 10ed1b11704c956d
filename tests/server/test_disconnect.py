"""A client that leaves takes its request along; one that reads slowly delays nobody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prefold.server.app import make_app
from prefold.server.settings import ServerSettings

pytestmark = pytest.mark.anyio


class Connection:
    """One request, spoken to the app without a server in between."""

    def __init__(self, engine: Any, path: str, body: dict[str, Any], **settings: Any) -> None:
        self.app = make_app(engine, ServerSettings(("fake",), **settings))
        self.left = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.sent: list[dict[str, Any]] = []
        self._body: bytes | None = json.dumps(body).encode()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"server"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(self.app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.may_write.wait()
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/completions", {"prompt": ["abc", "d", "e"]}),
        ("/v1/completions", {"prompt": "abc", "stream": True}),
        ("/v1/completions", {"prompt": ["abc", "d", "e"], "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
    ],
)
@pytest.mark.parametrize("tokens", [0, 3])
async def test_leaving_aborts_at_once(engine: Any, path: str, body: dict[str, Any], tokens: int):
    """Before the first token, which is in the middle of the prefill, and after some."""
    engine.gate.clear()
    connection = Connection(engine, path, body)
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    await until(lambda: len(engine.running) == num_prompts)
    for _ in range(tokens):
        engine.gate.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.gate.clear()
    connection.left.set()
    await until(lambda: not engine.running)
    assert len(engine.aborted) == num_prompts
    await asyncio.wait_for(connection.task, 5)
    assert "length" not in connection.text


async def test_leaving_before_the_body_is_complete(engine: Any):
    connection = Connection(engine, "/v1/completions", {})
    connection._body = None
    connection.left.set()
    await asyncio.wait_for(connection.task, 5)
    assert engine.prompts == []


async def test_a_cancelled_server_task_aborts_too(engine: Any):
    engine.gate.clear()
    for stream in (False, True):
        connection = Connection(engine, "/v1/completions", {"prompt": "abc", "stream": stream})
        await until(lambda: engine.running)
        connection.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connection.task
        assert not engine.running
    assert len(engine.aborted) == 2


async def test_an_engine_that_dies_in_mid_stream(engine: Any):
    connection = Connection(engine, "/v1/completions", {"prompt": "abc", "max_tokens": 30, "stream": True})
    await until(lambda: connection.text.count("data:") >= 2)
    engine.failure = "rank 1 has died"
    await asyncio.wait_for(connection.task, 5)
    *_, error, done, end = connection.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    shown = json.loads(error.removeprefix("data: "))["error"]
    assert (shown["message"], shown["type"]) == ("rank 1 has died", "service_unavailable_error")
    assert "length" not in connection.text


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "status"),
    [("abort", None, 503), ("error", "why", 500), ("error", "structured_outputs: too many items", 400)],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_the_engine_ended_is_an_error(
    engine: Any, finish_reason: str, stop_reason: str | None, status: int, streamed: bool
):
    generate = engine.generate

    async def ended(*args: Any, **kwargs: Any) -> Any:
        async for output in generate(*args, **kwargs):
            if output.finished:
                output.outputs[0].finish_reason = finish_reason
                output.outputs[0].stop_reason = stop_reason
            yield output

    engine.generate = ended
    connection = Connection(engine, "/v1/completions", {"prompt": "abc", "max_tokens": 2, "stream": streamed})
    await asyncio.wait_for(connection.task, 5)
    assert connection.sent[0]["status"] == (200 if streamed else status)
    assert '"error":' in connection.text
    assert f'"finish_reason":"{finish_reason}"' not in connection.text


async def test_a_slow_reader_stops_nobody(engine: Any):
    body = {"prompt": "abc", "max_tokens": 50, "stream": True}
    slow = Connection(engine, "/v1/completions", body)
    slow.may_write.clear()
    await until(lambda: len(engine.prompts) == 1)
    quick = Connection(engine, "/v1/completions", body)
    await asyncio.wait_for(quick.task, 5)
    assert quick.text.count("data:") == 51
    assert not slow.task.done()
    slow.may_write.set()
    await asyncio.wait_for(slow.task, 5)
    assert slow.text.endswith("data: [DONE]\n\n")


async def test_a_stream_without_news_is_kept_open(engine: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prefold.server.running.ADMISSION_S", 0.01)
    monkeypatch.setattr("prefold.server.running.KEEP_ALIVE_S", 0.01)
    engine.gate.clear()
    connection = Connection(engine, "/v1/completions", {"prompt": "abc", "max_tokens": 1, "stream": True})
    await until(lambda: connection.text.count(": waiting\n\n") >= 2)
    assert connection.sent[0]["status"] == 200
    engine.gate.set()
    await asyncio.wait_for(connection.task, 5)
    assert '"text":"a"' in connection.text
