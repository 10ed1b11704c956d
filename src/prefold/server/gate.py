"""What every request passes: its id, key, size and time limits, and the end of every error."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefold.server import dashboard
from prefold.server.errors import APIError, internal_error
from prefold.server.settings import MIB
from prefold.server.state import ServerState

logger = logging.getLogger("prefold")

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"}) | dashboard.OPEN_PATHS
"""Need no API key: those who ask have none, or, of the dashboard, are about to be asked for it."""
BODY_SILENCE_S = 60.0
"""A body of which nothing arrives for that long is given up."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [_digest(key.encode()) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        timeout = self._state.settings.request_timeout_s
        request_id = _request_id(headers)
        scope["state"] = {
            **scope.get("state", {}),
            "request_id": request_id,
            "deadline": None if timeout is None else asyncio.get_running_loop().time() + timeout,
        }
        response = _Response(send, request_id)
        start = time.monotonic()
        self._state.enter()
        try:
            self._check_key(scope, headers)
            if (coding := headers.get("content-encoding", "identity")).lower() != "identity":
                raise APIError(
                    415, f"a body in content-encoding {coding[:40]!r} is not read: send it as it is"
                )
            if scope["method"] == "HEAD":  # as GET is; the web server leaves the body out
                scope = {**scope, "method": "GET"}
            await self._app(scope, self._limited(headers, receive, scope["state"]["deadline"]), response.send)
        except APIError as error:
            await self._answer(error, scope, receive, response)
        except Exception:
            logger.exception("request %s failed", request_id)
            await self._answer(internal_error(request_id), scope, receive, response)
        finally:
            self._state.leave()
            self._note(scope, response, time.monotonic() - start)

    async def _answer(self, error: APIError, scope: Scope, receive: Receive, response: _Response) -> None:
        if response.status is not None:
            raise error  # too late for an answer: the server closes the connection
        await error.response()(scope, receive, response.send)

    def _note(self, scope: Scope, response: _Response, seconds: float) -> None:
        status = response.status or 499
        if status >= 400:
            self._state.recorder.on_rejected(status)
        if self._state.settings.log_requests:
            line = f"{scope['method']} {scope['path']} {status} {seconds:.3f} s {response.request_id}"
            print(line, flush=True)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))
        # All of them, always: the time says nothing about which is close.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            given = "a wrong API key was given" if key else "no API key was given"
            raise APIError(
                401,
                f"{given}; send one as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _limited(self, headers: Headers, receive: Receive, deadline: float | None) -> Receive:
        """`receive` that refuses too much body, by its header or while it comes, and too slow ones."""
        limit = self._state.settings.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            until = asyncio.get_running_loop().time() + BODY_SILENCE_S
            try:
                async with asyncio.timeout_at(until if deadline is None else min(until, deadline)):
                    message = await receive()
            except TimeoutError:
                raise APIError(408, "the request's body did not arrive in time") from None
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            complete = not message.get("more_body", False)
            return message

        return limited


class _Response:
    """Watches what is sent: puts the request's id into it and remembers its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys."""
    return hashlib.sha256(key).digest()


def _request_id(headers: Headers) -> str:
    """The client's, if it is a short printable word; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _too_large(limit: int) -> APIError:
    message = f"the body is longer than {limit / MIB:g} MiB (--max-body-mb)"
    # What is left of the body is not read.
    return APIError(413, message, headers={"connection": "close"})
