"""What a request says its text must look like."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prefold.engine.async_engine import AsyncLLM
from prefold.grammar import check_grammar
from prefold.request import SamplingParams, StructuredOutputs
from prefold.server.errors import APIError
from prefold.server.protocol import GenerationRequest


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
        return of_schema(form.json_schema.json_schema, "response_format")
    if given is None:
        return None
    schema = given.json_schema
    if schema is not None and not isinstance(schema, str):
        schema = schema_text(schema, "structured_outputs")
    try:
        return StructuredOutputs(
            json_schema=schema,
            json_object=bool(given.json_object),
            regex=given.regex,
            choice=given.choice or (),
            grammar=given.grammar,
        )
    except ValueError as error:
        raise APIError(400, str(error), param="structured_outputs") from None


def of_schema(schema: Any, param: str) -> StructuredOutputs:
    """APIError 400, naming the field `param`, for one that is too large."""
    try:
        return StructuredOutputs(json_schema=schema_text(schema, param))
    except ValueError as error:
        raise APIError(400, str(error).replace("structured_outputs", param, 1), param=param) from None


def schema_text(schema: Any, param: str) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise APIError(400, f"{param} is nested too deeply", param=param) from None


async def check_structured(engine: AsyncLLM, params: SamplingParams, param: str) -> None:
    """APIError 400, naming the field `param`, unless the grammar can be compiled. Tries that in a thread."""
    structured = params.structured_outputs
    if structured is None:
        return
    if engine.tokenizer is None:
        raise APIError(400, "this model has no tokenizer, so its text has no structure", param=param)
    try:
        await asyncio.to_thread(check_grammar, structured)
    except ValueError as error:
        message = str(error).replace("structured_outputs", param, 1)
        raise APIError(400, message, param=param) from None


def structured_field(body: GenerationRequest) -> str:
    """The field of a request that its structured output comes from, for messages."""
    has_form = body.response_format is not None and body.response_format.type != "text"
    return "response_format" if has_form else "structured_outputs"
