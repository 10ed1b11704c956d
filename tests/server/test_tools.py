"""Structured outputs and tools of /v1/chat/completions over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from prefold.grammar import check_grammar

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/int"}, "y": {"$ref": "#/$defs/int"}},
            "required": ["x"],
            "$defs": {"int": {"type": "integer"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ANSWER = (
    'Let me see.\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


async def ask(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post("/v1/chat/completions", json={"messages": HI, "stream": True, **body})
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


async def refusal(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.fixture
async def hermes(make_client: Callable[..., httpx.AsyncClient], engine: Any) -> Any:
    async with make_client(chat_template="<tool_call>") as client:
        yield client


def calls_of(choice: Any) -> list[tuple[str, str]]:
    calls = choice["message"]["tool_calls"]
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("call_") for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


async def test_calls_in_an_answer(hermes: httpx.AsyncClient, engine: Any):
    engine.answer = ANSWER
    choice = await ask(hermes, tools=[ADD, NOW])
    assert calls_of(choice) == [("add", '{"x": 1}'), ("now", "{}")]
    assert choice["message"]["content"] == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    assert calls_of(await ask(hermes, tools=[ADD, NOW], parallel_tool_calls=False)) == [("add", '{"x": 1}')]
    assert engine.params[0].structured_outputs is None


async def test_a_call_that_was_cut_off(hermes: httpx.AsyncClient, engine: Any):
    engine.answer = ANSWER
    choice = await ask(hermes, tools=[ADD], max_tokens=ANSWER.index("1}"))
    assert calls_of(choice) == [("add", '{"x": ')]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("options", [{}, {"tools": [ADD], "tool_choice": "none"}])
async def test_without_tools_all_is_text(hermes: httpx.AsyncClient, engine: Any, options: Any):
    engine.answer = ANSWER
    choice = await ask(hermes, **options)
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_calls_in_a_stream(hermes: httpx.AsyncClient, engine: Any):
    engine.answer = ANSWER
    choices = await stream(hermes, tools=[ADD, NOW], logprobs=True)
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index, name, arguments in ((0, "add", '{"x": 1}'), (1, "now", "{}")):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert (first["type"], first["function"]) == ("function", {"name": name, "arguments": ""})
        assert first["id"].startswith("call_")
        assert all(piece.keys() == {"index", "function"} for piece in rest)
        assert "".join(piece["function"]["arguments"] for piece in rest) == arguments
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    # Tokens that were held back are reported with the next piece.
    tokens = [e["token"] for choice in choices for e in (choice["logprobs"] or {}).get("content", ())]
    assert "".join(tokens) == ANSWER


async def test_markers_that_are_special_tokens_are_kept(
    make_client: Callable[..., httpx.AsyncClient], engine: Any
):
    engine.answer = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    async with make_client(tool_call_parser="mistral") as client:
        choice = await ask(client, tools=[NOW])
        await ask(client)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    assert [params.skip_special_tokens for params in engine.params] == [False, True]


@pytest.mark.parametrize("streamed", [False, True])
async def test_required_calls(client: httpx.AsyncClient, engine: Any, streamed: bool):
    engine.answer = '[{"name": "add", "arguments": {"x": 1}}, {"name": "now", "arguments": {}}]'
    options = {"tools": [ADD, NOW], "tool_choice": "required"}
    if streamed:
        choices = await stream(client, **options)
        names = [
            c["function"]["name"]
            for x in choices
            for c in x["delta"].get("tool_calls", ())
            if "name" in c["function"]
        ]
        assert names == ["add", "now"]
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert not any(x["delta"].get("content") for x in choices)
    else:
        choice = await ask(client, **options)
        assert calls_of(choice) == [("add", '{"x": 1}'), ("now", "{}")]
        assert choice["message"]["content"] is None
    structured = engine.params[0].structured_outputs
    check_grammar(structured)
    schema = json.loads(structured.json_schema)
    assert schema["$defs"]["0"]["properties"]["x"] == {"$ref": "#/$defs/0/$defs/int"}
    assert "maxItems" not in schema
    await ask(client, parallel_tool_calls=False, **options)
    assert json.loads(engine.params[1].structured_outputs.json_schema)["maxItems"] == 1


async def test_a_named_call(client: httpx.AsyncClient, engine: Any):
    engine.answer = '{"x": 1}'
    named = {"type": "function", "function": {"name": "add"}}
    choice = await ask(client, tools=[NOW, ADD], tool_choice=named)
    assert calls_of(choice) == [("add", '{"x": 1}')]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(engine.params[0].structured_outputs.json_schema) == ADD["function"]["parameters"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_structured_outputs_reach_the_engine(client: httpx.AsyncClient, engine: Any, path: str):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    prompt: dict[str, Any] = {"messages": HI} if "chat" in path else {"prompt": "hi"}
    for extra, name, expected in [
        ({"response_format": form}, "json_schema", json.dumps(schema)),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"structured_outputs": {"json": schema}}, "json_schema", json.dumps(schema)),
        ({"structured_outputs": {"json": json.dumps(schema)}}, "json_schema", json.dumps(schema)),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"regex": "[ab]+"}}, "regex", "[ab]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ]:
        response = await client.post(path, json={**prompt, "max_tokens": 1, **extra})
        assert response.status_code == 200, response.text
        assert getattr(engine.params[-1].structured_outputs, name) == expected
    await client.post(path, json={**prompt, "max_tokens": 1, "response_format": {"type": "text"}})
    assert engine.params[-1].structured_outputs is None


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def tool_of(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "deep", "parameters": parameters}}


def form_of(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BAD_TOOL = {"type": "function", "function": {"name": "bad", "parameters": {"type": "what"}}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "what"}},
                }
            },
            "response_format",
            "response_format cannot be used: Invalid type: what",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a" * (1 << 17 | 1)}}, "structured_outputs", "131073"),
        ({"structured_outputs": {"json": nested(900)}}, "structured_outputs", ""),
        ({"tools": [tool_of(nested(450))], "tool_choice": "required"}, "tools", ""),
        (
            {"response_format": form_of({"enum": ["a" * 200_000]})},
            "response_format",
            "response_format of 2000",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "exclude each other",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, None, "ignore_eos"),
        (
            {"tools": [BAD_TOOL], "tool_choice": "required"},
            "tools",
            "tools cannot be used: Invalid type: what",
        ),
    ],
)
async def test_what_cannot_be_done(
    client: httpx.AsyncClient, engine: Any, body: Any, param: str, message: str
):
    error = await refusal(client, **body)
    assert message in error["message"]
    assert param is None or error["param"] == param
    assert not engine.params


async def test_structure_needs_a_tokenizer(client: httpx.AsyncClient, engine: Any):
    engine.tokenizer = None
    body = {"prompt": [5], "response_format": {"type": "json_object"}}
    response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
