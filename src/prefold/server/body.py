"""How bodies are read and answers written."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from prefold.server.errors import APIError
from prefold.server.responses import ErrorBody


class StrictRequest(Request):
    """Reads JSON as the standard has it: UTF-8, no NaN, no half surrogates, no endless numbers or nesting."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return msgspec.json.decode(body)
        except RecursionError:
            raise APIError(400, "the body is nested too deeply") from None
        except ValueError as error:
            raise APIError(400, f"the body is no valid JSON: {error}") from None


class JSONRoute(APIRoute):
    """A route whose body is read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict_handler


def answer(content: Any | None) -> Response:
    """A JSON response; None is one that nobody waits for any more."""
    if content is None:
        return Response(status_code=499)
    return Response(msgspec.json.encode(content), media_type="application/json")


def error_responses(streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The part of an OpenAPI operation that describes its errors, and that it may stream."""
    responses: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is"},
        "5XX": {"model": ErrorBody, "description": "The server cannot serve it, or not now"},
    }
    if streams:
        event = {"schema": {"type": "string"}, "example": "data: {...}\n\ndata: [DONE]\n\n"}
        responses[200] = {"content": {"text/event-stream": event}}
    return responses
