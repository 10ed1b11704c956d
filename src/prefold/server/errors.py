"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from prefold.engine.async_engine import QueueFullError
from prefold.engine.errors import EngineDeadError

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Status -> type; other statuses are `invalid_request_error`."""

RETRY_AFTER_S = "1"


class APIError(HTTPException):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: for the client; complete sentences are not needed, numbers are.
        param: the field of the request that it is about.
        code: for programs, such as `context_length_exceeded`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        content = msgspec.json.encode(self.body())
        return Response(content, self.status_code, self.headers, media_type="application/json")


def unavailable(message: str) -> APIError:
    """503: now, but perhaps not later."""
    return APIError(503, message, code="service_unavailable", headers={"retry-after": RETRY_AFTER_S})


def internal_error(request_id: str) -> APIError:
    """500 without any detail, which is in the log under the request's id."""
    return APIError(500, f"internal error; the server's log says more under request id {request_id}")


def from_engine(error: Exception, engine_id: str = "") -> APIError | None:
    """The answer to what the engine raised; None for what should not have happened.

    Args:
        engine_id: the engine's name for the request, which is left out of messages.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"retry-after": RETRY_AFTER_S}
        return APIError(429, str(error), code="queue_full", headers=headers)
    if isinstance(error, EngineDeadError):
        return unavailable(str(error))
    if isinstance(error, ValueError):
        message = str(error).removeprefix(f"request {engine_id}: ")
        named = re.match(r"([a-z_]+)(?==| holds| is |\[)", message)
        return APIError(400, message, param=named.group(1) if named else None)
    return None


def add_error_handlers(app: FastAPI) -> None:
    """Every error that is raised inside the app gets OpenAI's form."""
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, APIError):
        return error.response()
    # Raised by the framework: unknown path, wrong method.
    what = {
        404: f"no such path: {request.method} {request.url.path}",
        405: f"{request.method} is not allowed for {request.url.path}",
    }.get(error.status_code, str(error.detail) or HTTPStatus(error.status_code).phrase)
    return APIError(error.status_code, what, headers=error.headers).response()


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


def from_validation(errors: Sequence[Any]) -> APIError:
    """400 from pydantic's list; the message names the first field and all that is wrong with it."""
    first, path = errors[0], _path(errors[0])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:200]
        return APIError(400, f"Unrecognized request argument supplied: {name}", param=name)
    if first["type"] == "missing" and path:
        return APIError(400, f"you must provide a {'.'.join(path)} parameter", param=path[0])
    if first["type"] == "value_error" and not path:
        return APIError(400, _reason(first))
    if not path:
        return APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    reasons = dict.fromkeys(_reason(error) for error in errors if _path(error)[:1] == path[:1])
    return APIError(400, f"{'.'.join(path)}: {'; or: '.join(list(reasons)[:4])}", param=path[0])


def _path(error: Any) -> list[str]:
    """Names and indices of the fields on the way to the wrong one, without pydantic's names of types."""
    parts = [str(part) for part in error["loc"] if part != "body"]
    return [part for part in parts if part.isdigit() or (part.isidentifier() and not part[0].isupper())]


def _reason(error: Any) -> str:
    return error["msg"].removeprefix("Value error, ")
