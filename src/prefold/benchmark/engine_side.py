"""A side that runs one engine: prompts in, times and counts out."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from prefold.benchmark.side import Handler, serve
from prefold.benchmark.stopwatch import Stopwatch
from prefold.engine.core import EngineMetrics
from prefold.engine.llm import LLM
from prefold.request import RequestOutput, SamplingParams


def start(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """Load the engine: `setup` holds `model` and the engine's options.

    The handler takes `{"prefix": token ids, "batch_size": N}`, to be in the prefix cache from then on, or
    `{"prompts": lists of token ids, "prefix_len": N, "output_len": N}`.
    """
    llm = LLM(skip_tokenizer_init=True, **setup)
    config = llm.engine.config

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if "prefix" in request:
            llm.generate([request["prefix"]], SamplingParams(temperature=0.0, max_tokens=1))
            return {}
        return _measure(llm, request["prompts"], request["prefix_len"], request["output_len"])

    return handle, {
        "world_size": config.parallel.world_size,
        "threads_per_rank": config.runtime.threads_per_rank,
        "dtype": config.model.dtype,
        "compute_dtype": config.runtime.compute_dtype,
    }


def _measure(llm: LLM, prompts: list[list[int]], prefix_len: int, output_len: int) -> dict[str, Any]:
    """All prompts at once, `output_len` greedy tokens each.

    Of several, those that are prefilled first decode on until the last one has its tokens, too: only so
    is there a time in which all of them decode.
    """
    engine = llm.engine
    metrics = engine.core.metrics = EngineMetrics()
    room = engine.config.scheduler.max_model_len - len(prompts[0])
    params = SamplingParams(
        temperature=0.0, max_tokens=output_len if len(prompts) == 1 else room, ignore_eos=True
    )
    latest: dict[str, RequestOutput] = {}
    watch = Stopwatch(len(prompts), output_len)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while not watch.is_over:
        outputs = engine.step()
        latest |= {output.request_id: output for output in outputs}
        counts = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        watch.note(time.monotonic(), counts, any_finished=any(output.finished for output in outputs))
    for i in range(len(prompts)):
        engine.abort_request(str(i))
    while engine.has_unfinished_requests:
        engine.step()
    results = [latest[str(i)] for i in range(len(prompts))]
    _check_cache(llm, results, prefix_len)
    memory = _rank_memory(llm)
    return {
        **watch.times(),
        "token_ids": [output.outputs[0].token_ids[:output_len] for output in results],
        "num_cached_tokens": min(output.metrics.num_cached_tokens for output in results),
        "rank_tokens": metrics.rank_tokens,
        "rank_causal_pairs": metrics.rank_causal_pairs,
        "bytes_sent": metrics.bytes_sent,
        "peak_memory_bytes": max(memory),
        "rank_memory_bytes": memory,
    }


def _check_cache(llm: LLM, results: Sequence[RequestOutput], prefix_len: int) -> None:
    """ValueError if the KV cache is too small for what is to be measured."""
    config = llm.engine.config
    held = config.cache.num_blocks * config.virtual_block_size
    preempted = sum(output.metrics.num_preemptions for output in results)
    if preempted:
        raise ValueError(
            f"requests were preempted {preempted} times: the KV cache of {held} tokens does not hold the "
            f"batch; raise kv_cache_memory_bytes"
        )
    cached = min(output.metrics.num_cached_tokens for output in results)
    expected = prefix_len // config.virtual_block_size * config.virtual_block_size
    # Only one of several replicas has the prefix.
    if cached < expected and config.parallel.data_parallel_size == 1:
        raise ValueError(
            f"only {cached} tokens of the prefix of {prefix_len} were still cached: the KV cache of {held} "
            f"tokens is too small; raise kv_cache_memory_bytes"
        )


def _rank_memory(llm: LLM) -> list[int]:
    """Largest resident memory that each rank of this machine has had, in bytes, by rank."""
    own = psutil.Process()
    here = {process.pid for process in own.children(recursive=True)}
    # A single rank is this process.
    pids = [pid for pid in getattr(llm.engine.core.executor, "pids", ()) if pid in here]
    return [_high_water_mark(pid) for pid in pids or [own.pid]]


def _high_water_mark(pid: int) -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


if __name__ == "__main__":
    sys.exit(serve(start))
