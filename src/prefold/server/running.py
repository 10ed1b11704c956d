"""Runs the engine for one HTTP request, and ends that when the client leaves or the time is up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from prefold.engine.async_engine import AsyncLLM
from prefold.request import RequestOutput, SamplingParams
from prefold.server.errors import APIError, from_engine, internal_error, unavailable
from prefold.server.state import ServerState

logger = logging.getLogger("prefold")

ADMISSION_S = 1.0
"""How long a stream waits with its status line: what the engine refuses by then gets a status of its own."""
KEEP_ALIVE_S = 15.0
"""A stream without output for that long gets a comment, so that proxies keep it open."""
GRAMMAR_FAILED = "structured_outputs:"
"""How the engine's reason begins if a grammar is too large to be followed, which shows only on the way."""
CLIENT_LEFT = 499
"""Status that nobody reads."""

T = TypeVar("T")


@dataclass(frozen=True)
class EngineRequest:
    """One prompt. `prompt` is its text, if it came as one, and `trace_parent` the span that it belongs to."""

    engine_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    trace_parent: Any = None


async def run_engine(
    state: ServerState, engine: AsyncLLM, requests: Sequence[EngineRequest]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all requests, as (number of the request, all of its output so far), the latest of each.

    Leaving early aborts what has not finished.

    Raises:
        APIError: the engine refuses one of the requests, has failed, or has aborted it.
    """
    if len(requests) == 1:
        async with aclosing(_outputs(state, engine, requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    latest: dict[int, RequestOutput] = {}
    changed = asyncio.Event()

    async def pump(index: int) -> None:
        try:
            async with aclosing(_outputs(state, engine, requests[index])) as outputs:
                async for output in outputs:
                    latest[index] = output
                    changed.set()
        finally:
            changed.set()

    tasks = [asyncio.create_task(pump(index)) for index in range(len(requests))]
    try:
        while True:
            await changed.wait()
            changed.clear()
            done = all(task.done() for task in tasks)
            ready, latest = latest, {}
            for index in sorted(ready):
                yield index, ready[index]
            for task in tasks:
                if task.done():
                    task.result()
            if done:
                return
    finally:
        await _cancel(*tasks)


async def _outputs(
    state: ServerState, engine: AsyncLLM, request: EngineRequest
) -> AsyncGenerator[RequestOutput, None]:
    """One request's outputs; errors become APIError."""
    iterator = engine.generate(
        request.engine_id, request.prompt_token_ids, request.params, prompt=request.prompt
    )
    # Closing an outer generator does not close an inner one by itself.
    async with aclosing(cast("AsyncGenerator[RequestOutput, None]", iterator)) as outputs:
        try:
            with _span(state, request) as see:
                async for output in outputs:
                    see(output)
                    if output.finished:
                        state.recorder.on_finished(output, state.settings.model_name)
                    _check_outcome(output)
                    yield output
        except Exception as error:
            refused = from_engine(error, request.engine_id)
            if refused is None:
                raise
            raise refused from error


def _span(
    state: ServerState, request: EngineRequest
) -> AbstractContextManager[Callable[[RequestOutput], object]]:
    """Around a request; wants to see its outputs."""
    if state.tracer is None:
        return nullcontext(_unseen)
    name = state.settings.model_name
    return state.tracer.span(request.engine_id, request.params, name, request.trace_parent)


def _unseen(output: RequestOutput) -> None:
    """There is no span."""


def _check_outcome(output: RequestOutput) -> None:
    """Nobody takes an aborted or failed sample for one that has ended by itself."""
    for sample in output.outputs:
        if sample.finish_reason == "abort":
            raise unavailable("the request was aborted, as the server is shutting down")
        if sample.finish_reason == "error":
            reason = str(sample.stop_reason)
            if reason.startswith(GRAMMAR_FAILED):
                raise APIError(400, reason, param="structured_outputs")
            raise APIError(500, f"the engine failed: {reason}")


async def run_to_end(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client left first, and `work` was cancelled at once.

    Raises:
        APIError: `work` raised it, or the request's time is up (504).
    """
    task = asyncio.create_task(work)
    left = asyncio.create_task(_client_left(request.receive))
    try:
        await asyncio.wait((task, left), timeout=_time_left(request), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if left.done():
            return None
        raise _timed_out(request)
    finally:
        await _cancel(task, left)


class EventStream(Response):
    """Server-sent events, sent as they come; ends with `data: [DONE]`.

    Args:
        events: the data of each event, JSON. What it raises becomes an event with an error, or the
            response's status if it comes early.
    """

    def __init__(self, request: Request, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._request = request
        self._events = events
        self._next: asyncio.Task[bytes] | None = None
        self._left: asyncio.Task[None] | None = None

    async def open(self) -> EventStream:
        """Start; raise what the engine refuses at once. Returns self."""
        self._next = asyncio.create_task(_next_of(self._events))
        self._left = asyncio.create_task(_client_left(self._request.receive))
        try:
            await asyncio.wait(
                (self._next, self._left), timeout=ADMISSION_S, return_when=asyncio.FIRST_COMPLETED
            )
            if self._next.done() and not isinstance(self._next.exception(), _Ended):
                self._next.result()
        except BaseException:
            await self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._frames():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        except _ClientLeft:
            pass
        finally:
            await self._close()

    async def _frames(self) -> AsyncIterator[bytes]:
        try:
            while True:
                data = await self._next_event()
                yield b": waiting\n\n" if data is None else b"data: " + data + b"\n\n"
        except _Ended:
            return
        except _ClientLeft:
            raise
        except APIError as error:
            yield b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
        except Exception:
            request_id = self._request.scope["state"]["request_id"]
            logger.exception("request %s failed", request_id)
            yield b"data: " + msgspec.json.encode(internal_error(request_id).body()) + b"\n\n"

    async def _next_event(self) -> bytes | None:
        """The next event; None after a while without one. Raises `_Ended` after the last."""
        assert self._left is not None
        if self._next is None:
            self._next = asyncio.create_task(_next_of(self._events))
        time_left = _time_left(self._request)
        timeout = KEEP_ALIVE_S if time_left is None else min(KEEP_ALIVE_S, time_left)
        await asyncio.wait((self._next, self._left), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._left.done():
            raise _ClientLeft
        if self._next.done():
            done, self._next = self._next, None
            return done.result()
        if time_left is not None and time_left <= timeout:
            raise _timed_out(self._request)
        return None

    async def _close(self) -> None:
        """End what still runs: the engine drops the request."""
        await _cancel(*(task for task in (self._next, self._left) if task is not None))
        await self._events.aclose()


class _ClientLeft(Exception):
    """The connection is closed."""


class _Ended(Exception):
    """Stands for StopAsyncIteration, which a task cannot raise."""


async def _next_of(events: AsyncGenerator[bytes, None]) -> bytes:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise _Ended from None


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _time_left(request: Request) -> float | None:
    deadline = request.scope["state"].get("deadline")
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())


def _timed_out(request: Request) -> APIError:
    limit = request.app.state.server.settings.request_timeout_s
    return APIError(504, f"the request took longer than {limit:g} s (--request-timeout)", code="timeout")


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would complain
