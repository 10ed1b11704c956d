"""/v1/chat/completions, /tokenize and /detokenize over the fake engine."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def chat(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def refusal(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_the_form_of_a_chat(client: httpx.AsyncClient, engine: Any):
    result = await chat(client, max_tokens=4, n=2)
    assert result["id"].startswith("chatcmpl-")
    assert result["object"] == "chat.completion"
    assert result["usage"]["prompt_tokens"] == len("u:hi\n")
    assert result["usage"]["completion_tokens"] == 8
    assert [choice["index"] for choice in result["choices"]] == [0, 1]
    assert result["choices"][1]["message"] == {"role": "assistant", "content": "u:hi", "refusal": None}
    assert result["choices"][1]["finish_reason"] == "length"


async def test_a_chat_goes_on_to_the_models_limit(client: httpx.AsyncClient, engine: Any, fake: Any):
    result = await chat(client)
    assert engine.params[0].max_tokens is None
    assert result["usage"]["total_tokens"] == fake.MAX_MODEL_LEN
    result = await chat(client, max_tokens=9, max_completion_tokens=3)
    assert result["usage"]["completion_tokens"] == 3


async def test_a_stream_begins_with_the_role(client: httpx.AsyncClient):
    chunks = await chat(client, max_tokens=3, n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = chunks
    assert last["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"] for choice in choices[1:]] == [{"content": text} for text in ("u", ":", "h")]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs(client: httpx.AsyncClient, streamed: bool):
    messages = [{"role": "é", "content": "x"}]
    result = await chat(
        client, messages=messages, max_tokens=2, logprobs=True, top_logprobs=2, stream=streamed
    )
    chunks = result if streamed else [result]
    content = [
        e for chunk in chunks for c in chunk["choices"] for e in (c["logprobs"] or {}).get("content", [])
    ]
    assert [entry["token"] for entry in content] == ["é", ":"]
    assert content[0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
            {"token": "ê", "logprob": -1.0, "bytes": [0xC3, 0xAA]},
        ],
    }


async def test_logprobs_without_alternatives(client: httpx.AsyncClient):
    result = await chat(client, max_tokens=1, logprobs=True)
    (entry,) = result["choices"][0]["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"]) == (-0.5, [])
    assert "logprobs=true" in (await refusal(client, top_logprobs=2))["message"]


async def test_the_template_gets_what_the_client_sent(client: httpx.AsyncClient, engine: Any):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2", "extra": 5},
    ]
    kwargs = {"enable_thinking": False}
    await chat(client, messages=messages, tools=[TOOL], chat_template_kwargs=kwargs, max_tokens=1)
    (seen, options) = engine.template_calls[0]
    assert [message["content"] for message in seen] == ["a\nb", "", "2"]
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert (seen[2]["tool_call_id"], seen[2]["extra"]) == ("1", 5)
    assert "name" not in seen[0]
    assert options["tools"] == [TOOL]
    assert options["template_kwargs"] == kwargs
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (True, False)


async def test_the_last_message_can_be_continued(client: httpx.AsyncClient, engine: Any):
    await chat(client, add_generation_prompt=False, continue_final_message=True, max_tokens=1)
    options = engine.template_calls[0][1]
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (False, True)
    error = await refusal(client, continue_final_message=True)
    assert "add_generation_prompt=false" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "refused", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
async def test_what_a_chat_cannot_do(client: httpx.AsyncClient, body: Any, param: str):
    error = await refusal(client, **body)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_what_needs_no_structured_output_passes(client: httpx.AsyncClient):
    await chat(client, response_format={"type": "text"}, tools=[TOOL], tool_choice="auto", max_tokens=1)
    await chat(client, tools=[TOOL], tool_choice="none", parallel_tool_calls=True, max_tokens=1)


async def test_tokenize(client: httpx.AsyncClient, fake: Any):
    response = await client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True})
    limit = fake.MAX_MODEL_LEN
    assert response.json() == {
        "count": 3,
        "max_model_len": limit,
        "tokens": [97, 98, 99],
        "token_strs": ["a", "b", "c"],
    }
    response = await client.post("/tokenize", json={"messages": HI})
    assert response.json()["tokens"] == [ord(character) for character in "u:hi\n"]
    response = await client.post("/detokenize", json={"tokens": [97, 98]})
    assert response.json() == {"prompt": "ab"}
    for body in ({}, {"prompt": [1]}, {"messages": HI, "prompt": "x"}):
        assert (await client.post("/tokenize", json=body)).status_code == 400
    assert (await client.post("/detokenize", json={"tokens": [-1]})).status_code == 400
