"""An `AsyncLLM` that computes nothing: it continues every prompt with its own tokens, over and over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from prefold.engine.async_engine import EngineStatus, QueueFullError
from prefold.engine.errors import EngineDeadError
from prefold.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams

MAX_MODEL_LEN = 64


class FakeTokenizer:
    """A character is a token."""

    chat_template: str | None = None

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        return chr(token_id).encode("utf-8", "replace")


class FakeEngine:
    """Attributes that tests set: `answer` (every prompt is continued with that, and no more), `gate`
    (cleared, generation waits before every token), `failure`, `refusal` (raised by the next requests),
    `max_waiting`. `running` and `aborted` are request ids."""

    def __init__(self) -> None:
        self.status = EngineStatus.READY
        self.failure: str | None = None
        self.refusal: Exception | None = None
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.config: Any = SimpleNamespace(
            scheduler=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            model=SimpleNamespace(path="/models/fake", vocab_size=0x110000),
            digest=lambda: "0123456789abcdef",
        )
        self.answer: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = asyncio.Event()
        self.is_shut_down = False
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.template_calls: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, prompt: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        self.params.append(params)
        self.prompts.append(prompt_token_ids)
        if self.refusal is not None:
            raise self.refusal
        if not prompt_token_ids:
            raise ValueError(f"request {request_id}: the prompt is empty")
        if max(prompt_token_ids) >= self.config.model.vocab_size:
            raise ValueError(f"request {request_id}: a token is outside the vocabulary")
        max_tokens = MAX_MODEL_LEN - len(prompt_token_ids) if params.max_tokens is None else params.max_tokens
        if self.answer is not None:
            max_tokens = min(params.max_tokens or len(self.answer), len(self.answer))
        self.running.add(request_id)
        try:
            for num in range(0 if max_tokens == 0 else 1, max_tokens + 1):
                await self.gate.wait()
                await asyncio.sleep(0)
                if self.failure is not None:
                    raise EngineDeadError(self.failure)
                output = _output(request_id, prompt, prompt_token_ids, params, num, num == max_tokens)
                yield output if self.answer is None else self._answered(output, num)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    def _answered(self, output: RequestOutput, num: int) -> RequestOutput:
        assert self.answer is not None
        for sample in output.outputs:
            sample.text, sample.token_ids = self.answer[:num], [ord(c) for c in self.answer[:num]]
            if sample.logprobs is not None:
                sample.logprobs = [_logprobs(token_id, 0) for token_id in sample.token_ids]
            if sample.finish_reason is not None and num == len(self.answer):
                sample.finish_reason = "stop"
        return output

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    async def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id < 0x110000)

    async def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.template_calls.append((messages, options))
        if messages[0]["role"] == "refused":
            raise ValueError("the chat template refuses these messages: no such role")
        return "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages)

    async def wait_dead(self) -> str:
        await self.dead.wait()
        return self.failure or "dead"

    async def drain(self, timeout_s: float) -> None:
        """As the engine does: new requests are refused, running ones end or are aborted after the time."""
        self.refusal = EngineDeadError("shutting down")
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            self.failure = "the request was aborted"
            self.gate.set()

    async def shutdown(self) -> None:
        self.is_shut_down = True

    async def check_health(self, timeout_s: float = 5.0) -> None:
        if self.failure is not None:
            raise EngineDeadError(self.failure)


def queue_full() -> QueueFullError:
    return QueueFullError("8 requests are waiting, as many as --max-waiting allows")


def _logprobs(token_id: int, num: int) -> dict[int, Logprob]:
    """The token itself is the likeliest, then the following code points."""
    return {token_id + i: Logprob(-0.5 * (i + 1), i + 1, chr(token_id + i)) for i in range(max(num, 1))}


def _output(
    request_id: str, prompt: str | None, ids: list[int], params: SamplingParams, num: int, finished: bool
) -> RequestOutput:
    tokens = [ids[i % len(ids)] for i in range(num)]
    samples = [
        CompletionOutput(
            index=index,
            text="".join(map(chr, tokens)),
            token_ids=tokens,
            logprobs=None if params.logprobs is None else [_logprobs(t, params.logprobs) for t in tokens],
            finish_reason="length" if finished else None,
        )
        for index in range(params.n)
    ]
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        prompt_logprobs = [None, *(_logprobs(t, params.prompt_logprobs) for t in ids[1:])]
    metrics = RequestMetrics(num_cached_tokens=2)
    return RequestOutput(request_id, prompt, ids, samples, finished, prompt_logprobs, metrics)
