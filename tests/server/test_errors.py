"""Whatever a client sends, the answer is an error in OpenAI's form, and never 500."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefold.engine.async_engine import EngineStatus
from prefold.engine.errors import EngineDeadError
from prefold.server.protocol import MAX_BIASES, MAX_STOP_STRINGS

pytestmark = pytest.mark.anyio


def error_of(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


OUT_OF_RANGE: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, 129, 1.5, "1", True, 10**40)],
    *[("temperature", value) for value in (-0.1, 101, "1", False, 10**400)],
    *[("top_p", value) for value in (0, 1.1, -1)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("top_k", value) for value in (-2, 2**31)],
    *[("max_tokens", value) for value in (-1, 2**31, 10**30)],
    *[("min_tokens", value) for value in (-1, 17)],
    *[("seed", value) for value in (2**63, -(2**63) - 1)],
    *[("presence_penalty", value) for value in (2.1, -2.1)],
    *[("frequency_penalty", value) for value in (2.1, -2.1)],
    *[("repetition_penalty", value) for value in (0, -1, 5e-324, 0.0009, 1001)],
    *[("logprobs", value) for value in (-1, 21, True)],
    *[("prompt_logprobs", value) for value in (-1, 21)],
    *[("stop", value) for value in ("", [""], [1], ["x"] * (MAX_STOP_STRINGS + 1), "x" * 5000)],
    *[("stop_token_ids", value) for value in ([-1], [2**31], [0] * 1025, "1")],
    *[("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, [])],
    ("logit_bias", {str(i): 1 for i in range(MAX_BIASES + 1)}),
    *[("prompt", value) for value in ([], [[]], [1, "a"], [[1], "a"], [1.5], {}, None, 5, [["a"]], [True])],
    ("prompt", ["a"] * 2049),
    ("best_of", 2),
    ("suffix", "x"),
    *[("stream", value) for value in (1, "true")],
    ("model", 5),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "xml"}),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=lambda value: repr(value)[:30])
async def test_a_wrong_value_is_named(client: httpx.AsyncClient, name: str, value: Any):
    if isinstance(value, int) and value == 10**400:
        content = b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}"
        headers = {"content-type": "application/json"}
        error_of(await client.post("/v1/completions", content=content, headers=headers), 400)
        return
    response = await client.post("/v1/completions", json={"prompt": "a", name: value})
    assert error_of(response, 400)["param"] == name
    assert len(response.content) < 1000


async def test_missing_and_unknown_fields(client: httpx.AsyncClient):
    error = error_of(await client.post("/v1/completions", json={}), 400)
    assert (error["message"], error["param"]) == ("you must provide a prompt parameter", "prompt")
    for name in ("promt", "Foo", "guided-json"):
        error = error_of(await client.post("/v1/completions", json={"prompt": "a", name: 1}), 400)
        assert error["message"] == f"Unrecognized request argument supplied: {name}"
        assert error["param"] == name
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    assert "stream is true" in error_of(await client.post("/v1/completions", json=body), 400)["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00x"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 50_000,
        b'{"prompt": "a"} x',
        b"\x00" * 1000,
    ],
    ids=lambda content: repr(content[:40]),
)
async def test_broken_bodies(client: httpx.AsyncClient, path: str, content: bytes):
    headers = {"content-type": "application/json"}
    error = error_of(await client.post(path, content=content, headers=headers), 400)
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_of_another_type(client: httpx.AsyncClient, content_type: str | None):
    """What a web page could send to this machine without being asked is not read."""
    content = b'{"prompt": "a", "max_tokens": 1}'
    headers = {} if content_type is None else {"content-type": content_type}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert "application/json" in error_of(response, 400)["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "n",
        "stop",
        "logit_bias",
        "max_tokens",
        "stream",
        "echo",
        "logprobs",
        "model",
        "seed",
        "messages",
    ]
    + ["tools", "tool_choice", "temperature", "stream_options", "response_format", "chat_template_kwargs"]
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(body=st.dictionaries(FIELDS | st.text(max_size=5), JSON, max_size=6))
async def test_no_body_makes_a_500(client: httpx.AsyncClient, path: str, body: dict[str, Any]):
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "x"}], **body}
    elif path == "/v1/completions":
        body = {"prompt": "x", **body}
    try:
        response = await client.post(path, json=body)
    except UnicodeEncodeError:  # the client cannot send half a surrogate pair
        return
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)


async def test_unknown_models_paths_and_methods(client: httpx.AsyncClient):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = error_of(await client.post(path, json={**body, "model": "gpt-4"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'gpt-4'" in error["message"]
        assert (await client.post(path, json={**body, "model": "alias"})).status_code == 200
        response = await client.get(path)
        error_of(response, 405)
        assert response.headers["allow"] == "POST"
    error_of(await client.get("/v1/models/gpt-4"), 404)
    assert "/v1/nothing" in error_of(await client.get("/v1/nothing"), 404)["message"]


async def test_models(client: httpx.AsyncClient, fake: Any):
    models = (await client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["fake", "alias"]
    assert models["data"][0]["max_model_len"] == fake.MAX_MODEL_LEN
    assert (await client.get("/v1/models/alias")).json() == models["data"][1]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_the_engine_refuses(client: httpx.AsyncClient, engine: Any, fake: Any, streamed: bool):
    body = {"prompt": "a", "stream": streamed}
    engine.refusal = fake.queue_full()
    response = await client.post("/v1/completions", json=body)
    assert error_of(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    engine.refusal = EngineDeadError("rank 1 has died")
    response = await client.post("/v1/completions", json=body)
    assert "rank 1 has died" in error_of(response, 503)["message"]
    engine.refusal = ValueError("logit_bias names token 9, outside the vocabulary [0, 5)")
    error_of(await client.post("/v1/completions", json=body), 400)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bug_is_a_500_with_the_requests_id_only(
    client: httpx.AsyncClient, engine: Any, caplog: pytest.LogCaptureFixture, streamed: bool
):
    engine.refusal = KeyError("secret")
    headers = {"x-request-id": "request-7"}
    response = await client.post("/v1/completions", json={"prompt": "a", "stream": streamed}, headers=headers)
    error = error_of(response, 500)
    assert "request-7" in error["message"]
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "request-7"
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (EngineStatus.STARTING, "loading"),
        (EngineStatus.RESTARTING, "restarted"),
        (EngineStatus.DEAD, "failed: rank 1"),
        (EngineStatus.STOPPED, "shutting down"),
    ],
)
async def test_an_engine_that_does_not_serve(
    client: httpx.AsyncClient, engine: Any, status: EngineStatus, words: str
):
    engine.status = status
    if status is EngineStatus.DEAD:
        engine.failure = "rank 1 has died"
    for request in (
        client.post("/v1/completions", json={"prompt": "a"}),
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}),
        client.get("/ready"),
    ):
        response = await request
        assert words in error_of(response, 503)["message"]
        assert "retry-after" in response.headers


async def test_health_is_that_of_the_workers(client: httpx.AsyncClient, engine: Any):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready"}
    engine.failure = "rank 1 has died"
    assert "rank 1 has died" in error_of(await client.get("/health"), 503)["message"]


async def test_while_the_model_loads(make_client: Any):
    async with make_client(None) as client:
        for path in ("/health", "/ready", "/v1/models"):
            assert "loading" in error_of(await client.get(path), 503)["message"]
        assert (
            "loading" in error_of(await client.post("/v1/completions", json={"prompt": "a"}), 503)["message"]
        )
        assert (await client.get("/version")).status_code == 200


async def test_the_openapi_schema_lists_what_can_happen(client: httpx.AsyncClient):
    schema = (await client.get("/openapi.json")).json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert responses.keys() == {"200", "4XX", "5XX"}
        assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}
    completion = schema["components"]["schemas"]["CompletionRequest"]
    assert completion["additionalProperties"] is False
    assert completion["required"] == ["prompt"]
    assert completion["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
