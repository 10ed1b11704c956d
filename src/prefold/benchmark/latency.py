"""Time to first token and per token of one prompt or a batch, for several layouts by turns."""

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
    """What to measure. ValueError for a length or count that is too small.

    Attributes:
        input_len: tokens of a prompt after the cached prefix.
        output_len: tokens to generate for each.
        cached_prefix_len: tokens that all prompts begin with, and that are in the prefix cache.
        batch_size: prompts at once.
    """

    model: ModelConfig
    rows: Sequence[RowSpec]
    input_len: int
    output_len: int
    warmup: int
    repeats: int
    seed: int
    cached_prefix_len: int = 0
    batch_size: int = 1

    def __post_init__(self) -> None:
        at_least_one = ("input_len", "output_len", "repeats", "batch_size")
        for name in (*at_least_one, "warmup", "cached_prefix_len"):
            least = 1 if name in at_least_one else 0
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    def prefix(self) -> list[int]:
        """Random token ids, the same throughout."""
        # A turn that never comes: not one token is drawn like a prompt's.
        generator = np.random.default_rng([self.seed, 1 << 31])
        return generator.integers(0, self.model.vocab_size, self.cached_prefix_len).tolist()

    def prompts(self, turn: int) -> list[list[int]]:
        """The prefix and random token ids, equal for every row of a turn and new in the next."""
        generator = np.random.default_rng([self.seed, turn])
        tails = generator.integers(0, self.model.vocab_size, (self.batch_size, self.input_len))
        return [self.prefix() + tail for tail in tails.tolist()]


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
        if plan.cached_prefix_len:
            for row in rows:
                note(f"prefix of {plan.cached_prefix_len} tokens: {row.spec.layout}")
                row.side.ask({"prefix": plan.prefix(), "batch_size": plan.batch_size})
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
    ask = {
        "prompts": plan.prompts(turn),
        "prefix_len": plan.cached_prefix_len,
        "output_len": plan.output_len,
    }
    first = turn % len(rows)
    for row in rows[first:] + rows[:first]:
        note(f"{what}: {row.spec.layout}")
        run = row.side.ask(ask)
        if not warm:
            row.runs.append(run)


def _report(plan: LatencyPlan, rows: list[_Row], rates: MatmulRates) -> dict[str, Any]:
    flops = prefill_flops(plan.model, plan.input_len, plan.cached_prefix_len)
    total = flops.total * plan.batch_size
    return {
        "model": plan.model.path,
        "cached_prefix_len": plan.cached_prefix_len,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "batch_size": plan.batch_size,
        "warmup": plan.warmup,
        "repeats": plan.repeats,
        "prefill_flops": {
            "matmul": flops.matmul * plan.batch_size,
            "attention": flops.attention * plan.batch_size,
            "total": total,
        },
        "matmul_rates": rates.report(),
        "rows": [_row_report(plan, row, rows[0], rates, total) for row in rows],
    }


def _row_report(plan: LatencyPlan, row: _Row, first: _Row, rates: MatmulRates, flops: int) -> dict[str, Any]:
    ttft = spread([run["ttft_s"] for run in row.runs])
    tpot = spread([run["tpot_s"] for run in row.runs]) if plan.output_len > 1 else None
    prefill_s = statistics.median(run["prefill_s"] for run in row.runs)
    about = row.about
    best = rates.median(about["world_size"], about["threads_per_rank"], about["compute_dtype"])
    last = row.runs[-1]
    return {
        "layout": row.spec.layout,
        **about,
        "ttft_s": ttft,
        "tpot_s": tpot,
        "prefill_tokens_per_s": plan.batch_size * plan.input_len / prefill_s,
        "decode_tokens_per_s": plan.batch_size / tpot["median"] if tpot else None,
        "flops_per_s": flops / prefill_s,
        "matmul_flops_per_s": best,
        "matmul_share": flops / prefill_s / best,
        "ttft_speedup": _speedup(first, row, "ttft_s"),
        "tpot_speedup": _speedup(first, row, "tpot_s") if tpot else None,
        "same_tokens": [run["token_ids"] for run in row.runs] == [run["token_ids"] for run in first.runs],
        "bytes_sent": last.get("bytes_sent"),
        "rank_tokens": last.get("rank_tokens"),
        "rank_causal_pairs": last.get("rank_causal_pairs"),
        "num_cached_tokens": last.get("num_cached_tokens"),
        "peak_memory_bytes": last.get("peak_memory_bytes"),
        "rank_memory_bytes": last.get("rank_memory_bytes"),
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
