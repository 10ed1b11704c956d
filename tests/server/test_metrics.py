"""`/metrics`: every metric is documented, and says what recorder and snapshot say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from prefold.engine.async_engine import EngineStatus
from prefold.metrics import EngineSnapshot, Histogram, Totals
from prefold.request import CompletionOutput, RequestMetrics, RequestOutput
from prefold.server.metrics import HISTOGRAMS, SECONDS, RequestRecorder, metrics_router
from prefold.step import StepStats

ROOT = Path(__file__).parents[2]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def snapshot(started_s: float = 1.0, steps: int = 1, **fields: Any) -> EngineSnapshot:
    """Of two replicas with PCP 2 after some steps, each on both."""
    totals = Totals(num_prompt_tokens=7 * steps, num_generation_tokens=3 * steps, num_preemptions=steps)
    stats = StepStats([4, 4], [30, 10], 0.5, {"pcp.all_gather": 80}, {"pcp.all_gather": 2})
    stats.collective_s, stats.ways = {"pcp.all_gather": 0.25, "pp.recv": 0.125}, {"local": 2, "sliced": 1}
    for _ in range(steps):
        totals.add_step(stats, 0)
        totals.add_step(stats, 1)
        totals.step_seconds.observe(0.5)
        totals.inter_token_seconds.observe(0.03, count=4)
    return EngineSnapshot(started_s=started_s, totals=totals, **fields)


def request(ttft_s: float | None, reasons: tuple[str, ...] = ("stop",), prompt: int = 20) -> RequestOutput:
    samples = [CompletionOutput(i, "", [1] * 5, finish_reason=reason) for i, reason in enumerate(reasons)]
    metrics = RequestMetrics(first_scheduled_s=0.25, ttft_s=ttft_s, latency_s=3.0, tpot_s=0.04)
    return RequestOutput("id", None, [1] * prompt, samples, True, metrics=metrics)


class Server:
    """An app with nothing but `/metrics`. `engine` may be set to None: it loads."""

    def __init__(self) -> None:
        self.recorder = RequestRecorder()
        parallel = SimpleNamespace(prefill_context_parallel_size=2)
        self.engine: Any = SimpleNamespace(
            snapshot=snapshot(), status=EngineStatus.READY, config=SimpleNamespace(parallel=parallel)
        )
        app = FastAPI()
        app.include_router(metrics_router(lambda: self.engine, self.recorder, "m"))
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    async def families(self) -> dict[str, Any]:
        response = await self._client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(response.text)}

    async def samples(self) -> dict[str, float]:
        """By name and labels, without `model_name`."""
        found = {}
        for family in (await self.families()).values():
            for name, labels, value, *_ in family.samples:
                shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()) if k != "model_name")
                found[f"{name}{{{shown}}}" if shown else name] = value
        return found


pytestmark = pytest.mark.anyio


async def test_the_page_lists_every_metric_with_its_type_and_labels():
    server = Server()
    server.recorder.on_finished(request(1.0), "m")
    server.recorder.on_rejected(429)
    there = {}
    for name, family in (await server.families()).items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = f"{name}_total" if family.type == "counter" else name
        there[shown] = (family.type, frozenset(labels))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(prefold_\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    listed = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert listed == there
    assert len(rows) == len(listed)


async def test_the_grafana_dashboard_names_metrics_that_exist():
    server = Server()
    server.recorder.on_finished(request(1.0), "m")
    server.recorder.on_rejected(429)
    there = {name for family in (await server.families()).values() for name in names_of(family)}
    dashboard = json.loads((ROOT / "grafana" / "prefold.json").read_text(encoding="utf-8"))
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    assert len(expressions) > 20
    named = {name for expression in expressions for name in re.findall(r"prefold_\w+", expression)}
    assert named <= there, named - there
    assert all(expression.count("(") == expression.count(")") for expression in expressions)


def names_of(family: Any) -> set[str]:
    return {sample.name for sample in family.samples}


async def test_requests_are_counted_when_they_end():
    server = Server()
    server.recorder.on_finished(request(1.5, ("stop", "length")), "m")
    server.recorder.on_finished(request(None, ("abort",), prompt=100_000), "m")
    server.recorder.on_finished(request(1500.0), "other")
    for status in (429, 429, 400):
        server.recorder.on_rejected(status)
    families = await server.families()
    ttft = {
        (s.labels["model_name"], s.labels.get("le")): s.value
        for s in families["prefold_time_to_first_token_seconds"].samples
    }
    assert [ttft["m", le] for le in ("1.0", "2.5", "+Inf", None)] == [0, 1, 1, 1.5]
    assert [ttft["other", le] for le in ("1200.0", "1800.0")] == [0, 1]
    samples = await server.samples()
    assert samples["prefold_request_success_total{finished_reason=length}"] == 1
    assert samples["prefold_request_success_total{finished_reason=abort}"] == 1
    assert samples["prefold_requests_rejected_total{status=429}"] == 2
    assert samples["prefold_requests_rejected_total{status=400}"] == 1
    (prompts,) = [
        s.value
        for s in families["prefold_request_prompt_tokens"].samples
        if s.name.endswith("_sum") and s.labels["model_name"] == "m"
    ]
    assert prompts == 100_020


async def test_what_the_snapshot_says():
    server = Server()
    server.engine.snapshot = snapshot(steps=3, num_running=5, num_waiting=2, blocks_total=80, blocks_used=20)
    server.engine.snapshot.workspace_bytes, server.engine.snapshot.workspace_planned = 7, 9
    samples = await server.samples()
    assert samples["prefold_engine_up"] == 1
    assert samples["prefold_num_requests_running"] == 5
    assert samples["prefold_num_requests_waiting"] == 2
    assert samples["prefold_kv_cache_usage_ratio"] == 0.25
    assert samples["prefold_workspace_bytes"] == 7
    assert samples["prefold_workspace_planned_bytes"] == 9
    assert samples["prefold_prompt_tokens_total"] == 21
    assert samples["prefold_steps_total"] == 6
    assert samples["prefold_pcp_rank_tokens_total{rank=1,replica=1}"] == 12
    assert samples["prefold_pcp_rank_causal_pairs_total{rank=0,replica=1}"] == 90
    assert samples["prefold_pcp_imbalance_ratio{replica=0}"] == 1.5
    assert samples["prefold_collective_bytes_total{collective=pcp.all_gather}"] == 480
    assert samples["prefold_collective_seconds_total{collective=pp.recv}"] == 0.75
    assert samples["prefold_attention_way_total{way=local}"] == 12
    assert samples["prefold_inter_token_latency_seconds_bucket{le=0.05}"] == 12
    assert samples["prefold_inter_token_latency_seconds_bucket{le=0.02}"] == 0
    assert samples["prefold_step_seconds_count"] == 3


async def test_counters_go_on_when_the_engine_is_restarted():
    server = Server()
    before: dict[str, float] = {}
    history = [
        (EngineStatus.READY, snapshot(1.0, steps=2)),
        (EngineStatus.READY, snapshot(1.0, steps=5)),
        (EngineStatus.RESTARTING, snapshot(1.0, steps=6)),
        (EngineStatus.RESTARTING, EngineSnapshot()),
        (EngineStatus.READY, snapshot(2.0, steps=1)),
        (EngineStatus.READY, snapshot(2.0, steps=4)),
        (EngineStatus.DEAD, snapshot(3.0, steps=1)),
    ]
    for status, shown in history:
        server.engine.status, server.engine.snapshot = status, shown
        samples = await server.samples()
        assert samples["prefold_engine_up"] == (status is EngineStatus.READY)
        for name, value in before.items():
            if "_total" in name or "_bucket" in name or name.endswith(("_count", "_sum")):
                assert samples[name] >= value, name
        before = samples
    assert before["prefold_steps_total"] == 2 * (6 + 4 + 1)
    assert before["prefold_engine_restarts_total"] == 2
    assert before["prefold_step_seconds_count"] == 11


async def test_an_engine_that_loads_is_not_up():
    server = Server()
    server.engine = None
    samples = await server.samples()
    assert samples["prefold_engine_up"] == samples["prefold_steps_total"] == 0
    assert samples["prefold_time_to_first_token_seconds_count"] == 0


def test_buckets_ascend_and_suit_long_prompts():
    assert SECONDS[-1] == 1800
    for _, bounds in HISTOGRAMS.values():
        assert list(bounds) == sorted(set(bounds))
        for value in (0, bounds[0], bounds[-1], bounds[-1] * 2):
            counted = Histogram.of(bounds)
            counted.observe(value)
            at = next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))
            assert counted.counts.index(1) == at
