"""`prefold bench serve`: its arithmetic on made-up requests, its client on streams of many forms."""

from __future__ import annotations

import json
import statistics
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from prefold.benchmark.serve_client import RequestResult, Target
from prefold.benchmark.serve_load import Load, first_model, make_client, run_load
from prefold.benchmark.serve_prompts import Prompt, first_turns, random_prompts, send_times
from prefold.benchmark.serve_report import parse_goodput, parse_percentiles, report_lines, summarize
from prefold.cli.main import main

pytestmark = pytest.mark.anyio


def result(ttft: float, gaps: list[float], prompt_tokens: int = 10) -> RequestResult:
    """A request whose tokens came one by one."""
    return RequestResult(
        prompt_tokens=prompt_tokens,
        output_tokens=1 + len(gaps),
        ttft_s=ttft,
        itl_s=gaps,
        e2el_s=ttft + sum(gaps),
    )


def failed(kind: str, message: str) -> RequestResult:
    return RequestResult(prompt_tokens=99, output_tokens=99, ttft_s=9, error=message, error_kind=kind)


RESULTS = [
    result(0.1, [0.01, 0.03, 0.02]),
    result(0.2, []),
    result(0.4, [0.05], prompt_tokens=30),
    failed("status 429", "full"),
    failed("ConnectError", "refused"),
    failed("status 429", "full again"),
]


def test_the_figures():
    report = summarize(Load(RESULTS, 2.0, 5), [50.0, 99.0], {})
    assert (report["completed"], report["failed"], report["max_concurrent_requests"]) == (3, 3, 5)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (50, 7)
    assert report["request_throughput"] == 1.5
    assert report["output_throughput"] == 3.5
    assert report["total_token_throughput"] == 28.5
    assert report["request_goodput"] is None
    samples = {
        "ttft": [100, 200, 400],
        "tpot": [20, 50],  # the request of one token has none
        "itl": [10, 30, 20, 50],
        "e2el": [160, 200, 450],
    }
    for name, values in samples.items():
        assert report[f"mean_{name}_ms"] == pytest.approx(statistics.fmean(values))
        assert report[f"median_{name}_ms"] == pytest.approx(statistics.median(values))
        assert report[f"p50_{name}_ms"] == pytest.approx(statistics.median(values))
        assert report[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99))
        assert report[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(values))
    assert report["errors"] == [
        {"kind": "status 429", "count": 2, "example": "full"},
        {"kind": "ConnectError", "count": 1, "example": "refused"},
    ]


