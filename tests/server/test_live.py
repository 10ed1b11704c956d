"""`prefold serve` in a process of its own on a tiny checkpoint, asked by OpenAI's client and by curl."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest

from prefold.cli.main import main
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.live_server import Server, serving, wait_for

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 600
OPTIONS = [
    *("--served-model-name", "demo", "--threads-per-rank", "1", "--block-size", "4", "--num-blocks", "300"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "64"),
]
TEXT = "The ranks of one prompt are the parts of another. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    return make_checkpoint("DeepseekV3ForCausalLM", folder, num_hidden_layers=2)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Two PCP ranks."""
    with serving(folder, *OPTIONS, "-pcp", "2") as server:
        yield server


@pytest.fixture(scope="module")
def single(folder: Path) -> Iterator[Server]:
    """One rank, keys."""
    with serving(folder, *OPTIONS, "--api-key", "any", "--drain-timeout", "30") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client


GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 12}


def complete(client: openai.OpenAI, prompt: Any = TEXT, **options: Any) -> Any:
    return client.completions.create(prompt=prompt, **(GREEDY | options))


def test_it_says_what_it_serves(server: Server):
    assert "2 ranks (DP 1 x PP 1 x PCP 2 x TP 1), DCP 1, 1 thread each, float32" in server.output
    assert f"max_model_len  {MAX_MODEL_LEN} tokens" in server.output
    assert f"curl {server.url}/v1/completions" in server.output


def test_completions_whole_and_streamed(client: openai.OpenAI):
    whole = complete(client)
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_prompts_in_every_form_agree(server: Server, client: openai.OpenAI):
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": TEXT}).json()["tokens"]
    text = complete(client).choices[0].text
    other = complete(client, "Another").choices[0].text
    assert complete(client, ids).choices[0].text == text
    assert [c.text for c in complete(client, [TEXT, "Another"]).choices] == [text, other]
    assert [c.text for c in complete(client, [ids, ids], n=2, temperature=0).choices] == [text] * 4
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"].endswith(TEXT)


def test_chat_whole_and_streamed(server: Server, client: openai.OpenAI):
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a rank?"},
    ]
    whole = client.chat.completions.create(messages=messages, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **GREEDY))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    rendered = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    assert rendered["count"] == whole.usage.prompt_tokens
    assert complete(client, rendered["tokens"]).choices[0].text == text


def test_logprobs(client: openai.OpenAI):
    choice = complete(client, logprobs=3).choices[0]
    assert len(choice.logprobs.tokens) == 12
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
    messages: Any = [{"role": "user", "content": "What is a rank?"}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **GREEDY)
    content = chat.choices[0].logprobs.content
    assert len(content) == 12
    for entry in content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
    # The bytes are true where the texts of single tokens are not.
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace") == (
        chat.choices[0].message.content
    )


def test_n_seeded_samples_are_reproducible(client: openai.OpenAI, single: Server):
    """Also by another server with another layout."""
    options = {"n": 4, "seed": 7, "temperature": 0.8}
    texts = [choice.text for choice in complete(client, **options).choices]
    assert len(set(texts)) > 1
    assert [choice.text for choice in complete(client, **options).choices] == texts
    assert [choice.text for choice in complete(single.client, **options).choices] == texts


