"""Spans of OpenTelemetry: one per request of the engine, in memory and sent to a collector."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from prefold.cli import serve
from prefold.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from prefold.server.app import make_app
from prefold.server.otel import RequestTracer
from prefold.server.settings import ServerSettings

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "abc", "max_tokens": 4, "temperature": 0.5}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def client(engine: Any, spans: InMemorySpanExporter) -> httpx.AsyncClient:
    app = make_app(engine, ServerSettings(("fake",)))
    app.state.server.tracer = RequestTracer(SimpleSpanProcessor(spans))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Without gen_ai in front."""
    return {name.removeprefix("gen_ai."): value for name, value in (span.attributes or {}).items()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_per_prompt(client: httpx.AsyncClient, spans: InMemorySpanExporter, stream: bool):
    """Under the client's span, if it names one; else each begins a trace."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {**BODY, "prompt": ["abc", "de"], "n": 2, "stream": stream}
    response = await client.post("/v1/completions", json=body, headers=headers)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": stream}
    await client.post("/v1/chat/completions", json=chat)
    *completions, alone = spans.get_finished_spans()
    assert alone.parent is None
    assert len(completions) == 2
    for span in completions:
        assert span.name == "llm_request"
        assert span.kind is SpanKind.SERVER
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        given = attributes(span)
        assert given.pop("request.id") in [f"{_id(response, stream)}-{i}" for i in range(2)]
        assert given.pop("usage.prompt_tokens") in (2, 3)
        assert given == {
            "response.model": "fake",
            "request.n": 2,
            "request.temperature": 0.5,
            "request.top_p": 1.0,
            "request.max_tokens": 4,
            "usage.completion_tokens": 8,
            "usage.num_sequences": 2,
            "response.finish_reasons": ("length", "length"),
        }


def _id(response: httpx.Response, stream: bool) -> str:
    if not stream:
        return response.json()["id"]
    return response.text.partition('"id":"')[2].partition('"')[0]


async def test_requests_that_fail(client: httpx.AsyncClient, spans: InMemorySpanExporter, engine: Any):
    engine.failure = "rank 1 is gone"
    assert (await client.post("/v1/completions", json=BODY)).status_code == 503
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.status.description == "rank 1 is gone"
    assert attributes(span)["response.finish_reasons"] == ("error",)
    assert (await client.post("/v1/completions", json={**BODY, "n": 0})).status_code == 400
    assert len(spans.get_finished_spans()) == 1


def test_latencies(spans: InMemorySpanExporter):
    """One request waits 1 s, has its first token after 3 s, its last after 7; another is left: no times."""
    tracer = RequestTracer(SimpleSpanProcessor(spans))
    metrics = RequestMetrics(first_scheduled_s=1.0, ttft_s=3.0, latency_s=7.0)
    samples = [CompletionOutput(0, "", [5, 6], finish_reason="stop")]
    with tracer.span("a", SamplingParams(max_tokens=None), "m", None) as see:
        see(RequestOutput("a", None, [1], [], False))
        see(RequestOutput("a", None, [1], samples, True, metrics=metrics))
    with pytest.raises(GeneratorExit), tracer.span("b", SamplingParams(), "m", None):
        raise GeneratorExit
    first, second = map(attributes, spans.get_finished_spans())
    times = {name.removeprefix("latency."): value for name, value in first.items() if "latency" in name}
    assert times == {
        "time_in_queue": 1,
        "time_to_first_token": 3,
        "e2e": 7,
        "time_in_model_prefill": 2,
        "time_in_model_decode": 4,
        "time_in_model_inference": 6,
    }
    assert "request.max_tokens" not in first
    assert (first["response.finish_reasons"], second["response.finish_reasons"]) == (("stop",), ("abort",))


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that takes everything: its URL, and what has come, as (path, body)."""
    taken: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/elsewhere/traces"])
def test_a_collector_gets_them(collector: tuple[str, list[tuple[str, bytes]]], path: str):
    url, taken = collector
    tracer = serve._tracer(url + path)
    with tracer.span("a", SamplingParams(), "m", None):
        pass
    tracer.shutdown()
    ((at, body),) = taken
    assert at == ("/elsewhere/traces" if len(path) > 1 else "/v1/traces")
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    about = {entry.key: entry.value.string_value for entry in sent.resource.attributes}
    assert about["service.name"] == "prefold"
    assert [span.name for span in sent.scope_spans[0].spans] == ["llm_request"]


def test_endpoints_that_cannot_be(monkeypatch: pytest.MonkeyPatch):
    for endpoint in ("localhost:4318", "grpc://localhost:4317", "http://"):
        with pytest.raises(ValueError, match=f"--otlp-traces-endpoint {endpoint} is no URL"):
            serve._tracer(endpoint)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "prefold.server.otel")
    with pytest.raises(ValueError, match=r"pip install 'prefold\[otel\]'"):
        serve._tracer("http://localhost:4318")
