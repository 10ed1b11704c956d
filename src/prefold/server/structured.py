"""What a request says its text must look like."""

from __future__ import annotations

import asyncio
import json

import msgspec

from prefold.engine.async_engine import AsyncLLM
from prefold.grammar import check_grammar
from prefold.request import SamplingParams, StructuredOutputs
from prefold.server.errors import APIError
from prefold.server.protocol import GenerationRequest

MAX_GRAMMAR_CHARS = 1 << 20


def structured_outputs(body: GenerationRequest) -> StructuredOutputs | None:
    """From `response_format` or vLLM's `structured_outputs`. APIError 400 for both, or what is no JSON."""
    form, given = body.response_format, body.structured_outputs
    has_form = form is not None and form.type != "text"
    if has_form and given is not None:
        raise APIError(
            400, "response_format and structured_outputs exclude each other", param="structured_outputs"
        )
    if form is not None and form.type == "json_object":
        return StructuredOutputs(json_object=True)
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.json_schema is None:
            raise APIError(
                400, "response_format json_schema takes json_schema.schema", param="response_format"
            )
        return StructuredOutputs(json_schema=json.dumps(form.json_schema.json_schema))
    if given is None:
        return None
    schema = given.json_schema
    try:
        return StructuredOutputs(
            json_schema=schema if schema is None or isinstance(schema, str) else json.dumps(schema),
            json_object=bool(given.json_object),
            regex=given.regex,
            choice=given.choice or (),
            grammar=given.grammar,
        )
    except ValueError as error:
        raise APIError(400, str(error), param="structured_outputs") from None


async def check_structured(engine: AsyncLLM, params: SamplingParams, param: str) -> None:
    """APIError 400, naming the field `param`, unless the grammar can be compiled. Tries that in a thread."""
    structured = params.structured_outputs
    if structured is None:
        return
    if engine.tokenizer is None:
        raise APIError(400, "this model has no tokenizer, so its text has no structure", param=param)
    size = sum(len(entry) for entry in _texts(structured))
    if size > MAX_GRAMMAR_CHARS:
        raise APIError(400, f"a grammar of {size} characters is above {MAX_GRAMMAR_CHARS}", param=param)
    try:
        await asyncio.to_thread(check_grammar, structured)
    except ValueError as error:
        message = str(error).replace("structured_outputs", param, 1)
        raise APIError(400, message, param=param) from None


def _texts(structured: StructuredOutputs) -> list[str]:
    values = msgspec.structs.astuple(structured)
    return [value for value in values if isinstance(value, str)] + list(structured.choice)


def structured_field(body: GenerationRequest) -> str:
    """The field of a request that its structured output comes from, for messages."""
    has_form = body.response_format is not None and body.response_format.type != "text"
    return "response_format" if has_form else "structured_outputs"
