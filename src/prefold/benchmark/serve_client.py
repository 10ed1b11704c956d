"""One streamed request of `prefold bench serve`, with the times at which its tokens came."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2 as httpx
import msgspec

from prefold.benchmark.serve_prompts import Prompt

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass
class RequestResult:
    """How one request went. Times are in seconds.

    Attributes:
        prompt_tokens, output_tokens: as the server counted them, or the parts of its stream.
        start_s: when it was sent, on the clock that was given.
        ttft_s: from sending to the first token.
        itl_s: between following parts of the stream, one less than there are parts.
        e2el_s: from sending to the last token.
        error: what went wrong; None if nothing did. `error_kind` is what to count it under.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    start_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    e2el_s: float = 0.0
    text: str = ""
    error: str | None = None
    error_kind: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if there is only one."""
        return None if self.output_tokens < 2 else (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


class RequestFailed(Exception):
    """The server's answer is an error. `kind` is what to count it under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Target:
    """Where requests go, and what all of them say.

    Attributes:
        fields: further fields of every body, such as `ignore_eos`.
    """

    client: httpx.AsyncClient
    model: str
    endpoint: Endpoint = "completions"
    fields: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def body(self, prompt: Prompt) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt.prompt}
        if self.endpoint == "chat":
            assert isinstance(prompt.prompt, str), "chats are texts"
            asked = {"messages": [{"role": "user", "content": prompt.prompt}]}
        return {
            "model": self.model,
            **asked,
            "max_tokens": prompt.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }

    async def send(self, prompt: Prompt) -> RequestResult:
        """Send one request and read its answer to the end; errors are in the result."""
        content = msgspec.json.encode(self.body(prompt))
        result = RequestResult(start_s=self.clock())
        try:
            await self._read(content, result)
        except RequestFailed as error:
            result.error, result.error_kind = str(error), error.kind
        except httpx.HTTPError as error:
            result.error_kind = type(error).__name__
            result.error = str(error) or result.error_kind
        return result

    async def _read(self, content: bytes, result: RequestResult) -> None:
        headers = {"content-type": "application/json"}
        parts, last, done, usage = 0, result.start_s, False, None
        path = PATHS[self.endpoint]
        async with self.client.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != 200:
                raise RequestFailed(f"status {response.status_code}", error_message(await response.aread()))
            async with aclosing(events(response)) as stream:
                async for data in stream:
                    now = self.clock()
                    if data == "[DONE]":
                        done = True
                        continue
                    chunk = _decode(data)
                    usage = chunk.get("usage") or usage
                    text = self._token(chunk)
                    if text is None:
                        continue
                    if parts:
                        result.itl_s.append(now - last)
                    else:
                        result.ttft_s = now - result.start_s
                    parts, last = parts + 1, now
                    result.text += text
        if not done:
            raise RequestFailed("incomplete stream", "the stream ended without [DONE]")
        if not parts:
            raise RequestFailed("no tokens", "the stream held no token")
        result.e2el_s = last - result.start_s
        result.output_tokens = usage["completion_tokens"] if usage else parts
        result.prompt_tokens = usage["prompt_tokens"] if usage else 0

    def _token(self, chunk: dict[str, Any]) -> str | None:
        """The text that a chunk brings; None if it brings no token, but a role or usage."""
        choices = chunk.get("choices")
        if not choices:
            return None
        if self.endpoint == "completions":
            return choices[0].get("text") or ""
        delta = choices[0].get("delta") or {}
        text = delta.get("content") or ""
        return None if "role" in delta and not text and not choices[0].get("finish_reason") else text


async def events(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The data of server-sent events; comments are left out.

    Lines end at line feeds only: `aiter_lines` would also cut texts at U+0085, U+2028 and others.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode("utf-8", "replace")


def _decode(data: str) -> dict[str, Any]:
    """A chunk. RequestFailed if it is an error or no JSON object."""
    try:
        chunk = msgspec.json.decode(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise RequestFailed("no JSON in the stream", data[:200])
    if chunk.get("error"):
        kind = chunk["error"].get("type") if isinstance(chunk["error"], dict) else None
        raise RequestFailed(f"error in the stream: {kind}", error_message(data.encode()))
    return chunk


def error_message(content: bytes) -> str:
    """The server's own words, or the beginning of what it sent."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")
