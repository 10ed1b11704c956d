"""Prompts and conversations -> token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from prefold.engine.async_engine import AsyncLLM
from prefold.server.errors import APIError
from prefold.server.protocol import ChatMessage, TemplateFields
from prefold.server.settings import ServerSettings

Prompt = tuple[str | None, list[int]]
"""(text, token ids); no text where ids were given."""


async def encode_prompts(engine: AsyncLLM, prompt: Any, add_special_tokens: bool | None) -> list[Prompt]:
    """The prompts of a completion request, which `protocol.Prompt` has checked."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    return [
        (entry, await encode(engine, entry, add_special_tokens is not False))
        if isinstance(entry, str)
        else (None, entry)
        for entry in prompt
    ]


async def encode(engine: AsyncLLM, text: str, add_special_tokens: bool) -> list[int]:
    if engine.tokenizer is None:
        raise APIError(
            400, "this model has no tokenizer: give prompts as token ids to /v1/completions", param="prompt"
        )
    return await engine.encode(text, add_special_tokens=add_special_tokens)


async def encode_chat(
    engine: AsyncLLM, body: TemplateFields, settings: ServerSettings, add_special_tokens: bool
) -> Prompt:
    """A conversation in the form of the model's chat template.

    Raises:
        APIError: 400, the model has no template, or the template refuses the conversation.
    """
    if engine.tokenizer is None:
        raise APIError(400, "this model has no tokenizer, so it cannot chat", param="messages")
    messages = [_for_template(message) for message in body.messages]
    try:
        text = await engine.apply_chat_template(
            messages,
            tools=None if not body.tools else [tool.model_dump(exclude_unset=True) for tool in body.tools],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=settings.chat_template,
            template_kwargs=body.chat_template_kwargs,
        )
    except ValueError as error:
        raise APIError(400, str(error), param="messages") from error
    return text, await engine.encode(text, add_special_tokens=add_special_tokens)


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """What templates expect: content as one text, arguments of tool calls as objects."""
    fields = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        fields["content"] = "\n".join(_text_of(part.type, part.text) for part in message.content)
    elif message.content is None:
        fields["content"] = ""
    for call in fields.get("tool_calls") or ():
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return fields


def _text_of(kind: str, text: str | None) -> str:
    if kind != "text":
        raise APIError(400, f"content of type {kind[:50]!r} is not supported: only text is", param="messages")
    if text is None:
        raise APIError(400, "content of type 'text' takes a text", param="messages")
    return text


def _arguments(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text  # a model may have written no JSON; the template shows it as it is


def check_length(prompts: Sequence[Prompt], max_tokens: int | None, max_model_len: int) -> None:
    """APIError 400 with the numbers if a prompt and its output are longer than the model allows."""
    for _, token_ids in prompts:
        num = len(token_ids)
        if max_tokens is None and num >= max_model_len:
            wanted = f"your prompt has {num} tokens, which leaves none for the output"
        elif max_tokens is not None and num + max_tokens > max_model_len:
            wanted = f"you asked for {num + max_tokens} ({num} of the prompt, {max_tokens} for the output)"
        else:
            continue
        raise APIError(
            400,
            f"This model's maximum context length is {max_model_len} tokens; {wanted}",
            param="prompt",
            code="context_length_exceeded",
        )
