"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec
from fastapi import APIRouter, Request, Response

from prefold.engine.async_engine import AsyncLLM
from prefold.request import CompletionOutput, RequestOutput
from prefold.server.body import JSONRoute, answer, error_responses
from prefold.server.logprobs import chat_logprobs, prompt_logprobs
from prefold.server.progress import Shown, UsageCounter, fingerprint, token_bytes, token_text
from prefold.server.prompts import check_length, encode_chat
from prefold.server.protocol import ChatCompletionRequest
from prefold.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishReason,
    Usage,
)
from prefold.server.running import EngineRequest, EventStream, run_engine, run_to_end
from prefold.server.sampling import chat_params
from prefold.server.settings import SamplingDefaults
from prefold.server.state import ServerState, state_of
from prefold.server.structured import check_structured, structured_field
from prefold.server.tools import AnswerReader, ToolUse, tool_use


def chat_router() -> APIRouter:
    router = APIRouter(route_class=JSONRoute)
    router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=error_responses(streams=True),
        summary="Write the next message of a conversation",
    )(create_chat_completion)
    return router


async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    state = state_of(request)
    engine = state.serving_engine()
    state.check_model(body.model)
    template = state.settings.chat_template
    if template is None and engine.tokenizer is not None:
        template = engine.tokenizer.chat_template
    tools = tool_use(body, state.settings.tool_call_parser, template)
    params = chat_params(body, state.settings.defaults or SamplingDefaults(), tools)
    await check_structured(engine, params, structured_field(body) if tools.structured is None else "tools")
    text, token_ids = await encode_chat(engine, body, state.settings, body.add_special_tokens is True)
    check_length([(text, token_ids)], params.max_tokens, engine.config.scheduler.max_model_len)
    trace_parent = state.trace_parent(request.headers)
    engine_request = EngineRequest(f"chatcmpl-{uuid.uuid4().hex}", token_ids, params, text, trace_parent)
    writer = _Writer(body, state, engine, engine_request, tools)
    if body.stream:
        return await EventStream(request, writer.events()).open()
    return answer(await run_to_end(request, writer.whole()))


class _Writer:
    """Makes the response of one request out of the engine's outputs."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        state: ServerState,
        engine: AsyncLLM,
        engine_request: EngineRequest,
        tools: ToolUse,
    ) -> None:
        self._body = body
        self._state = state
        self._engine = engine
        self._request = engine_request
        self._tools = tools
        self._created = int(time.time())
        self._fingerprint = fingerprint(engine)
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None

    async def whole(self) -> ChatCompletion:
        latest: RequestOutput | None = None
        async with aclosing(run_engine(self._state, self._engine, [self._request])) as outputs:
            async for _, output in outputs:
                latest = output
        assert latest is not None, "a request ends with an output"
        usage = UsageCounter(1)
        usage.see(0, latest)
        response = ChatCompletion(
            id=self._request.engine_id,
            object="chat.completion",
            created=self._created,
            model=self._state.settings.model_name,
            system_fingerprint=self._fingerprint,
            choices=[self._choice(sample) for sample in latest.outputs],
            usage=usage.total(),
        )
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(latest.prompt_logprobs or [])
        return response

    def _choice(self, sample: CompletionOutput) -> ChatChoice:
        reader = self._tools.reader()
        message = reader.message(sample.text)
        reason = finish_reason(sample, reader)
        assert reason is not None, "the answer is there"
        return ChatChoice(
            index=sample.index,
            message=message,
            logprobs=self._logprobs(sample, 0),
            finish_reason=reason,
            stop_reason=sample.stop_reason,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        usage = UsageCounter(1, self._body.stream_options)
        shown = [(Shown(), self._tools.reader()) for _ in range(self._request.params.n)]
        async with aclosing(run_engine(self._state, self._engine, [self._request])) as outputs:
            async for _, output in outputs:
                usage.see(0, output)
                for sample in output.outputs:
                    for choice in self._chunk_choices(sample, *shown[sample.index]):
                        chunk = self._chunk([choice])
                        if usage.wanted:
                            chunk["usage"] = usage.so_far()
                        yield msgspec.json.encode(chunk)
        if usage.wanted:
            yield msgspec.json.encode(self._chunk([], usage.total()))

    def _chunk_choices(
        self, sample: CompletionOutput, at: Shown, reader: AnswerReader
    ) -> list[ChatChunkChoice]:
        """What a sample has to say since `at`, which moves on. The first is its role.

        While it is not known whether a text is the beginning of a tool call, there is nothing to say.
        """
        if at.finished or not at.is_news(sample):
            return []
        deltas: list[Delta] = []
        if not at.started:
            deltas.append(Delta(role="assistant", content=""))
            at.started = True
        deltas += reader.read(sample.text, sample.finish_reason is not None)
        if sample.finish_reason is not None and (not deltas or "role" in deltas[-1]):
            deltas.append(Delta())
        choices = [
            ChatChunkChoice(index=sample.index, delta=delta, logprobs=None, finish_reason=None)
            for delta in deltas
        ]
        if not choices or "role" in deltas[-1]:
            return choices
        choices[-1]["logprobs"] = self._logprobs(sample, at.num_tokens)
        choices[-1]["finish_reason"] = finish_reason(sample, reader)
        if sample.finish_reason is not None:
            choices[-1]["stop_reason"] = sample.stop_reason
        at.move_to(sample)
        return choices

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        chunk = ChatChunk(
            id=self._request.engine_id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._state.settings.model_name,
            system_fingerprint=self._fingerprint,
            choices=choices,
        )
        if usage is not None:
            chunk["usage"] = usage
        return chunk

    def _logprobs(self, sample: CompletionOutput, start: int) -> ChatLogprobs | None:
        """Of the tokens from number `start` on."""
        if self._num_top is None:
            return None
        return chat_logprobs(
            sample.token_ids[start:],
            (sample.logprobs or [])[start:],
            self._num_top,
            token_text(self._engine),
            token_bytes(self._engine),
        )


def finish_reason(sample: CompletionOutput, reader: AnswerReader) -> FinishReason | None:
    """None while it goes on. An answer that holds calls and ended by itself has ended for them."""
    if sample.finish_reason == "stop" and reader.has_calls:
        return "tool_calls"
    return cast("FinishReason | None", sample.finish_reason)
