"""Requests -> `SamplingParams`."""

from __future__ import annotations

from prefold.request import SamplingParams
from prefold.server.errors import APIError, from_engine
from prefold.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from prefold.server.settings import SamplingDefaults

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; a chat goes on until max_model_len."""


def completion_params(body: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """APIError 400 for what cannot be done."""
    _refuse_structured_output(body)
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
    return _params(body, defaults, max_tokens, body.logprobs, prompt_logprobs)


def chat_params(body: ChatCompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """APIError 400 for what cannot be done."""
    _refuse_structured_output(body)
    if body.tools and body.tool_choice not in (None, "none", "auto"):
        raise APIError(400, "tool_choice other than none and auto is not supported yet", param="tool_choice")
    if not body.tools and body.tool_choice not in (None, "none"):
        raise APIError(400, "tool_choice is only allowed when tools are given", param="tool_choice")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _params(body, defaults, max_tokens, logprobs, body.prompt_logprobs)


def _refuse_structured_output(body: GenerationRequest) -> None:
    if body.response_format is not None and body.response_format.type != "text":
        kind = body.response_format.type
        raise APIError(400, f"response_format {kind} is not supported yet", param="response_format")


def _params(
    body: GenerationRequest,
    defaults: SamplingDefaults,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
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
    }
    try:
        return SamplingParams(
            max_tokens=max_tokens, **{name: value for name, value in given.items() if value is not None}
        )
    except ValueError as error:
        refused = from_engine(error)
        assert refused is not None
        raise refused from None
