"""Time to first token and per token of one prompt at a time, for several layouts by turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefold.benchmark.matmul import MatmulRates
from prefold.benchmark.side import Side
from prefold.config import ModelConfig
from prefold.flops import prefill_flops

Note = Callable[[str], None]


@dataclass(frozen=True)
class RowSpec:
    """One row of the comparison: what to start, and how the user called it."""

    layout: str
    module: str
    setup: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> Side:
        return Side(self.layout, self.module, self.setup, self.environment)


@dataclass(frozen=True)
class LatencyPlan:
    """What to measure. ValueError for a length or count below 1."""

    model: ModelConfig
    rows: Sequence[RowSpec]
    input_len: int
    output_len: int
    warmup: int
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    def prompt(self, repeat: int) -> list[int]:
        """Random token ids, equal for every row of a repeat and new in the next."""
        generator = np.random.default_rng([self.seed, repeat])
        return generator.integers(0, self.model.vocab_size, self.input_len).tolist()


@dataclass
class _Row:
    """A running side and what it measured."""

    spec: RowSpec
    side: Side
    about: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)


def measure_latency(plan: LatencyPlan, note: Note) -> dict[str, Any]:
    """Load all rows, warm up, then let them take turns; returns a report as JSON can hold it.

    Rows stay loaded and idle between their turns, and the order rotates from repeat to repeat, so that
    whatever else the machine does hits them alike. Matrix multiplication is measured in each repeat, too.

    Raises:
        ValueError: a row's options are not usable; names the row.
        SideError: a row failed.
    """
    with ExitStack() as stack:
        note("loading " + ", ".join(spec.layout for spec in plan.rows))
        rows = [
            _Row(
                spec,
                stack.enter_context(closing(Side(spec.layout, spec.module, spec.setup, spec.environment))),
            )
            for spec in plan.rows
        ]
        for row in rows:
            row.about = row.side.receive()
        shapes = {(row.about["world_size"], row.about["threads_per_rank"]) for row in rows}
        rates = stack.enter_context(closing(MatmulRates(shapes)))
        for i in range(plan.warmup + plan.repeats):
            _take_turns(plan, rows, rates, i, note)
        return _report(plan, rows, rates)


def _take_turns(plan: LatencyPlan, rows: list[_Row], rates: MatmulRates, turn: int, note: Note) -> None:
    """Let every row run once; what the first turns measure is thrown away."""
    warm, repeat = turn < plan.warmup, turn - plan.warmup
    what = f"warm-up {turn + 1} of {plan.warmup}" if warm else f"repeat {repeat + 1} of {plan.repeats}"
    note(f"{what}: matrix multiplication")
    rates.measure(keep=not warm)
    prompt = plan.prompt(turn)
    first = turn % len(rows)
    for row in rows[first:] + rows[:first]:
        note(f"{what}: {row.spec.layout}")
        run = row.side.ask({"token_ids": prompt, "output_len": plan.output_len})
        if not warm:
            row.runs.append(run)


def _report(plan: LatencyPlan, rows: list[_Row], rates: MatmulRates) -> dict[str, Any]:
    flops = prefill_flops(plan.model, plan.input_len)
    return {
        "model": plan.model.path,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "warmup": plan.warmup,
        "repeats": plan.repeats,
        "prefill_flops": {"matmul": flops.matmul, "attention": flops.attention, "total": flops.total},
        "matmul_rates": rates.report(),
        "rows": [_row_report(plan, row, rows[0], rates, flops.total) for row in rows],
    }


def _row_report(plan: LatencyPlan, row: _Row, first: _Row, rates: MatmulRates, flops: int) -> dict[str, Any]:
    ttft = spread([run["ttft_s"] for run in row.runs])
    tpot = spread([run["tpot_s"] for run in row.runs]) if plan.output_len > 1 else None
    about = row.about
    best = rates.median(about["world_size"], about["threads_per_rank"], about["compute_dtype"])
    last = row.runs[-1]
    return {
        "layout": row.spec.layout,
        **about,
        "ttft_s": ttft,
        "tpot_s": tpot,
        "prefill_tokens_per_s": plan.input_len / ttft["median"],
        "decode_tokens_per_s": 1 / tpot["median"] if tpot else None,
        "flops_per_s": flops / ttft["median"],
        "matmul_flops_per_s": best,
        "matmul_share": flops / ttft["median"] / best,
        "ttft_speedup": _speedup(first, row, "ttft_s"),
        "tpot_speedup": _speedup(first, row, "tpot_s") if tpot else None,
        "same_tokens": [run["token_ids"] for run in row.runs] == [run["token_ids"] for run in first.runs],
        "bytes_sent": last.get("bytes_sent"),
        "rank_tokens": last.get("rank_tokens"),
        "rank_causal_pairs": last.get("rank_causal_pairs"),
        "peak_memory_bytes": last.get("peak_memory_bytes"),
    }


def _speedup(first: _Row, row: _Row, key: str) -> float:
    """How many times faster than the first row: the median over the repeats, each compared with itself."""
    return statistics.median(a[key] / b[key] for a, b in zip(first.runs, row.runs, strict=True))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0, 'values': [3.0, 1.0, 2.0]}
    """
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }
