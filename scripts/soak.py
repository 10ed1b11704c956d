"""Mixed load with cancellations on a server of two PCP ranks: `scripts/soak.py --minutes 30`.

Every greedy answer must equal the first one to the same prompt; other answers must be complete or a clean
refusal (429, 503). From time to time the load pauses: then all blocks must be free, and memory (RSS) and file
descriptors of all processes are noted. Prints a summary; exit code 1 for a wrong answer or a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.live_server import Server, is_alive, serving

MAX_MODEL_LEN = 600
OPTIONS = [
    *("--served-model-name", "soak", "--threads-per-rank", "1", "--block-size", "4", "--num-blocks", "400"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "96", "--max-waiting", "16"),
]
MIN_GAP = 1e-3
"""Prompts whose two likeliest tokens are closer anywhere are left out: rounding may decide between them."""
CANCELLED = 0.25
REFUSALS = (429, 503)
IDLE_S = 60.0


@dataclass(frozen=True)
class Sample:
    """All processes of the server while nothing runs. `rss` is in bytes."""

    time_s: float
    rss: int
    descriptors: int
    processes: int


@dataclass
class Soak:
    """What has been seen so far."""

    server: Server
    rng: random.Random
    client: httpx.AsyncClient
    answers: dict[tuple[int, ...], tuple[int, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    async def learn(self, num: int) -> None:
        """The first answer to each of `num` prompts, asked one at a time."""
        while len(self.answers) < num:
            length, max_tokens = self.rng.randrange(1, 450), self.rng.randrange(1, 60)
            prompt = tuple(self.rng.randrange(5, 300) for _ in range(length))
            body = greedy(prompt, max_tokens) | {"logprobs": 2}
            choice = (await self.post(body)).json()["choices"][0]
            tops = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
            # Tokens of equal text share an entry.
            if all(top[-1] - top[0] > MIN_GAP for top in tops if len(top) == 2):
                self.answers[prompt] = (max_tokens, choice["text"])

    async def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return await self.client.post(path, json=body)

    async def one(self) -> None:
        """A request of a random kind."""
        kind = self.rng.choice(["whole", "whole", "stream", "stream", "sampled", "chat", "metrics"])
        prompt = self.rng.choice(list(self.answers))
        max_tokens, expected = self.answers[prompt]
        body, path = greedy(prompt, max_tokens), "/v1/completions"
        if kind == "metrics":
            await self.client.get("/metrics")
            return
        if kind == "sampled":
            body |= {"temperature": 1.0, "n": 2, "top_p": 0.9, "logprobs": 3}
        if kind == "chat":
            path = "/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": "What is a rank?"}], "max_tokens": max_tokens}
        if kind == "stream":
            body["stream"] = True
        cancel = self.rng.random() < CANCELLED
        try:
            async with asyncio.timeout(self.rng.uniform(0, 1) if cancel else None):
                response = await self.post(body, path)
        except TimeoutError:
            self.counts["cancelled"] += 1
            return
        self.check(kind, response, expected if kind in ("whole", "stream") else None)

    def check(self, kind: str, response: httpx.Response, expected: str | None) -> None:
        """Note how a request went; `expected` is its text, if that is known."""
        if response.status_code in REFUSALS:
            assert response.json()["error"]["message"]
            self.counts[f"status {response.status_code}"] += 1
            return
        if response.status_code != 200:
            self.errors.append(f"{kind}: status {response.status_code}: {response.text[:300]}")
            return
        self.counts[kind] += 1
        text = streamed_text(response.content) if kind == "stream" else None
        if kind == "whole":
            text = response.json()["choices"][0]["text"]
        if expected is not None and text != expected:
            self.errors.append(f"{kind}: {text!r} instead of {expected!r}")

    async def load(self, clients: int, seconds: float) -> None:
        """`clients` requests at a time, until the time is up and the last has ended."""
        until = time.monotonic() + seconds

        async def loop() -> None:
            while time.monotonic() < until:
                try:
                    await self.one()
                except Exception as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(1)

        await asyncio.gather(*(loop() for _ in range(clients)))

    def pause(self, start: float) -> None:
        """Everything has ended: nothing may be in use."""
        deadline = time.monotonic() + IDLE_S
        while not self.server.is_idle():
            if time.monotonic() > deadline:
                used = self.server.metric("kv_cache_usage_ratio")
                running = self.server.metric("num_requests_running")
                self.errors.append(
                    f"not idle after {IDLE_S:.0f} s: {used:.1%} blocks, {running:.0f} requests"
                )
                break
            time.sleep(0.1)
        processes = self.server.processes()
        by_process = [process.memory_info().rss for process in processes]
        descriptors = sum(process.num_fds() for process in processes)
        self.samples.append(Sample(time.monotonic() - start, sum(by_process), descriptors, len(processes)))
        last = self.samples[-1]
        memory = " + ".join(f"{rss / 1e6:.0f}" for rss in by_process)
        print(
            f"{last.time_s:7.0f} s  {memory} MB  {descriptors} descriptors  "
            f"{sum(self.counts.values())} requests  {len(self.errors)} errors",
            flush=True,
        )


def greedy(prompt: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def streamed_text(content: bytes) -> str:
    """The text of a stream; it must end as streams do."""
    events = [
        event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event.startswith(b"data: ")
    ]
    assert events[-1] == b"[DONE]", content[-200:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def leaks(samples: list[Sample], max_growth_mb: float) -> list[str]:
    """What grew between the second and the last quarter of the samples; the first one warms up."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    found = []
    growth = statistics.median(s.rss for s in late) - statistics.median(s.rss for s in early)
    if growth > max_growth_mb * 1e6:
        found.append(f"memory grew by {growth / 1e6:.1f} MB")
    for name in ("descriptors", "processes"):
        before, after = max(getattr(s, name) for s in early), min(getattr(s, name) for s in late)
        if after > before + (8 if name == "descriptors" else 0):
            found.append(f"{name} grew from {before} to {after}")
    return found


async def soak(server: Server, minutes: float, clients: int, seed: int) -> Soak:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120) as client:
        state = Soak(server, random.Random(seed), client)
        await state.learn(30)
        start = time.monotonic()
        period = min(60.0, minutes * 60 / 8)
        while time.monotonic() - start < minutes * 60:
            await state.load(clients, period)
            state.pause(start)
    return state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth-mb", type=float, default=32.0, help="of all processes together")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint("DeepseekV3ForCausalLM", Path(folder) / "soak", num_hidden_layers=2)
        with serving(model, *OPTIONS, "-pcp", "2") as server:
            state = asyncio.run(soak(server, args.minutes, args.clients, args.seed))
            processes: list[psutil.Process] = server.processes()
            server.process.terminate()
            code = server.process.wait(60)
    problems = [*state.errors, *leaks(state.samples, args.max_growth_mb)]
    if code != 0:
        problems.append(f"the server's exit code is {code}")
    if left := [process.pid for process in processes if is_alive(process)]:
        problems.append(f"processes {left} are left")
    for kind, count in sorted(state.counts.items()):
        print(f"{kind:>12}: {count}")
    print(f"{len(problems)} problems" if problems else "no problems")
    for problem in problems[:20]:
        print(f"  {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
