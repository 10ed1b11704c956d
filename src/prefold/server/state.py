"""What the handlers of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request

from prefold.engine.async_engine import AsyncLLM, EngineStatus
from prefold.request import RequestOutput
from prefold.server.errors import APIError, unavailable
from prefold.server.settings import ServerSettings

if TYPE_CHECKING:
    from prefold.server.otel import RequestTracer


class Recorder(Protocol):
    """Is told how requests ended."""

    def on_finished(self, output: RequestOutput, model_name: str) -> None: ...

    def on_rejected(self, status: int) -> None: ...


class NullRecorder:
    def on_finished(self, output: RequestOutput, model_name: str) -> None:
        pass

    def on_rejected(self, status: int) -> None:
        pass


class ServerState:
    """The engine, which may still be loading, and whether the server is on its way out.

    Attributes:
        engine: None until it has started.
        tracer: None if nobody wants spans of requests.
        draining: requests that run may end, new ones are refused.
        created: when the server started, unix time; the `created` of its models.
    """

    def __init__(self, engine: AsyncLLM | None, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.recorder: Recorder = NullRecorder()
        self.tracer: RequestTracer | None = None
        self.draining = False
        self.created = int(time.time())
        self.idle = asyncio.Event()
        self.idle.set()
        self._num_requests = 0

    def enter(self) -> None:
        """A request has begun."""
        self._num_requests += 1
        self.idle.clear()

    def leave(self) -> None:
        """It has been answered, to the last byte."""
        self._num_requests -= 1
        if self._num_requests == 0:
            self.idle.set()

    def serving_engine(self) -> AsyncLLM:
        """The engine. APIError 503 unless it takes requests."""
        engine = self.loaded_engine()
        if self.draining:
            raise unavailable("the server is shutting down")
        if engine.status is not EngineStatus.READY:
            raise unavailable(_why_not_ready(engine))
        return engine

    def loaded_engine(self) -> AsyncLLM:
        """The engine, whose config and tokenizer can be used whatever it does. APIError 503 while loading."""
        if self.engine is None:
            raise unavailable("the model is still loading")
        return self.engine

    def trace_parent(self, headers: Mapping[str, str]) -> Any:
        """What `headers` say of the client's span; None if nobody wants spans."""
        return None if self.tracer is None else self.tracer.parent(headers)

    def check_model(self, name: str | None) -> None:
        """APIError 404 unless requests may use that name."""
        if name is not None and name not in self.settings.served_model_names:
            served = ", ".join(self.settings.served_model_names)
            raise APIError(
                404,
                f"the model {name[:200]!r} does not exist; this server has {served}",
                param="model",
                code="model_not_found",
            )


def _why_not_ready(engine: AsyncLLM) -> str:
    reasons = {
        EngineStatus.STARTING: "the model is still loading",
        EngineStatus.RESTARTING: "the engine's workers are being restarted",
        EngineStatus.DEAD: "the engine has failed",
        EngineStatus.STOPPED: "the server is shutting down",
    }
    reason = reasons[engine.status]
    return f"{reason}: {engine.failure}" if engine.failure else reason


def state_of(request: Request) -> ServerState:
    return request.app.state.server
