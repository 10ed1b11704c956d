"""The figures of `prefold bench serve`, under the names that vLLM's benchmark gives them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from prefold.benchmark.serve_client import RequestResult
from prefold.benchmark.serve_load import Load

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

WIDTH = 50


def parse_percentiles(text: str) -> list[float]:
    """`50,99` -> [50.0, 99.0]. ValueError for anything else, or values outside [0, 100].

    >>> parse_percentiles("50, 99.9")
    [50.0, 99.9]
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--metric-percentiles {text!r} are no numbers, such as 50,99") from None
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles {text} are not all in [0, 100]")
    return values


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` -> metric -> milliseconds. ValueError for another form or metric.

    >>> parse_goodput(["ttft:500", "e2el:1e3"])
    {'ttft': 500.0, 'e2el': 1000.0}
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in GOODPUT_METRICS or not re.fullmatch(r"[0-9.]+(e[0-9]+)?", value):
            known = ", ".join(GOODPUT_METRICS)
            raise ValueError(f"--goodput {pair!r}: give METRIC:MILLISECONDS, the metric one of {known}")
        limits[name] = float(value)
    return limits


def summarize(load: Load, percentiles: Sequence[float], goodput: dict[str, float]) -> dict[str, Any]:
    """The report: a JSON object. Figures are of the requests that succeeded; without any they are 0.

    TPOT leaves out requests of one token. A request counts for the goodput if it keeps all limits; with one
    token its TPOT is 0.
    """
    good = [result for result in load.results if result.error is None]
    samples = {
        "ttft": [result.ttft_s for result in good],
        "tpot": [result.tpot_s for result in good if result.tpot_s is not None],
        "itl": [gap for result in good for gap in result.itl_s],
        "e2el": [result.e2el_s for result in good],
    }
    tokens_in = sum(result.prompt_tokens for result in good)
    tokens_out = sum(result.output_tokens for result in good)
    duration = load.duration_s
    report: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(load.results) - len(good),
        "max_concurrent_requests": load.peak_concurrency,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(_keeps(result, goodput) for result in good) / duration if goodput else None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
    }
    for name, seconds in samples.items():
        values = np.array(seconds or [0.0]) * 1000.0
        report[f"mean_{name}_ms"] = float(values.mean())
        report[f"median_{name}_ms"] = float(np.median(values))
        report[f"std_{name}_ms"] = float(values.std())
        for percentile in percentiles:
            report[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    report["errors"] = count_errors(load.results)
    return report


def _keeps(result: RequestResult, limits_ms: dict[str, float]) -> bool:
    took = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.e2el_s}
    return all(took[name] * 1000.0 <= limit for name, limit in limits_ms.items())


def count_errors(results: Sequence[RequestResult]) -> list[dict[str, Any]]:
    """Kinds of errors with their number and one message each, the most frequent first."""
    counts = Counter(result.error_kind for result in results if result.error_kind is not None)
    return [
        {
            "kind": kind,
            "count": count,
            "example": next(result.error for result in results if result.error_kind == kind),
        }
        for kind, count in counts.most_common()
    ]


def details(results: Sequence[RequestResult]) -> dict[str, list[Any]]:
    """What --save-detailed adds to the report: a list entry per request, in the order of sending."""
    return {
        "input_lens": [result.prompt_tokens for result in results],
        "output_lens": [result.output_tokens for result in results],
        "start_times": [result.start_s for result in results],
        "ttfts": [result.ttft_s for result in results],
        "itls": [result.itl_s for result in results],
        "generated_texts": [result.text for result in results],
        "request_errors": [result.error or "" for result in results],
    }


def report_lines(report: dict[str, Any], percentiles: Sequence[float]) -> list[str]:
    """The report for people."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def add(label: str, value: float | int | None) -> None:
        if value is not None:
            shown = f"{value:.2f}" if isinstance(value, float) else str(value)
            lines.append(f"{label + ':':<40} {shown:<9}".rstrip())

    add("Successful requests", report["completed"])
    add("Failed requests", report["failed"])
    add("Maximum request concurrency", report.get("max_concurrency"))
    add("Request rate configured (RPS)", report.get("request_rate"))
    add("Benchmark duration (s)", report["duration"])
    add("Total input tokens", report["total_input_tokens"])
    add("Total generated tokens", report["total_output_tokens"])
    add("Request throughput (req/s)", report["request_throughput"])
    add("Request goodput (req/s)", report["request_goodput"])
    add("Output token throughput (tok/s)", report["output_throughput"])
    add("Peak concurrent requests", report["max_concurrent_requests"])
    add("Total Token throughput (tok/s)", report["total_token_throughput"])
    for name, (short, title) in METRICS.items():
        lines.append(f"{title:-^{WIDTH}}")
        add(f"Mean {short} (ms)", report[f"mean_{name}_ms"])
        add(f"Median {short} (ms)", report[f"median_{name}_ms"])
        for percentile in percentiles:
            add(f"P{percentile:g} {short} (ms)", report[f"p{percentile:g}_{name}_ms"])
    lines.append("=" * WIDTH)
    return lines