@pytest.mark.parametrize(
    ("limits", "requests"),
    [
        (["ttft:200"], 2),
        (["ttft:199"], 1),
        (["tpot:20"], 2),
        (["tpot:19.9"], 1),
        (["e2el:450", "ttft:400"], 3),
        (["e2el:449", "ttft:100"], 1),
        (["ttft:1"], 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: list[str], requests: int):
    report = summarize(Load(RESULTS, 2.0, 5), [99.0], parse_goodput(limits))
    assert report["request_goodput"] == requests / 2.0


def test_the_report_has_vllms_names():
    report = summarize(Load(RESULTS, 2.0, 5), [50.0, 99.9], {"ttft": 200.0})
    text = "\n".join(report_lines(report | {"request_rate": "inf", "max_concurrency": None}, [50.0, 99.9]))
    for name, value in (
        ("Successful requests", "3"),
        ("Failed requests", "3"),
        ("Benchmark duration (s)", "2.00"),
        ("Total input tokens", "50"),
        ("Total generated tokens", "7"),
        ("Request throughput (req/s)", "1.50"),
        ("Request goodput (req/s)", "1.00"),
        ("Output token throughput (tok/s)", "3.50"),
        ("Total Token throughput (tok/s)", "28.50"),
        ("Mean TTFT (ms)", "233.33"),
        ("Median TPOT (ms)", "35.00"),
        ("P50 ITL (ms)", "25.00"),
        ("P99.9 E2EL (ms)", "449.50"),
    ):
        assert f"{name + ':':<40} {value}\n" in text


def test_nothing_succeeded():
    report = summarize(Load(RESULTS[3:], 2.0, 5), [99.0], {"ttft": 1.0})
    assert (report["completed"], report["mean_ttft_ms"], report["request_goodput"]) == (0, 0, 0)
    assert report_lines(report, [99.0])


@pytest.mark.parametrize(
    ("parse", "given"),
    [
        *[(parse_percentiles, text) for text in ("", "a", "50,", "101", "-1", "nan")],
        *[(parse_goodput, [text]) for text in ("ttft", "itl:5", "ttft:", "ttft:-1", "ttft:nan", "5")],
    ],
)
def test_options_that_are_refused(parse: Callable[[Any], Any], given: Any):
    with pytest.raises(ValueError, match=r"--(metric-percentiles|goodput)"):
        parse(given)


def test_send_times():
    assert send_times(4, float("inf"), 1.0, 0) == [0.0] * 4
    for burstiness in (0.3, 1.0, 4.0):
        times = send_times(4000, 5.0, burstiness, 3)
        gaps = np.diff(times)
        assert times[0] == 0
        assert gaps.min() >= 0
        assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.1)
        # A gamma distribution's deviation over its mean; 1 is Poisson's.
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
        assert times == send_times(4000, 5.0, burstiness, 3) != send_times(4000, 5.0, burstiness, 4)
    for rate, burstiness in ((0, 1), (-1, 1), (float("nan"), 1), (1, 0), (1, float("inf"))):
        with pytest.raises(ValueError, match="above 0"):
            send_times(4, rate, burstiness, 0)


def test_random_prompts():
    prompts = random_prompts(300, 20, 10, 0.5, 7, False, 1)
    assert {token for prompt in prompts for token in prompt.prompt} == set(range(7))
    assert {len(prompt.prompt) for prompt in prompts} == set(range(10, 31))
    assert {prompt.output_len for prompt in prompts} == set(range(5, 16))
    assert prompts == random_prompts(300, 20, 10, 0.5, 7, False, 1)
    (words,) = random_prompts(1, 20, 10, 0.0, 7, True, 1)
    assert isinstance(words.prompt, str)
    assert (len(words.prompt.split()), words.output_len) == (20, 10)
    for wrong in ((0, 1, 0, 7), (1, 0, 0, 7), (1, 1, 1, 7), (1, 1, -0.1, 7), (1, 1, 0, 0)):
        with pytest.raises(ValueError, match="--random-"):
            random_prompts(1, *wrong, False, 1)


def test_conversations(tmp_path: Path):
    file = tmp_path / "talks.json"
    talks = [[{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}] for i in range(20)]
    short: list[Any] = [[], talks[0][:1], [{"value": " "}, {"value": "a"}]]
    file.write_text(json.dumps([{"id": "x", "conversations": talk} for talk in talks + short]))
    turns = first_turns(file, 5, 0)
    assert len(set(turns)) == 5
    assert all(question[1:] == answer[1:] for question, answer in turns)
    assert sorted(first_turns(file, 100, 0)) == sorted((f"q{i}", f"a{i}") for i in range(20))
    assert turns != first_turns(file, 5, 1)
    for broken in ("{", "5", '["a"]', '[{"conversations": [{}, {}]}]', "[]", '[{"conversations": [1, 2]}]'):
        file.write_text(broken)
        with pytest.raises(ValueError, match=r"ShareGPT|no conversation"):
            first_turns(file, 5, 0)


class Script(httpx.AsyncBaseTransport):
    """A server that sends the given pieces; `clock` moves on by a second before each."""

    def __init__(self, pieces: list[str | bytes], status: int = 200) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.status, self.now = status, 0.0
        self.bodies: list[Any] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(await request.aread()))
        return httpx.Response(self.status, content=self._send())

    async def _send(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.now += 1.0
            yield piece

    async def send(self, endpoint: Any = "completions", **fields: Any) -> RequestResult:
        async with httpx.AsyncClient(transport=self, base_url="http://server") as client:
            target = Target(client, "m", endpoint, fields, clock=lambda: self.now)
            return await target.send(Prompt("abc", 3))


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def token(text: str) -> str:
    return event({"choices": [{"text": text}]})


def delta(**fields: Any) -> str:
    return event({"choices": [{"delta": fields}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}})
DONE = "data: [DONE]\n\n"


async def test_times_of_a_stream():
    script = Script([": waiting\n\n", token("a"), ": waiting\n\n", token(""), token("bc"), USAGE, DONE])
    got = await script.send(ignore_eos=True)
    assert (got.error, got.text) == (None, "abc")
    assert (got.ttft_s, got.itl_s, got.e2el_s) == (2.0, [2.0, 1.0], 5.0)
    assert (got.prompt_tokens, got.output_tokens, got.tpot_s) == (4, 5, 0.75)
    assert script.bodies == [
        {
            "model": "m",
            "prompt": "abc",
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


async def test_a_stream_without_usage_and_cut_anywhere():
    """Also inside a character, and with characters that some take for line ends."""
    whole = 'data: {"choices": [{"text": "é\u2028\x85"}]}\n\n'.encode() + (token("b") + DONE).encode()
    for i in range(1, len(whole)):
        got = await Script([whole[:i], whole[i:]]).send()
        assert (got.error, got.text, got.output_tokens) == (None, "é\u2028\x85b", 2)


async def test_a_chats_role_is_no_token():
    script = Script(
        [delta(role="assistant", content=""), delta(content="a"), delta(content="b"), USAGE, DONE]
    )
    got = await script.send("chat")
    assert (got.ttft_s, got.itl_s, got.text) == (2.0, [1.0], "ab")
    assert script.bodies[0]["messages"] == [{"role": "user", "content": "abc"}]


@pytest.mark.parametrize(
    ("pieces", "status", "kind", "message"),
    [
        (['{"error": {"message": "no place"}}'], 429, "status 429", "no place"),
        (["<html>"], 502, "status 502", "<html>"),
        ([token("a")], 200, "incomplete stream", "DONE"),
        ([USAGE, DONE], 200, "no tokens", "no token"),
        ([], 200, "incomplete stream", "DONE"),
        (["data: {\n\n"], 200, "no JSON in the stream", "{"),
        (["data: 5\n\n"], 200, "no JSON in the stream", "5"),
        (
            [token("a"), event({"error": {"message": "it died", "type": "gone"}}), DONE],
            200,
            "error in the stream: gone",
            "it died",
        ),
    ],
)
async def test_errors_by_kind(pieces: list[str], status: int, kind: str, message: str):
    got = await Script(pieces, status).send()
    assert got.error_kind == kind
    assert message in (got.error or "")


async def test_load_on_an_app(client: httpx.AsyncClient, engine: Any):
    """Everything is sent, at most so many at once; the model's name is the server's."""
    assert await first_model(client) == "fake"
    prompts = random_prompts(12, 8, 4, 0.5, 256, False, 0)
    done: list[RequestResult] = []
    target = Target(client, "fake")
    load = await run_load(target, prompts, send_times(12, 1000.0, 1.0, 0), 3, done.append)
    assert load.peak_concurrency <= 3
    assert [len(p.prompt) for p in prompts] == [r.prompt_tokens for r in load.results]
    assert [p.output_len for p in prompts] == [r.output_tokens for r in load.results]
    assert sorted(map(id, done)) == sorted(map(id, load.results))
    refused = await run_load(Target(client, "other"), prompts[:2], [0.0, 0.0], None)
    assert [r.error_kind for r in refused.results] == ["status 404"] * 2
    report = summarize(load, [99.0], {})
    assert report["total_output_tokens"] == sum(p.output_len for p in prompts)
    with pytest.raises(ValueError, match="--max-concurrency 0"):
        await run_load(target, prompts, [0.0] * 12, 0)


def test_wrong_addresses(capsys: pytest.CaptureFixture[str]):
    for url in ("ftp://x", "http://", "http://x:y"):
        with pytest.raises(ValueError, match="no address of a server"):
            make_client(url, None, None)
    assert main(["bench", "serve", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["bench", "serve", "http://127.0.0.1:9", "--model", "m", "--num-prompts", "2"]) == 1
    assert "2 x ConnectError" in capsys.readouterr().err
