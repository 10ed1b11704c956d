"""/v1/completions."""

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
from prefold.server.logprobs import Entry, completion_logprobs, prompt_logprobs
from prefold.server.progress import Shown, UsageCounter, fingerprint, token_text
from prefold.server.prompts import check_length, encode_prompts
from prefold.server.protocol import CompletionRequest
from prefold.server.responses import Completion, CompletionChoice, CompletionLogprobs, FinishReason, Usage
from prefold.server.running import EngineRequest, EventStream, run_engine, run_to_end
from prefold.server.sampling import completion_params
from prefold.server.settings import SamplingDefaults
from prefold.server.state import ServerState, state_of
from prefold.server.structured import check_structured, structured_field


def completions_router() -> APIRouter:
    router = APIRouter(route_class=JSONRoute)
    router.post(
        "/v1/completions",
        response_model=Completion,
        responses=error_responses(streams=True),
        summary="Continue one or several prompts",
    )(create_completion)
    return router


async def create_completion(body: CompletionRequest, request: Request) -> Response:
    state = state_of(request)
    engine = state.serving_engine()
    state.check_model(body.model)
    params = completion_params(body, state.settings.defaults or SamplingDefaults())
    await check_structured(engine, params, structured_field(body))
    prompts = await encode_prompts(engine, body.prompt, body.add_special_tokens)
    check_length(prompts, params.max_tokens, engine.config.scheduler.max_model_len)
    completion_id = f"cmpl-{uuid.uuid4().hex}"
    ids = [completion_id] if len(prompts) == 1 else [f"{completion_id}-{i}" for i in range(len(prompts))]
    trace_parent = state.trace_parent(request.headers)
    requests = [
        EngineRequest(engine_id, token_ids, params, text, trace_parent)
        for engine_id, (text, token_ids) in zip(ids, prompts, strict=True)
    ]
    writer = _Writer(body, state, engine, completion_id)
    if body.stream:
        return await EventStream(request, writer.events(requests)).open()
    return answer(await run_to_end(request, writer.whole(requests)))


class _Writer:
    """Makes the response of one request out of the engine's outputs."""

    def __init__(
        self, body: CompletionRequest, state: ServerState, engine: AsyncLLM, completion_id: str
    ) -> None:
        self._body = body
        self._state = state
        self._engine = engine
        self._id = completion_id
        self._created = int(time.time())
        self._n = body.n or 1
        self._num_top = body.logprobs
        self._echo = bool(body.echo)
        self._tokens_of = token_text(engine)
        self._fingerprint = fingerprint(engine)

    async def whole(self, requests: list[EngineRequest]) -> Completion:
        latest: dict[int, RequestOutput] = {}
        async with aclosing(run_engine(self._state, self._engine, requests)) as outputs:
            async for index, output in outputs:
                latest[index] = output
        usage = UsageCounter(len(requests))
        choices: list[CompletionChoice] = []
        for index in sorted(latest):
            usage.see(index, latest[index])
            for sample in latest[index].outputs:
                choice = await self._choice(index, latest[index], sample, Shown())
                if self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(latest[index].prompt_logprobs or [])
                choices.append(choice)
        return self._response(choices, usage.total())

    async def events(self, requests: list[EngineRequest]) -> AsyncGenerator[bytes, None]:
        usage = UsageCounter(len(requests), self._body.stream_options)
        shown = {(i, s): Shown() for i in range(len(requests)) for s in range(self._n)}
        async with aclosing(run_engine(self._state, self._engine, requests)) as outputs:
            async for index, output in outputs:
                usage.see(index, output)
                for sample in output.outputs:
                    at = shown[index, sample.index]
                    if at.finished or not at.is_news(sample):
                        continue
                    first = not at.started
                    choice = await self._choice(index, output, sample, at)
                    if first and self._body.prompt_logprobs is not None:
                        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
                    chunk = self._response([choice])
                    if usage.wanted:
                        chunk["usage"] = usage.so_far()
                    yield msgspec.json.encode(chunk)
        if usage.wanted:
            yield msgspec.json.encode(self._response([], usage.total()))

    def _response(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        response = Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._state.settings.model_name,
            system_fingerprint=self._fingerprint,
            choices=choices,
        )
        if usage is not None:
            response["usage"] = usage
        return response

    async def _choice(
        self, prompt: int, output: RequestOutput, sample: CompletionOutput, at: Shown
    ) -> CompletionChoice:
        """What a sample has to say since `at`, which moves on; the echo comes first."""
        text, token_ids = sample.text[at.num_chars :], sample.token_ids[at.num_tokens :]
        entries: list[Entry] = list((sample.logprobs or [])[at.num_tokens :])
        if self._echo and not at.started:
            text = await self._prompt_text(output) + text
            token_ids = output.prompt_token_ids + token_ids
            entries = [*(output.prompt_logprobs or []), *entries]
        logprobs: CompletionLogprobs | None = None
        if self._num_top is not None:
            logprobs = completion_logprobs(token_ids, entries, self._num_top, self._tokens_of, at.offset)
            at.offset += sum(len(token) for token in logprobs["tokens"])
        at.move_to(sample)
        return CompletionChoice(
            index=prompt * self._n + sample.index,
            text=text,
            logprobs=logprobs,
            finish_reason=cast("FinishReason | None", sample.finish_reason),
            stop_reason=sample.stop_reason,
        )

    async def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._engine.tokenizer is None:
            return output.prompt or ""
        return await self._engine.decode(output.prompt_token_ids)
