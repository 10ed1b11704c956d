"""A side that runs one engine: prompts in, times and counts out."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import psutil

from prefold.benchmark.side import Handler, serve
from prefold.engine.engine import EngineMetrics
from prefold.engine.llm import LLM
from prefold.request import SamplingParams


def start(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """Load the engine: `setup` holds `model` and the engine's options."""
    llm = LLM(skip_tokenizer_init=True, **setup)
    config = llm.engine.config

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        return _measure(llm, request["token_ids"], request["output_len"])

    return measure, {
        "world_size": config.parallel.world_size,
        "threads_per_rank": config.runtime.threads_per_rank,
        "dtype": config.model.dtype,
        "compute_dtype": config.runtime.compute_dtype,
    }


def _measure(llm: LLM, token_ids: list[int], output_len: int) -> dict[str, Any]:
    """One prompt, `output_len` greedy tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    metrics = llm.engine.metrics = EngineMetrics()
    (output,) = llm.generate([token_ids], params)
    return {
        "ttft_s": output.metrics.ttft_s,
        "tpot_s": output.metrics.tpot_s,
        "token_ids": output.outputs[0].token_ids,
        "rank_tokens": metrics.rank_tokens,
        "rank_causal_pairs": metrics.rank_causal_pairs,
        "bytes_sent": metrics.bytes_sent,
        "peak_memory_bytes": _peak_memory(),
    }


def _peak_memory() -> int:
    """Largest resident memory that any rank has had. Ranks are this process or its children."""
    own = psutil.Process()
    return max(_high_water_mark(process.pid) for process in (own, *own.children()))


def _high_water_mark(pid: int) -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


if __name__ == "__main__":
    sys.exit(serve(start))
