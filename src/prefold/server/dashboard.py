"""`/dashboard`: one page that shows what the engine does, live.

The page and its style and script are files of the package, served as they are; the figures come from
`/dashboard/data`, once a second. Only the latter needs the API key: the page asks for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata, resources
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from msgspec.structs import replace

from prefold.config import EngineConfig
from prefold.distributed.stages import split_layers
from prefold.engine.async_engine import AsyncLLM
from prefold.metrics import EngineSnapshot, StepRecord
from prefold.server.explain import explain
from prefold.server.metrics import FinishedRequest, RequestRecorder

PAGE = "/dashboard"
FILES = {"style.css": "text/css", "app.js": "text/javascript", "charts.js": "text/javascript"}
OPEN_PATHS = frozenset({PAGE, *(f"{PAGE}/{name}" for name in FILES)})
"""Hold nothing that a key protects."""

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

WINDOW_S = 300.0
"""How far back the charts reach."""
SAMPLE_S = 1.0
"""Shortest time between two points of the history."""
MAX_STEPS = 48
MAX_REQUESTS = 40


class Sample(msgspec.Struct, array_like=True):
    """A point of the history; tokens are counted since the engine started."""

    time_s: float
    num_running: int
    num_waiting: int
    blocks_used: int
    num_prefill_tokens: int
    num_generation_tokens: int


class History:
    """The last minutes, as far as somebody looked: whoever opens the page sees what others saw before."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()
        self._started_s = 0.0

    def add(self, snapshot: EngineSnapshot, now: float) -> None:
        """Note a snapshot, unless the last one is too fresh. With another engine it begins anew."""
        if snapshot.started_s != self._started_s:
            self.samples.clear()
            self._started_s = snapshot.started_s
        while self.samples and self.samples[0].time_s < now - WINDOW_S:
            self.samples.popleft()
        if self.samples and now - self.samples[-1].time_s < SAMPLE_S * 0.9:
            return
        totals = snapshot.totals
        self.samples.append(
            Sample(
                now,
                snapshot.num_running,
                snapshot.num_waiting,
                snapshot.blocks_used,
                totals.num_prefill_tokens,
                totals.num_generation_tokens,
            )
        )


def dashboard_data(
    engine: AsyncLLM, recorder: RequestRecorder, history: History, model_name: str, now: float
) -> dict[str, Any]:
    """What the page shows, of one moment."""
    config, snapshot, steps = engine.config, engine.snapshot, list(engine.recent_steps)
    history.add(snapshot, now)
    explanation = explain(config, snapshot, steps, engine.status.name.lower(), engine.failure)
    sentences = {section.name: section.sentences for section in explanation.sections}
    totals = snapshot.totals
    # During a long step there is no news: what lasts has lasted longer since.
    age = max(0.0, now - snapshot.time_s)
    requests = [replace(state, wait_s=state.wait_s + age) for state in snapshot.requests[:MAX_REQUESTS]]
    in_flight = [replace(step, duration_s=step.duration_s + age) for step in snapshot.in_flight]
    return {
        "time_s": now,
        "model": model_name,
        "version": metadata.version("prefold"),
        "status": explanation.status,
        "failure": engine.failure,
        "layout": layout_facts(config),
        "sentences": sentences,
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "blocks": [snapshot.blocks_used, snapshot.blocks_total, snapshot.blocks_cached],
        "prefix": [totals.prefix_hit_tokens, totals.prefix_query_tokens],
        "num_preemptions": totals.num_preemptions,
        "requests": [_named(state) for state in requests],
        "steps": [_step(step) for step in shown_steps(steps, engine.recent_prefills)],
        "in_flight": [_step(step) for step in in_flight],
        "finished": [_finished(request) for request in recorder.recent if request.time_s > now - WINDOW_S],
        "history": list(history.samples),
        "window_s": WINDOW_S,
    }


def shown_steps(steps: Sequence[StepRecord], prefills: Iterable[StepRecord]) -> list[StepRecord]:
    """The latest steps, and before them the latest prefills: a second of decoding has hundreds of steps."""
    latest = steps[-MAX_STEPS:]
    known = {(step.replica, step.step_id) for step in latest}
    return [step for step in prefills if (step.replica, step.step_id) not in known] + list(latest)


def layout_facts(config: EngineConfig) -> dict[str, Any]:
    """Sizes that the page needs."""
    parallel = config.parallel
    return {
        "dp": parallel.data_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "tp": parallel.tensor_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "ep": parallel.enable_expert_parallel,
        "max_num_seqs": config.scheduler.max_num_seqs * parallel.data_parallel_size,
        "block_tokens": config.virtual_block_size,
        "first_layer": split_layers(config.model, parallel.pipeline_parallel_size)[-1].start,
    }


def _named(struct: msgspec.Struct) -> dict[str, Any]:
    """By field, where a message has an array."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _step(step: StepRecord) -> dict[str, Any]:
    return _named(step) | {
        "rows": [_named(row) for row in step.rows],
        "layer_s": [round(seconds, 6) for seconds in step.layer_s],
        "collective_s": {key: round(seconds, 6) for key, seconds in step.collective_s.items()},
    }


def _finished(request: FinishedRequest) -> list[Any]:
    return [request.time_s, request.ttft_s, request.num_prompt_tokens, request.finish_reason]


def dashboard_router(engine: Callable[[], AsyncLLM], recorder: RequestRecorder, model_name: str) -> APIRouter:
    """The page, its files and its data.

    Args:
        engine: gives the engine, or raises what becomes an error response.
    """
    router = APIRouter(include_in_schema=False)
    history = History()
    folder = resources.files("prefold.server") / "static"

    def serve_file(path: str, name: str, media_type: str) -> None:
        content = (folder / name).read_bytes()

        @router.get(path)
        async def get() -> Response:
            return Response(content, media_type=media_type, headers=HEADERS)

    serve_file(PAGE, "dashboard.html", "text/html")
    for name, media_type in FILES.items():
        serve_file(f"{PAGE}/{name}", name, media_type)

    @router.get(f"{PAGE}/data")
    async def data() -> Response:
        body = dashboard_data(engine(), recorder, history, model_name, time.time())
        return Response(msgspec.json.encode(body), media_type="application/json", headers=HEADERS)

    return router
