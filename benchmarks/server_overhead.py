"""What HTTP costs on top of the Python API: `python benchmarks/server_overhead.py`.

Server and Python API run by turns on the same checkpoint, one rank each: time to the first token of a prompt
of 2,048 tokens, given as text, and time per token of 16 requests at once. Run it on an idle machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from prefold import LLM, SamplingParams
from prefold.testing.checkpoints import make_benchmark_checkpoint, make_checkpoint

PROMPT_TOKENS = 2048
STREAMS = 16
STREAM_TOKENS = 128
REPEATS = 7
OPTIONS: dict[str, Any] = {
    "max_model_len": 4096,
    "num_blocks": 400,
    "enable_prefix_caching": False,
    "threads_per_rank": 1,  # leaves a core to HTTP where there are two
}


class Server:
    """`prefold serve` in a process of its own, asked over plain sockets."""

    def __init__(self, folder: Path) -> None:
        options = (
            "--port 0 --max-model-len 4096 --num-blocks 400 --no-enable-prefix-caching --threads-per-rank 1"
        )
        command = [sys.executable, "-m", "prefold", "serve", str(folder), *options.split()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Serving"):
                break
            self.port = int(line.split(",")[0].rpartition(":")[2])
        self._http = psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        """CPU time of the HTTP process by itself."""
        times = self._http.cpu_times()
        return times.user + times.system

    async def stream(self, prompt: str, max_tokens: int) -> list[float]:
        """When tokens came; several that came together count once."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        fields = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        arrivals: list[float] = []
        done = False
        async for line in reader:
            if line.startswith(b'data: {"id"'):
                arrivals.append(time.perf_counter())
            done |= line.startswith(b"data: [DONE]")
        writer.close()
        assert done
        return arrivals


def text_of(llm: LLM, num_tokens: int, seed: int) -> str:
    """Random letters that are exactly that many tokens."""
    rng = random.Random(seed)
    text = ""
    assert llm.tokenizer is not None
    while (missing := num_tokens - len(llm.tokenizer.encode(text))) > 0:
        text += "".join(rng.choice(string.ascii_uppercase) for _ in range(max(1, missing // 2)))
    return text


def api_ttft(llm: LLM, prompt: str) -> float:
    start = time.perf_counter()
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - start


def server_ttft(server: Server, prompt: str) -> float:
    start = time.perf_counter()
    return asyncio.run(server.stream(prompt, 1))[0] - start


def api_token_s(llm: LLM, prompts: list[str]) -> float:
    """Seconds per step of all requests at once, from the first token of the last to the end."""
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0.0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    for prompt in prompts:
        llm.engine.add_request(prompt, llm.tokenizer.encode(prompt), params, prompt=prompt)
    first: dict[str, float] = {}
    while llm.engine.has_unfinished_requests:
        for output in llm.engine.step():
            first.setdefault(output.request_id, time.perf_counter())
    return (time.perf_counter() - max(first.values())) / (STREAM_TOKENS - 1)


def server_token_s(server: Server, prompts: list[str]) -> float:
    async def all_streams() -> list[list[float]]:
        return await asyncio.gather(*(server.stream(prompt, STREAM_TOKENS) for prompt in prompts))

    arrivals = asyncio.run(all_streams())
    return (max(a[-1] for a in arrivals) - max(a[0] for a in arrivals)) / (STREAM_TOKENS - 1)


def measure(name: str, folder: Path) -> None:
    server = Server(folder)
    try:
        with LLM(str(folder), **OPTIONS) as llm:
            prompts = [text_of(llm, PROMPT_TOKENS, seed) for seed in range(REPEATS + 1)]
            short = [text_of(llm, 32, seed) for seed in range(STREAMS)]
            ttft = by_turns(
                lambda i: api_ttft(llm, prompts[i]), lambda i: server_ttft(server, prompts[i]), REPEATS + 1
            )
            before = server.cpu_s()
            token = by_turns(lambda _: api_token_s(llm, short), lambda _: server_token_s(server, short), 4)
            cpu_ms = (server.cpu_s() - before) / (4 * STREAMS * STREAM_TOKENS) * 1e3
    finally:
        server.process.terminate()
        server.process.wait()
    print(f"{name}")
    print(
        f"  first token at {PROMPT_TOKENS} tokens: {ttft[0] * 1e3:.1f} ms, by HTTP {ttft[1] * 1e3:.1f} ms: "
        f"{(ttft[1] - ttft[0]) * 1e3:+.1f} ms, {ttft[1] / ttft[0] - 1:+.1%}"
    )
    print(
        f"  {STREAMS} streams: {token[0] * 1e3:.2f} ms per token of each, by HTTP {token[1] * 1e3:.2f} ms: "
        f"{(token[1] - token[0]) * 1e3:+.2f} ms; CPU of the HTTP process {cpu_ms:.3f} ms per token"
    )


def by_turns(api: Callable[[int], float], http: Callable[[int], float], repeats: int) -> tuple[float, float]:
    """Medians without the first turn, which warms up."""
    turns = [(api(i), http(i)) for i in range(repeats)][1:]
    return statistics.median(t[0] for t in turns), statistics.median(t[1] for t in turns)


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        tiny = make_checkpoint("DeepseekV3ForCausalLM", Path(root) / "tiny", num_hidden_layers=2)
        measure("tiny model", tiny)
        two_layers = make_benchmark_checkpoint(Path(root) / "benchmark", num_hidden_layers=2)
        measure("2 layers of the benchmark model", two_layers)


if __name__ == "__main__":
    main()
