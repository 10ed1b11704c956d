"""Requests -> `SamplingParams`."""

from __future__ import annotations

import msgspec

from prefold.request import SamplingParams, StructuredOutputs
from prefold.server.errors import APIError, from_engine
from prefold.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from prefold.server.settings import SamplingDefaults
from prefold.server.structured import structured_outputs
from prefold.server.tools import ToolUse

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; a chat goes on until max_model_len."""


def completion_params(body: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """APIError 400 for what cannot be done."""
    if body.suffix:
        raise APIError(400, "suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise APIError(
            400, f"best_of={body.best_of} is only supported if equal to n={body.n or 1}", param="best_of"
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        # Echoed tokens come with theirs.
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return _params(body, defaults, max_tokens, body.logprobs, prompt_logprobs, structured_outputs(body))


def chat_params(body: ChatCompletionRequest, defaults: SamplingDefaults, tools: ToolUse) -> SamplingParams:
    """APIError 400 for what cannot be done. What tool_choice demands comes before a response_format."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    structured = tools.structured or structured_outputs(body)
    params = _params(body, defaults, max_tokens, logprobs, body.prompt_logprobs, structured)
    if tools.keeps_special and body.skip_special_tokens is None:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def _params(
    body: GenerationRequest,
    defaults: SamplingDefaults,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    given = {
        "n": body.n,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "top_k": defaults.top_k if body.top_k is None else body.top_k,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "min_p": defaults.min_p if body.min_p is None else body.min_p,
        "repetition_penalty": (
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        "seed": body.seed,
        "min_tokens": body.min_tokens,
        "stop": body.stop,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()} or None,
        "skip_special_tokens": body.skip_special_tokens,
        "structured_outputs": structured,
    }
    try:
        return SamplingParams(
            max_tokens=max_tokens, **{name: value for name, value in given.items() if value is not None}
        )
    except ValueError as error:
        refused = from_engine(error)
        assert refused is not None
        raise refused from None
