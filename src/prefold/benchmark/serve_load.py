"""Puts load on a server: sends requests at their times and collects how they went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from prefold.benchmark.serve_client import RequestResult, Target, error_message
from prefold.benchmark.serve_prompts import Prompt


@dataclass(frozen=True)
class Load:
    """How all requests went.

    Attributes:
        results: in the order of the prompts.
        duration_s: from the first request's time to the last one's end.
        peak_concurrency: requests that were under way at the same time, at most.
    """

    results: list[RequestResult]
    duration_s: float
    peak_concurrency: int


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    times: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[RequestResult], None] = lambda result: None,
) -> Load:
    """Send every prompt at its time (seconds after the start), or later if that many are under way.

    Time that a request waits for its turn is no part of its latency.

    Raises:
        ValueError: max_concurrency is below 1.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError(f"--max-concurrency {max_concurrency} is below 1")
    places = asyncio.Semaphore(max_concurrency or len(prompts))
    running = peak = 0

    async def one(prompt: Prompt, at: float) -> RequestResult:
        nonlocal running, peak
        await asyncio.sleep(start + at - target.clock())
        async with places:
            running += 1
            peak = max(peak, running)
            result = await target.send(prompt)
            running -= 1
        on_done(result)
        return result

    start = target.clock()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt, at)) for prompt, at in zip(prompts, times, strict=True)]
    return Load([task.result() for task in tasks], target.clock() - start, peak)


def make_client(url: str, api_key: str | None, timeout_s: float | None) -> httpx.AsyncClient:
    """A client with as many connections as there are requests.

    Args:
        url: address of the server, with or without /v1.
        timeout_s: how long a server may be silent; None is as long as it likes.

    Raises:
        ValueError: `url` is no address.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is no address of a server, such as http://localhost:8000")
    return httpx.AsyncClient(
        base_url=base,
        headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
        timeout=httpx.Timeout(timeout_s, connect=30.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # a proxy would be measured too
    )


async def ask(client: httpx.AsyncClient, method: str, path: str, **options: Any) -> Any:
    """The JSON of one answer. ValueError if the server refuses, OSError if nobody answers."""
    try:
        response = await client.request(method, path, **options)
    except httpx.HTTPError as error:
        raise OSError(f"{client.base_url} does not answer: {error or type(error).__name__}") from None
    if response.status_code != 200:
        message = error_message(response.content)
        raise ValueError(f"{method} {path}: status {response.status_code}: {message}")
    try:
        return response.json()
    except ValueError:
        raise ValueError(f"{method} {path}: the answer is no JSON") from None


async def first_model(client: httpx.AsyncClient) -> str:
    """The first name of /v1/models."""
    answer = await ask(client, "GET", "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ValueError("GET /v1/models names no model: give one by --model") from None


async def count_tokens(client: httpx.AsyncClient, model: str, text: str) -> int:
    """Tokens of a text, by the server's /tokenize."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        return int((await ask(client, "POST", "/tokenize", json=body))["count"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--sharegpt-output-len is needed: the server counts no tokens: {error}") from None
