"""First tokens with sparse attention on 2 ranks of one thread, TP 2 and PCP 2: time by FLOPs.

CPU time is that of each rank's process: the busiest one's is what the time to first token would be on an idle
machine. FLOPs are those of the rank that has the most; TP repeats the indexer. `ratio` is TP 2 over PCP 2,
beside what FLOPs predict.

python benchmarks/sparse_prefill.py MODEL [8192 16384 32768]

MODEL: a folder with a sparse model (prefold.testing.checkpoints.make_dsa_benchmark_checkpoint makes one).
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from prefold import LLM, SamplingParams
from prefold.config import ModelConfig
from prefold.distributed.pcp_layout import partition
from prefold.flops import prefill_flops
from prefold.hf_config import load_model_config

RANKS = 2
LAYOUTS = {"TP": "tensor_parallel_size", "PCP": "prefill_context_parallel_size"}


def tp_flops(model: ModelConfig, num_tokens: int) -> int:
    """Of a rank, which computes all tokens of a model with fewer heads and narrower MLPs."""
    assert model.moe is not None
    moe = replace(model.moe, intermediate_size=model.moe.intermediate_size // RANKS)
    width = model.intermediate_size // RANKS
    part = replace(model, num_heads=model.num_heads // RANKS, intermediate_size=width, moe=moe)
    return prefill_flops(part, num_tokens).total


def pcp_flops(model: ModelConfig, num_tokens: int, step_tokens: int) -> int:
    """Of the rank that computes the most, step by step."""
    of_ranks = np.zeros(RANKS)
    for start in range(0, num_tokens, step_tokens):
        count = min(step_tokens, num_tokens - start)
        parts = partition(np.array([start]), np.array([count]), np.array([True]), RANKS)
        for rank, first, end in zip(parts.row_rank, parts.row_start, parts.row_end):
            of_ranks[rank] += prefill_flops(model, int(end - first), int(first)).total
    return int(of_ranks.max())


def cpu_seconds() -> dict[int, float]:
    """By process, of all that come from this one."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        parents[pid], seconds[pid] = (
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        )
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return {pid: seconds[pid] for pid in family - {os.getpid()}}


def measure(folder: str, layout: str, num_tokens: int) -> tuple[float, list[float], int]:
    """(time to first token, CPU seconds of each rank, tokens of a step)."""
    options = {LAYOUTS[layout]: RANKS, "threads_per_rank": 1, "max_model_len": num_tokens + 8}
    with LLM(folder, skip_tokenizer_init=True, enable_prefix_caching=False, **options) as llm:
        prompt = random.Random(0).choices(range(10, 1000), k=num_tokens)
        before, start = cpu_seconds(), time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        seconds = time.perf_counter() - start
        used = sorted(after - before.get(pid, 0.0) for pid, after in cpu_seconds().items())
        parallel = llm.engine.config.parallel.prefill_context_parallel_size
        return seconds, used[-RANKS:], llm.engine.config.scheduler.max_num_batched_tokens * parallel


def main(folder: str, *lengths: str) -> None:
    model = load_model_config(folder)
    print(
        f"{'tokens':>6} {'layout':>6} {'TTFT s':>7} {'CPU s':>13} {'TFLOP':>6} {'s/TFLOP':>7} ratio (FLOPs)"
    )
    for num_tokens in map(int, lengths or ("8192", "16384", "32768")):
        busiest, flops = {}, {}
        for layout in LAYOUTS:
            seconds, used, step_tokens = measure(folder, layout, num_tokens)
            count = (
                tp_flops(model, num_tokens) if layout == "TP" else pcp_flops(model, num_tokens, step_tokens)
            )
            busiest[layout], flops[layout] = used[-1], count / 1e12
            each = " ".join(f"{one:6.1f}" for one in used)
            print(f"{num_tokens:6} {layout:>4} {RANKS} {seconds:7.1f} {each} {flops[layout]:6.2f}", end=" ")
            print(f"{used[-1] / flops[layout]:7.2f}", end="" if layout == "PCP" else "\n")
        print(f" {busiest['TP'] / busiest['PCP']:5.2f} ({flops['TP'] / flops['PCP']:.2f})", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
