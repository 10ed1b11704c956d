"""Structured outputs -> grammars of llguidance, and whether one can be compiled. No torch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from prefold.request import StructuredOutputs

JSON_OPTIONS: Any = {"whitespace_pattern": r"\n?[ \t]{1,40}|\n"}
"""At most a line end and an indentation between tokens: a model that is lost writes blanks for ever."""


MAX_MESSAGE_CHARS = 1000

STACK_BYTES = 512 << 20
"""Compiling recurses from rule to rule, up to 8 KB for each. Memory that is not used takes none."""

T = TypeVar("T")


def run_deep(work: Callable[[], T]) -> Future[T]:
    """The result of `work`, from a thread with a stack that no grammar exhausts."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(0 if before == STACK_BYTES else before)
    return future


def grammar_limits() -> LLParserLimits:
    """llguidance's own limits; errors are one line rather than a picture of the parser."""
    return LLParserLimits(verbose_errors=False)


def grammar_text(structured: StructuredOutputs) -> str:
    """In the notation that LLMatcher takes. It need not be valid."""
    if structured.json_object:
        return _of_schema('{"type": "object"}')
    if structured.json_schema is not None:
        return _of_schema(structured.json_schema)
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choice)
    return LLMatcher.grammar_from_lark(f"start: {choices}")


def _of_schema(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, None, JSON_OPTIONS)


def check_grammar(structured: StructuredOutputs) -> None:
    """Takes milliseconds, for large schemas more. ValueError with the reason unless it can be compiled.

    Its first step is tried as well, on bytes: a grammar without any text, or with too many beginnings, fails
    only there.
    """

    def validate() -> str:
        text, limits = grammar_text(structured), grammar_limits()
        refused, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
        if refused:
            return messages[0]
        matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()

    try:
        message = run_deep(validate).result()
    except (ValueError, TypeError) as error:
        message = str(error)
    if message:
        raise ValueError(f"structured_outputs cannot be used: {message.strip()[:MAX_MESSAGE_CHARS]}")
