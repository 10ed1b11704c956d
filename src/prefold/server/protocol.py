"""Bodies of requests: OpenAI's fields, and vLLM's where OpenAI has none.

Unknown fields are refused as OpenAI refuses them, except those in messages, which are the chat template's.
Types are strict: "1" is no number and true is no 1. A whole float such as 2.0 counts as an integer, as it
does in JSON.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from prefold.request import MAX_LOGPROBS

MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_CHOICES = 8192
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)


def _is_ids(value: list[Any]) -> bool:
    return all(type(token_id) is int for token_id in value)


def _check_prompt(value: Any) -> Any:
    """By hand: a union of lists would be tried type by type, over all elements of a long prompt."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if _is_ids(value):
            return value
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"{len(value)} prompts in one request are more than {MAX_PROMPTS}")
        if all(isinstance(entry, str) for entry in value):
            return value
        if all(isinstance(entry, list) and entry and _is_ids(entry) for entry in value):
            return value
    raise ValueError(
        "must be a text, a list of texts, a list of token ids or a list of such lists, not empty"
    )


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompt = Annotated[
    Any,
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
            "description": "text, texts, token ids, or lists of token ids; several are several prompts",
        }
    ),
]

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32), Whole]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Strict):
    name: str
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsField(Strict):
    """vLLM's; exactly one of them."""

    json_schema: Annotated[str | bool | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None


class GenerationRequest(Strict):
    """What both kinds of completion share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_INT64), Whole] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT32), Whole] | None = None
    response_format: ResponseFormat | None = None

    # As in vLLM.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32), Whole] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT32), Whole] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputsField | None = None

    # OpenAI's bookkeeping: accepted and ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _check_streaming(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. Several prompts give choices numbered prompt * n + sample."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    best_of: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    suffix: str | None = None


class ContentPart(BaseModel):
    """A part of a message; only texts are understood."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """A message; roles and fields that are not here go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, Field(min_length=1)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ToolFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    name: Annotated[str, Field(min_length=1)]


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class TemplateFields(Strict):
    """What goes into a chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_ending(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message takes add_generation_prompt=false")
        return self


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """Body of /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_INT32), Whole] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs takes logprobs=true")
        return self


class TokenizeTextRequest(Strict):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(TemplateFields):
    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


def _tokenize_form(value: Any) -> str:
    return "chat form" if isinstance(value, dict) and "messages" in value else "text form"


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("text form")] | Annotated[TokenizeChatRequest, Tag("chat form")],
    Discriminator(_tokenize_form),
]
"""Body of /tokenize."""


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]
