"""Keys, request ids, size and time limits, CORS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

pytestmark = pytest.mark.anyio

BODY = {"prompt": "a", "max_tokens": 1}


async def test_api_keys(make_client: Any):
    async with make_client(api_keys=("first", "zweiter-ä")) as client:
        for key in ("first", "zweiter-ä"):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        for given in (None, "Bearer", "Bearer ", "Bearer fir", "Bearer first2", "Basic first", "first"):
            headers = {} if given is None else {"authorization": given}
            for path in ("/v1/models", "/version", "/openapi.json", "/v1/completions", "/nothing"):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401, (given, path)
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert "first" not in response.text
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200


async def test_head_is_get_without_a_body(client: httpx.AsyncClient, make_client: Any):
    """Some watch a server that way."""
    for path, status in (("/health", 200), ("/v1/models", 200), ("/nothing", 404), ("/v1/completions", 405)):
        assert (await client.head(path)).status_code == status
    async with make_client(api_keys=("k",)) as other:
        assert (await other.head("/v1/models")).status_code == 401


async def test_compressed_bodies_are_not_read(client: httpx.AsyncClient):
    for coding, status in (("gzip", 415), ("br", 415), ("Identity", 200)):
        response = await client.post("/v1/completions", json=BODY, headers={"content-encoding": coding})
        assert (response.status_code, status == 200 or coding in response.text) == (status, True)


async def test_request_ids(client: httpx.AsyncClient):
    response = await client.get("/version", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    for given in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 129}):
        first, second = [await client.get("/nothing", headers=given) for _ in range(2)]
        assert len(first.headers["x-request-id"]) == 32
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_equal_request_ids_do_not_meet_in_the_engine(client: httpx.AsyncClient):
    headers = {"x-request-id": "same"}
    requests = [client.post("/v1/completions", json=BODY, headers=headers) for _ in range(3)]
    responses = await asyncio.gather(*requests)
    assert [response.status_code for response in responses] == [200] * 3
    assert len({response.json()["id"] for response in responses}) == 3


@pytest.mark.parametrize("size", [999, 1000, 1001, 5000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_the_body_limit_is_exact(make_client: Any, size: int, chunked: bool):
    content = b'{"prompt": "a", "max_tokens": 1}'.ljust(size)
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for start in range(0, size, 100):
            read += 100
            yield content[start : start + 100]

    async with make_client(max_body_bytes=1000) as client:
        response = await client.post(
            "/v1/completions",
            content=chunks() if chunked else content,
            headers={"content-type": "application/json"},
        )
    assert response.status_code == (200 if size <= 1000 else 413)
    if size > 1000:
        assert response.headers["connection"] == "close"
        assert "MiB" in response.json()["error"]["message"]
        # What is beyond the limit is not even read.
        assert read <= 1100


async def test_a_request_that_takes_too_long(make_client: Any, engine: Any):
    engine.gate.clear()
    async with make_client(request_timeout_s=0.05) as client:
        response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 504
        assert "0.05 s" in response.json()["error"]["message"]
        response = await client.post("/v1/completions", json={**BODY, "prompt": ["a", "b"]})
        assert response.status_code == 504
    assert len(engine.aborted) == 3
    assert not engine.running


async def test_a_stream_that_takes_too_long_ends_with_an_error(make_client: Any, engine: Any):
    async def one_token() -> None:
        await asyncio.sleep(0.02)
        engine.gate.set()
        await asyncio.sleep(0)
        engine.gate.clear()

    engine.gate.clear()
    async with make_client(request_timeout_s=0.2) as client:
        token = asyncio.create_task(one_token())
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        await token
    *chunks, error, done, _ = response.text.split("\n\n")
    assert len(chunks) >= 1
    assert '"code":"timeout"' in error
    assert done == "data: [DONE]"
    assert len(engine.aborted) == 1


async def test_a_body_that_never_comes(make_client: Any):
    async def nothing() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with make_client(request_timeout_s=0.05) as client:
        response = await client.post("/v1/completions", content=nothing())
    assert response.status_code == 408


async def test_cors_is_off_unless_asked_for(make_client: Any, client: httpx.AsyncClient):
    origin = {"origin": "https://page.example"}
    preflight = {**origin, "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in (await client.get("/version", headers=origin)).headers
    async with make_client(allow_origins=("https://page.example",), api_keys=("key",)) as open_client:
        response = await open_client.options("/v1/completions", headers=preflight)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (
            200,
            origin["origin"],
        )
        # Errors can be read by the page too.
        response = await open_client.get("/version", headers=origin)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (
            401,
            origin["origin"],
        )
        other = await open_client.get("/version", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_requests_are_logged_if_asked_for(make_client: Any, capsys: pytest.CaptureFixture[str]):
    async with make_client() as client:
        await client.get("/version")
    assert capsys.readouterr().out == ""
    async with make_client(log_requests=True) as client:
        await client.get("/nothing", headers={"x-request-id": "seven"})
    line = capsys.readouterr().out
    assert line.startswith("GET /nothing 404 ")
    assert line.endswith(" seven\n")


async def test_the_recorder_is_told_how_requests_end(engine: Any, make_client: Any):
    class Recorder:
        def __init__(self) -> None:
            self.finished: list[Any] = []
            self.rejected: list[int] = []

        def on_finished(self, output: Any, model_name: str) -> None:
            self.finished.append((output.request_id, model_name))

        def on_rejected(self, status: int) -> None:
            self.rejected.append(status)

    async with make_client() as client:
        recorder = client._transport.app.state.server.recorder = Recorder()
        response = await client.post("/v1/completions", json=BODY)
        await client.get("/nothing")
        await client.post("/v1/completions", json={})
    assert recorder.finished == [(response.json()["id"], "fake")]
    assert recorder.rejected == [404, 400]
