"""`/metrics`: what Prometheus reads. docs/metrics.md says what each metric means.

Two sources: how requests ended, which the handlers tell a `RequestRecorder`, and the engine's snapshots.
Nothing is registered globally: an app has a registry of its own.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from prefold.engine.async_engine import AsyncLLM, EngineStatus
from prefold.metrics import EngineSnapshot, Histogram, Totals, imbalance
from prefold.request import RequestOutput

PREFIX = "prefold_"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 1800)
"""Bounds for what a request waits for. A prompt of a million tokens takes its time: up to half an hour."""
TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
"""Bounds for seconds per token."""
PROMPT_TOKENS = tuple(2**i for i in range(4, 21))
"""Bounds for tokens of a prompt: 16 to a million."""
GENERATION_TOKENS = tuple(2**i for i in range(17))
"""Bounds for tokens of an output: 1 to 65,536."""

RECENT = 512
"""Finished requests that are remembered one by one."""

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", SECONDS),
    "time_per_output_token_seconds": ("Mean time of a request per token after the first.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", SECONDS),
    "request_queue_time_seconds": ("From a request's arrival until it was first scheduled.", SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", PROMPT_TOKENS),
    "request_generation_tokens": ("Generated tokens of a sample.", GENERATION_TOKENS),
}
"""Of requests that have ended: description and bounds."""


class FinishedRequest(NamedTuple):
    """When a request ended (unix time), what it was and how long it took."""

    time_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    latency_s: float | None
    finish_reason: str


class RequestRecorder:
    """How requests ended, by the name of the model that they asked for.

    Attributes:
        histograms: by (name of HISTOGRAMS, model).
        finished: samples that ended, by (finish reason, model).
        rejected: requests that got an error, by HTTP status.
        recent: the last of them, for the dashboard.
    """

    def __init__(self) -> None:
        self.histograms: dict[tuple[str, str], Histogram] = {}
        self.finished: Counter[tuple[str, str]] = Counter()
        self.rejected: Counter[int] = Counter()
        self.recent: deque[FinishedRequest] = deque(maxlen=RECENT)

    def on_finished(self, output: RequestOutput, model_name: str) -> None:
        """A request has ended, in whatever way. What it has no figure for is not counted."""
        metrics = output.metrics
        for name, value in (
            ("time_to_first_token_seconds", metrics.ttft_s),
            ("time_per_output_token_seconds", metrics.tpot_s),
            ("e2e_request_latency_seconds", metrics.latency_s),
            ("request_queue_time_seconds", metrics.first_scheduled_s),
            ("request_prompt_tokens", len(output.prompt_token_ids)),
        ):
            if value is not None:
                self._observe(name, model_name, value)
        reasons = [sample.finish_reason or "abort" for sample in output.outputs]
        for sample, reason in zip(output.outputs, reasons):
            self._observe("request_generation_tokens", model_name, len(sample.token_ids))
            self.finished[reason, model_name] += 1
        self.recent.append(
            FinishedRequest(
                time_s=time.time(),
                num_prompt_tokens=len(output.prompt_token_ids),
                num_cached_tokens=metrics.num_cached_tokens,
                num_output_tokens=sum(len(sample.token_ids) for sample in output.outputs),
                ttft_s=metrics.ttft_s,
                latency_s=metrics.latency_s,
                finish_reason=reasons[0] if reasons else "abort",
            )
        )

    def on_rejected(self, status: int) -> None:
        """A request was answered with an error."""
        self.rejected[status] += 1

    def _observe(self, name: str, model_name: str, value: float) -> None:
        key = (name, model_name)
        if key not in self.histograms:
            self.histograms[key] = Histogram.of(HISTOGRAMS[name][1])
        self.histograms[key].observe(value)


class LifelongTotals:
    """The engine's totals since the server started: they go on where an engine before a restart left off."""

    def __init__(self) -> None:
        self.num_restarts = 0
        self._before = Totals()
        self._last = EngineSnapshot()

    def update(self, snapshot: EngineSnapshot) -> Totals:
        """Take note of the latest snapshot; the sum over all engines."""
        if snapshot.started_s != self._last.started_s:
            self.num_restarts += self._last.started_s > 0
            self._before = self._before.plus(self._last.totals)
        self._last = snapshot
        return self._before.plus(snapshot.totals)


