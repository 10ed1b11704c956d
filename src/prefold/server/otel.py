"""A span of OpenTelemetry per request of the engine, for a collector (`--otlp-traces-endpoint`).

Attributes have the names that vLLM uses. Needs `prefold[otel]`, and is imported only if it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prefold.request import RequestOutput, SamplingParams

TRACES_PATH = "/v1/traces"
"""Where collectors take spans, if the URL has no path."""
EXPORT_S = 5.0
"""How long a collector may take; what it does not accept in time is lost."""


class RequestTracer:
    """Makes spans. `processor` gets those that have ended."""

    def __init__(self, processor: SpanProcessor) -> None:
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
        about = {"service.name": "prefold", "service.version": metadata.version("prefold")}
        resource = Resource.create(about).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("prefold")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str) -> RequestTracer:
        """Spans are sent by a thread, a batch at a time, over HTTP. ValueError: `endpoint` is no URL."""
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"--otlp-traces-endpoint {endpoint} is no URL such as http://localhost:4318")
        if url.path in ("", "/"):
            endpoint = url._replace(path=TRACES_PATH).geturl()
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)))

    def parent(self, headers: Mapping[str, str]) -> Context:
        """The client's span, if `headers` (traceparent, tracestate) name one."""
        return self._propagator.extract(headers)

    @contextmanager
    def span(
        self, request_id: str, params: SamplingParams, model_name: str, parent: Context | None
    ) -> Iterator[Callable[[RequestOutput], None]]:
        """A request's span, as long as the block; what it yields is to be told all outputs."""
        latest: list[RequestOutput] = []
        unfinished = "abort"

        def see(output: RequestOutput) -> None:
            latest[:] = [output]

        given = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": model_name,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
        }
        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, {k: v for k, v in given.items() if v is not None}
        )
        try:
            yield see
        except Exception as error:
            unfinished = "error"
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            if not latest or not latest[0].finished:
                span.set_attribute("gen_ai.response.finish_reasons", [unfinished])
            for output in latest:
                _describe(span, output)
            span.end()

    def shutdown(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _describe(span: Span, output: RequestOutput) -> None:
    """What has become of a request."""
    metrics = output.metrics
    queue_s, first_s, end_s = metrics.first_scheduled_s, metrics.ttft_s, metrics.latency_s
    found = {
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.completion_tokens": sum(len(sample.token_ids) for sample in output.outputs),
        "gen_ai.usage.num_sequences": len(output.outputs),
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.time_to_first_token": first_s,
        "gen_ai.latency.e2e": end_s,
        "gen_ai.latency.time_in_model_prefill": _between(queue_s, first_s),
        "gen_ai.latency.time_in_model_decode": _between(first_s, end_s),
        "gen_ai.latency.time_in_model_inference": _between(queue_s, end_s),
    }
    if output.finished:
        found["gen_ai.response.finish_reasons"] = [sample.finish_reason or "" for sample in output.outputs]
    for name, value in found.items():
        if value is not None:
            span.set_attribute(name, value)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