def test_stop_strings_end_the_text(client: openai.OpenAI):
    text = complete(client).choices[0].text
    stop = text[4:6]
    choice = complete(client, stop=["never", stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]
    assert choice.stop_reason == stop
    streamed = list(complete(client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    assert streamed[-1].choices[0].finish_reason == "stop"


def scores(client: openai.OpenAI, text: str, **options: Any) -> list[float | None]:
    choice = complete(client, text, echo=True, logprobs=1, **options).choices[0]
    assert choice.text.startswith(text)
    return choice.logprobs.token_logprobs


def test_a_prompt_is_scored_alike_by_one_rank_and_by_two(client: openai.OpenAI, single: Server):
    """echo + logprobs, without and with generating; the first entry is null."""
    text = TEXT * 5
    first, *ours = scores(client, text, max_tokens=0)
    assert first is None
    other_first, *others = scores(single.client, text, max_tokens=0)
    assert other_first is None
    assert ours == pytest.approx(others, abs=1e-4)
    longer = scores(client, text, max_tokens=1)
    assert longer[1:-1] == pytest.approx(ours, abs=1e-4)
    extra = {"prompt_logprobs": 1}
    raw = complete(client, text, extra_body=extra).choices[0].prompt_logprobs
    assert raw[0] is None
    assert [next(iter(entry.values()))["logprob"] for entry in raw[1:]] == pytest.approx(ours, abs=1e-4)


def test_the_longest_prompt(client: openai.OpenAI):
    ids = [5 + i % 300 for i in range(MAX_MODEL_LEN - 1)]
    assert complete(client, ids, max_tokens=1).usage.total_tokens == MAX_MODEL_LEN
    with pytest.raises(
        openai.BadRequestError, match=f"{MAX_MODEL_LEN + 1} .{MAX_MODEL_LEN - 1} of the prompt"
    ):
        complete(client, ids, max_tokens=2)


def test_what_is_refused(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        complete(client, model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="vocabulary") as caught:
        complete(client, [5, 100_000])
    assert "cmpl" not in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        complete(client, logit_bias={"100000": 1})
    with pytest.raises(openai.BadRequestError, match="prompt is empty"):
        complete(client, "", extra_body={"add_special_tokens": False})
    assert complete(client, seed=2**63 - 1, n=3, temperature=1).choices[2].text is not None


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]


def answer(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "demo", "temperature": 1.0, "seed": 1, "max_tokens": 400} | options
    return client.chat.completions.create(messages=QUESTION, **given)


def check_weather(arguments: str) -> None:
    values = json.loads(arguments)
    assert values.keys() == {"city", "days"}
    assert len(values["city"]) <= 5
    assert values["days"] in (1, 2, 3)


def test_answers_follow_a_schema(client: openai.OpenAI):
    schema = WEATHER["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    choices = answer(client, response_format=form, n=2).choices
    assert [choice.finish_reason for choice in choices] == ["stop"] * 2
    for choice in choices:
        check_weather(choice.message.content)
    form["json_schema"]["schema"] = {"type": "nothing"}
    with pytest.raises(openai.BadRequestError, match="Invalid type: nothing"):
        answer(client, response_format=form)
    extra = {"structured_outputs": {"choice": ["rain", "sun"]}}
    assert complete(client, extra_body=extra).choices[0].text in ("rain", "sun")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_are_called(client: openai.OpenAI, choice: Any):
    options = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    whole = answer(client, **options).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "weather"
    check_weather(call.function.arguments)
    assert whole.finish_reason == "tool_calls"
    chunks = [chunk.choices[0] for chunk in answer(client, stream=True, **options)]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert (pieces[0].function.name, {piece.index for piece in pieces}) == ("weather", {0})
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert len(pieces) > 4
    assert chunks[-1].finish_reason == "tool_calls"
    history: Any = [*QUESTION, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(messages=history, **GREEDY).choices[0].message.content


def test_keys(single: Server):
    wrong = openai.OpenAI(base_url=f"{single.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    assert single.client.models.list().data[0].model_dump()["max_model_len"] == MAX_MODEL_LEN
    assert httpx.get(f"{single.url}/health").status_code == 200


def request_bytes(url: httpx.URL, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [20, MAX_MODEL_LEN - 100])
def test_a_client_that_leaves(server: Server, client: openai.OpenAI, length: int, stream: bool):
    """Its requests end long before they would have by themselves, also in the middle of a prefill."""
    url = httpx.URL(server.url)
    max_tokens = MAX_MODEL_LEN - length
    rng = random.Random(2 * length + stream)  # nothing of it is in the prefix cache
    wait_for(lambda: server.metric("num_requests_running") == 0)
    before = server.metric("pcp_rank_tokens_total")
    connections = [socket.create_connection((url.host, url.port or 80)) for _ in range(3)]
    for connection in connections:
        prompt = [rng.randrange(5, 300) for _ in range(length)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
        connection.sendall(request_bytes(url, body))
    wait_for(lambda: server.metric("num_requests_running") > 0)
    for connection in connections:
        connection.close()
    wait_for(server.is_idle)
    assert server.metric("pcp_rank_tokens_total") - before < 3 * MAX_MODEL_LEN - 150
    # Whoever comes next has the engine for itself.
    full = complete(client, [7] * (MAX_MODEL_LEN - 1), max_tokens=1)
    assert full.choices[0].finish_reason == "length"


def test_a_stopped_rank_is_not_healthy(server: Server, client: openai.OpenAI):
    """In the middle of a step, long before it counts as dead. When it goes on, so do requests."""
    rank = server.ranks()[1]
    stream = complete(client, max_tokens=300, stream=True, extra_body={"ignore_eos": True})
    parts = [next(stream)]
    rank.suspend()
    try:
        wait_for(lambda: rank.status() == psutil.STATUS_STOPPED)  # the last of its threads, too
        health = httpx.get(f"{server.url}/health", timeout=10)
    finally:
        rank.resume()
    assert (health.status_code, f"(process {rank.pid}) does not answer" in health.text) == (503, True)
    assert httpx.get(f"{server.url}/health").status_code == 200
    parts += stream
    assert parts[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bench_serve(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str):
    """Random prompts with the length that was asked for, and conversations as long as in their file."""
    file, talks = tmp_path / "result.json", tmp_path / "talks.json"
    answers = [TEXT[: 5 + i] for i in range(6)]
    talks.write_text(json.dumps([{"conversations": [{"value": TEXT}, {"value": a}]} for a in answers]))
    options = ["--endpoint", endpoint, "--ignore-eos", "--num-prompts", "6", "--request-rate", "500"]
    options += ["--save-result", str(file), "--save-detailed", "--goodput", "ttft:60000", "e2el:60000"]

    def report(*more: str) -> Any:
        assert main(["bench", "serve", server.url, *options, *more]) == 0
        return json.loads(file.read_text())

    random_ones = report("--random-input-len", "40", "--random-output-len", "10", "--max-concurrency", "3")
    assert random_ones["output_lens"] == [10] * 6
    assert random_ones["completed"] == 6
    if endpoint == "completions":
        assert random_ones["input_lens"] == [40] * 6
    assert 0 < random_ones["mean_ttft_ms"] < random_ones["mean_e2el_ms"]
    assert random_ones["request_goodput"] == random_ones["request_throughput"]
    assert random_ones["max_concurrent_requests"] <= 3
    assert "Successful requests:                     6\n" in capsys.readouterr().out

    def num_tokens(text: str) -> int:
        body = {"prompt": text, "add_special_tokens": False}
        return httpx.post(f"{server.url}/tokenize", json=body).json()["count"]

    talked = report("--dataset-path", str(talks))
    assert sorted(talked["output_lens"]) == sorted(map(num_tokens, answers))


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^(curl .*)$", text, re.MULTILINE)


def test_the_readme_has_examples():
    assert len(readme_commands()) >= 6


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", readme_commands())
def test_curl_examples_of_the_readme(server: Server, command: str):
    command = command.replace("http://127.0.0.1:8000", server.url).replace(
        "curl ", "curl -sS --fail-with-body ", 1
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)


def test_sigterm_lets_running_requests_finish(single: Server):
    """The last test of this server."""
    results: list[Any] = []

    def ask() -> None:
        options: Any = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        results.append(complete(single.client, **options))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    single.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    with suppress(httpx.ConnectError):  # if it had been quicker
        assert httpx.get(f"{single.url}/ready").status_code == 503
    asking.join(60)
    assert results[0].usage.completion_tokens == 400
    assert single.process.wait(20) == 0


def test_wrong_options_end_before_the_model_loads(folder: Path, tmp_path: Path):
    def run(*options: str, model: Path = folder) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "prefold", "serve", str(model), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--port", str(taken.getsockname()[1]))
    assert (done.returncode, "Address already in use" in done.stderr) == (2, True)
    done = run("--port", "0", "--max-model-len", "100000000")
    assert (done.returncode, "max_model_len=100000000" in done.stderr) == (2, True)
    done = run(model=tmp_path / "nowhere")
    assert (done.returncode, "nowhere" in done.stderr) == (2, True)
    assert all("Traceback" not in text for text in (done.stdout, done.stderr))