class EngineCollector(Collector):
    """Asks for the figures when Prometheus does.

    Args:
        engine: gives the engine, or None while it loads.
        model_name: label of what the engine counts for all names that it is served under.
    """

    def __init__(
        self, engine: Callable[[], AsyncLLM | None], recorder: RequestRecorder, model_name: str
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._model_name = model_name
        self._totals = LifelongTotals()

    def collect(self) -> Iterator[Metric]:
        """All metrics. Those of the engine are there with their zeros before it has started."""
        yield from self._of_requests()
        engine = self._engine()
        snapshot = EngineSnapshot() if engine is None else engine.snapshot
        totals = self._totals.update(snapshot)
        up = engine is not None and engine.status is EngineStatus.READY
        size = 1 if engine is None else engine.config.parallel.prefill_context_parallel_size
        yield self._gauge("engine_up", "1 while the engine takes requests.", float(up))
        yield self._counter(
            "engine_restarts", "Times that the workers were started anew.", self._totals.num_restarts
        )
        yield from self._of_engine(snapshot, totals)
        yield from self._of_ranks(totals, size)

    def _of_requests(self) -> Iterator[Metric]:
        for name, (text, bounds) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            models = {model for key, model in self._recorder.histograms if key == name}
            for model in sorted(models | {self._model_name}):
                counted = self._recorder.histograms.get((name, model), Histogram.of(bounds))
                _add_histogram(family, [model], counted)
            yield family
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Samples that ended.", labels=["finished_reason", "model_name"]
        )
        for (reason, model), count in sorted(self._recorder.finished.items()):
            finished.add_metric([reason, model], count)
        yield finished
        rejected = CounterMetricFamily(
            PREFIX + "requests_rejected", "Requests answered with an error.", labels=["status"]
        )
        for status, count in sorted(self._recorder.rejected.items()):
            rejected.add_metric([str(status)], count)
        yield rejected

    def _of_engine(self, snapshot: EngineSnapshot, totals: Totals) -> Iterator[Metric]:
        usage = snapshot.blocks_used / snapshot.blocks_total if snapshot.blocks_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Samples that have blocks and are computed.", snapshot.num_running),
            ("num_requests_waiting", "Samples that wait, preempted ones included.", snapshot.num_waiting),
            ("kv_cache_usage_ratio", "Share of the KV cache's blocks that requests hold.", usage),
            ("workspace_bytes", "Workspace that steps have needed on a rank.", snapshot.workspace_bytes),
            ("workspace_planned_bytes", "What a rank's may need at most.", snapshot.workspace_planned),
        ):
            yield self._gauge(name, text, value)
        for name, text, value in (
            ("steps", "Steps of all replicas.", totals.num_steps),
            (
                "prompt_tokens",
                "Tokens of completed prompts, those found in the prefix cache included.",
                totals.num_prompt_tokens,
            ),
            (
                "prefill_tokens",
                "Tokens computed in prefill, also again after a preemption.",
                totals.num_prefill_tokens,
            ),
            ("generation_tokens", "Tokens sampled.", totals.num_generation_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", totals.prefix_query_tokens),
            ("prefix_cache_hits", "Tokens found there.", totals.prefix_hit_tokens),
            (
                "num_preemptions",
                "Requests that gave their blocks back to be computed anew.",
                totals.num_preemptions,
            ),
        ):
            yield self._counter(name, text, value)
        for name, text, counted in (
            ("step_seconds", "Duration of a step.", totals.step_seconds),
            (
                "inter_token_latency_seconds",
                "Time between a step and the one before, per token decoded in it.",
                totals.inter_token_seconds,
            ),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            _add_histogram(family, [self._model_name], counted)
            yield family

    def _of_ranks(self, totals: Totals, size: int) -> Iterator[Metric]:
        """What is counted per PCP rank, collective and way."""
        for name, text, counts in (
            ("pcp_rank_tokens", "Tokens that a PCP rank computed.", totals.rank_tokens),
            (
                "pcp_rank_causal_pairs",
                "Query-key pairs under the causal mask that a PCP rank attended to.",
                totals.rank_causal_pairs,
            ),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["replica", "rank"])
            for number, count in enumerate(counts):
                replica, rank = divmod(number, size)
                family.add_metric([str(replica), str(rank)], count)
            yield family
        balance = GaugeMetricFamily(
            PREFIX + "pcp_imbalance_ratio",
            "Causal pairs of the fullest PCP rank over the mean, since the start; 1 is a perfect balance.",
            labels=["replica"],
        )
        for first in range(0, len(totals.rank_causal_pairs), size):
            pairs = totals.rank_causal_pairs[first : first + size]
            balance.add_metric([str(first // size)], imbalance(pairs))
        yield balance
        for name, text, label, values in (
            (
                "collective_bytes",
                "Bytes that a sampling rank handed to a collective.",
                "collective",
                totals.bytes_sent,
            ),
            ("collective_calls", "Its calls.", "collective", totals.calls),
            (
                "collective_seconds",
                "Time that a sampling rank spent in a collective.",
                "collective",
                totals.collective_s,
            ),
            (
                "attention_way",
                "Requests of steps, by the way in which their context was attended.",
                "way",
                totals.ways,
            ),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=[label])
            for key, value in sorted(values.items()):
                family.add_metric([key], value)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def _add_histogram(family: HistogramMetricFamily, labels: list[str], counted: Histogram) -> None:
    """As Prometheus has it: each bucket counts all values up to its bound."""
    buckets, total = [], 0
    for bound, count in zip((*map(float, counted.bounds), float("inf")), counted.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
    family.add_metric(labels, buckets, counted.sum)


def metrics_router(
    engine: Callable[[], AsyncLLM | None], recorder: RequestRecorder, model_name: str
) -> APIRouter:
    """`GET /metrics`; see EngineCollector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, recorder, model_name))
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
