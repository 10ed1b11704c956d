"""/v1/completions over the fake engine, which repeats the prompt's characters."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

pytestmark = pytest.mark.anyio


async def complete(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """The events of a stream, without the last, which is checked to be [DONE]."""
    response = await client.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_the_form_of_a_completion(client: httpx.AsyncClient, engine: Any):
    result = await complete(client, prompt="abc", max_tokens=5)
    assert result.pop("id").startswith("cmpl-")
    assert result.pop("created") > 1.7e9
    assert result == {
        "object": "text_completion",
        "model": "fake",
        "system_fingerprint": "fp_0123456789",
        "choices": [
            {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_16_tokens_by_default(client: httpx.AsyncClient):
    assert (await complete(client, prompt="abc"))["choices"][0]["text"] == "abcabcabcabcabca"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab"]),
        (["ab"], ["abab"]),
        (["ab", "c"], ["abab", "cccc"]),
        ([97, 98], ["abab"]),
        ([[97, 98]], ["abab"]),
        ([[97, 98], [99]], ["abab", "cccc"]),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_every_form_of_prompt(client: httpx.AsyncClient, prompt: Any, texts: list[str], n: int):
    """Choices are numbered prompt * n + sample, whole and streamed."""
    result = await complete(client, prompt=prompt, max_tokens=4, n=n)
    choices = [(choice["index"], choice["text"]) for choice in result["choices"]]
    assert choices == list(enumerate(text for text in texts for _ in range(n)))
    assert result["usage"]["completion_tokens"] == 4 * n * len(texts)
    streamed: dict[int, str] = {}
    for chunk in await stream(client, prompt=prompt, max_tokens=4, n=n):
        for choice in chunk["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert sorted(streamed.items()) == choices


async def test_all_sampling_parameters_arrive(client: httpx.AsyncClient, engine: Any):
    await complete(
        client,
        prompt="ab",
        n=2,
        best_of=2,
        temperature=0.25,
        top_k=7,
        top_p=0.5,
        min_p=0.125,
        seed=-3,
        max_tokens=9,
        min_tokens=2,
        stop=["x", "yz"],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=4,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"17": -100, "18": 2.5},
        skip_special_tokens=False,
        user="somebody",
    )
    (params,) = engine.params
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (
        2,
        0.25,
        7,
        0.5,
        0.125,
    )
    assert (params.seed, params.max_tokens, params.min_tokens) == (-3, 9, 2)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x", "yz"), (5, 6), True)
    assert (params.logprobs, params.prompt_logprobs) == (3, 4)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.5, {17: -100, 18: 2.5})
    assert params.skip_special_tokens is False


async def test_defaults_are_openais(client: httpx.AsyncClient, engine: Any):
    await complete(client, prompt="ab", temperature=None, stop=None, max_tokens=None, n=None)
    (params,) = engine.params
    assert (params.n, params.temperature, params.top_k, params.top_p, params.max_tokens) == (
        1,
        1.0,
        0,
        1.0,
        16,
    )
    assert (params.stop, params.logprobs, params.prompt_logprobs, params.seed) == ((), None, None, None)


async def test_whole_floats_are_integers(client: httpx.AsyncClient, engine: Any):
    await complete(client, prompt="ab", max_tokens=3.0, seed=5.0)
    assert (engine.params[0].max_tokens, engine.params[0].seed) == (3, 5)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_with_logprobs_scores_the_prompt(
    client: httpx.AsyncClient, engine: Any, max_tokens: int, streamed: bool
):
    """What evaluation harnesses read: one entry per token of prompt and output, the first of them null."""
    body = {"prompt": "aé€", "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    if streamed:
        choices = [c for chunk in await stream(client, **body) for c in chunk["choices"]]
        logprobs = {
            key: [entry for c in choices for entry in c["logprobs"][key]] for key in choices[0]["logprobs"]
        }
        text = "".join(c["text"] for c in choices)
    else:
        (choice,) = (await complete(client, **body))["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
    tokens = list("aé€" + "aé"[:max_tokens])
    assert engine.params[0].prompt_logprobs == 2
    assert text == "".join(tokens)
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(tokens) - 1)
    assert logprobs["text_offset"] == list(range(len(tokens)))
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"é": -0.5, "ê": -1.0}


async def test_echo_of_token_ids_is_their_text(client: httpx.AsyncClient):
    result = await complete(client, prompt=[104, 105], max_tokens=1, echo=True)
    assert result["choices"][0]["text"] == "hih"


async def test_prompt_logprobs_as_vllm_has_them(client: httpx.AsyncClient):
    (choice,) = (await complete(client, prompt="ab", max_tokens=1, prompt_logprobs=1))["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    first, second = await stream(client, prompt="ab", max_tokens=2, prompt_logprobs=1)
    assert first["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert "prompt_logprobs" not in second["choices"][0]


async def test_without_a_tokenizer_token_ids_work(client: httpx.AsyncClient, engine: Any):
    engine.tokenizer = None
    (choice,) = (await complete(client, prompt=[97, 98], max_tokens=2, logprobs=0))["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    response = await client.post("/v1/completions", json={"prompt": "ab"})
    assert response.status_code == 400
    assert "no tokenizer" in response.json()["error"]["message"]


async def test_a_stream_has_one_chunk_per_token(client: httpx.AsyncClient):
    chunks = await stream(client, prompt="abc", max_tokens=4)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c", "a"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_at_the_end_or_in_every_chunk(client: httpx.AsyncClient):
    *chunks, last = await stream(client, prompt="abc", max_tokens=2, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, prompt="abc", max_tokens=2, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


async def test_the_limit_is_exact(client: httpx.AsyncClient, fake: Any):
    """Prompt + max_tokens == max_model_len passes, one more is refused with the numbers."""
    limit = fake.MAX_MODEL_LEN
    for length in (1, 7, limit - 1):
        await complete(client, prompt="a" * length, max_tokens=limit - length)
        body = {"prompt": "a" * length, "max_tokens": limit - length + 1}
        response = await client.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        for number in (limit, limit + 1, length, limit - length + 1):
            assert str(number) in error["message"]
    await complete(client, prompt="a" * limit, max_tokens=0, echo=True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_refused_prompt_ends_all(client: httpx.AsyncClient, engine: Any, fake: Any, streamed: bool):
    generate = engine.generate

    def refuse_second(request_id: str, *args: Any, **kwargs: Any) -> Any:
        if request_id.endswith("-1"):
            engine.refusal = fake.queue_full()
        return generate(request_id, *args, **kwargs)

    engine.generate = refuse_second
    engine.gate.clear()  # the others would never end by themselves
    body = {"prompt": ["a", "b", "c"], "stream": streamed}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 429
    assert not engine.running
