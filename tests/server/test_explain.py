"""`/v1/explain` and `prefold explain`: the reasons, with their numbers."""

from __future__ import annotations

import http.server
import json
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import FastAPI

from prefold.cli.main import main
from prefold.config import (
    CacheConfig,
    EngineConfig,
    MLAConfig,
    MoEConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from prefold.engine.async_engine import EngineStatus
from prefold.metrics import EngineSnapshot, RequestState, StepRecord, Totals
from prefold.server.explain import explain, explain_router
from prefold.testing.model_config import mla_model_config

MODEL = mla_model_config(
    path="/models/m",
    num_layers=6,
    num_heads=8,
    hidden_size=64,
    mla=MLAConfig(None, 32, 16, 8, 16),
    softmax_scale=0.2,
    moe=MoEConfig(16, 2, 32, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.0),
    dtype="bfloat16",
    max_position_embeddings=4096,
)


def config(num_blocks: int = 100, max_num_seqs: int = 4, **sizes: Any) -> EngineConfig:
    return EngineConfig(
        MODEL,
        ParallelConfig(**sizes),
        CacheConfig(16, num_blocks, True),
        SchedulerConfig(max_num_seqs, 256, 1000),
        RuntimeConfig(min_split_tokens=32),
    )


def state(
    name: str, kind: str = "waiting", computed: int = 0, blocks: int = 50, why: str = ""
) -> RequestState:
    return RequestState(name, 0, kind, 800, 800, computed, 0, blocks, 2.5, why)


def sentences(answer: Any, name: str) -> str:
    return " ".join(next(section for section in answer.sections if section.name == name).sentences)


def test_why_requests_wait():
    four = config(prefill_context_parallel_size=2)
    running = [state("r", "running", computed=512)]

    def why(reason: str, behind: int = 0, kind: str = "waiting") -> str:
        waiting = [state("w", kind, why=reason), *(state(f"b{i}", why="behind w") for i in range(behind))]
        shot = EngineSnapshot(
            num_running=1,
            num_waiting=len(waiting),
            blocks_total=100,
            blocks_used=60,
            requests=[*running, *waiting],
        )
        step = StepRecord(3, 0, 0.0, 0.5, 500, 1, 2, [], [251, 250], [9, 9])
        return sentences(explain(four, shot, [step]), "waiting")

    blocks = why("blocks", behind=2)
    assert blocks.startswith(
        "3 requests wait. The first, w (800 prompt tokens, here for 2.5 s), waits for blocks"
    )
    assert "it needs 50, and 40 of 100 are free" in blocks
    assert "2 requests are behind" in blocks
    assert "4 requests run, as many as --max-num-seqs allows" in why("max_num_seqs")
    budget = why("budget")
    assert "512 tokens (256 per rank x PCP 2), and those that run took 501 of them" in budget
    assert "waits again, because blocks had run out, for blocks" in why("blocks", kind="preempted")


def test_what_runs_and_how_much_fits():
    shot = EngineSnapshot(
        num_running=2,
        blocks_total=100,
        blocks_used=25,
        blocks_cached=30,
        totals=Totals(prefix_query_tokens=1000, prefix_hit_tokens=250),
        requests=[state("p", "running", computed=600), state("d", "running", computed=800)],
    )
    answer = explain(config(decode_context_parallel_size=2, prefill_context_parallel_size=2), shot)
    cache = sentences(answer, "kv_cache")
    assert "A block holds 16 tokens on each of 2 DCP ranks: 32 tokens." in cache
    assert "100 blocks = 3,200 tokens. 25 are held by requests (25.0%), 75 are free; a later" in cache
    assert "could reuse the content of 30." in cache
    assert "1,000 tokens (max_model_len), which takes 32 blocks: 3 such requests" in cache
    assert "250 of 1,000 prompt tokens were found (25.0%)" in cache
    running = sentences(answer, "running")
    assert running == (
        "2 requests run. 1 generates, over 800 tokens of context. p is in prefill: 600 of 800 tokens (75%)."
    )
    assert sentences(answer, "waiting") == "Nothing waits."
    assert "The longest prompt takes 2 steps." in sentences(answer, "step")


@pytest.mark.parametrize(
    ("sizes", "said", "unsaid"),
    [
        ({}, ["1 rank = DP 1 x PP 1 x PCP 1 x TP 1", "DP, PP, PCP, TP are not used"], ["DCP", "EP:"]),
        ({"prefill_context_parallel_size": 4}, ["PCP 4: ", "in 8 chunks", "DCP 1: each of the 4"], ["TP 1:"]),
        ({"tensor_parallel_size": 2}, ["TP 2: each rank has 4 of 8 attention heads"], ["PCP 1:", "DCP"]),
        ({"pipeline_parallel_size": 2}, ["PP 2: stages compute layers 0-2, 3-5"], []),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, ["DP 2: ", "16 experts", "2 ranks"], []),
        ({"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}, ["DCP 2: "], ["DCP 1:"]),
    ],
)  # fmt: skip
def test_every_axis_is_explained(sizes: dict, said: list[str], unsaid: list[str]):
    layout = sentences(explain(config(**sizes), EngineSnapshot()), "layout")
    assert all(words in layout for words in said), layout
    assert not any(words in layout for words in unsaid), layout


def test_more_replicas_have_more_blocks():
    answer = explain(config(data_parallel_size=2), EngineSnapshot(blocks_total=200, blocks_used=50))
    assert "200 blocks = 3,200 tokens in all of 2 replicas. 50 are held" in sentences(answer, "kv_cache")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("accept", "text"),
    [
        (None, False),
        ("*/*", False),
        ("text/plain", True),
        ("text/plain;q=0.5, application/json", True),
        ("application/json, text/plain", False),
        ("text/html", False),
    ],
)
async def test_json_or_text(accept: str | None, text: bool):
    engine: Any = SimpleNamespace(
        config=config(),
        snapshot=EngineSnapshot(),
        recent_steps=deque(),
        status=EngineStatus.DEAD,
        failure="rank 1 died",
    )
    app = FastAPI()
    app.include_router(explain_router(lambda: engine))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
    response = await client.get("/v1/explain", headers={} if accept is None else {"accept": accept})
    assert response.status_code == 200
    if text:
        assert response.headers["content-type"].startswith("text/plain")
        assert response.text.startswith("Engine: dead (rank 1 died)\n\nLayout\n  1 rank = ")
    else:
        answer = response.json()
        assert (answer["status"], answer["failure"]) == ("dead", "rank 1 died")
        facts = {section["name"]: section["facts"] for section in answer["sections"]}
        assert facts["kv_cache"]["capacity_tokens"] == 1600
        assert facts["step"]["tokens_per_step"] == 256


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        good = self.path == "/v1/explain" and self.headers.get("authorization") == "Bearer s3cret"
        body = {
            "status": "ready",
            "failure": None,
            "sections": [{"title": "Layout", "sentences": ["One [rank]."]}],
        }
        error = {"error": {"message": "no API key was given"}}
        self.send_response(200 if good else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body if good else error).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_command_prints_it(url: str, suffix: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", url + suffix, "--api-key", "s3cret"]) == 0
    assert capsys.readouterr().out == "The engine is ready.\n\nLayout\n  One [rank].\n"
    assert main(["explain", url.removeprefix("http://"), "--api-key", "s3cret", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sections"][0]["title"] == "Layout"


def test_the_command_says_what_is_wrong(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", url]) == 2
    assert capsys.readouterr().err == f"error: {url}/v1/explain: status 401: no API key was given\n"
    assert main(["explain", "http://127.0.0.1:1"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["explain", "ftp://server"]) == 2
    assert "no address of a server" in capsys.readouterr().err
