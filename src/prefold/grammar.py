"""Structured outputs -> grammars of llguidance, and whether one can be compiled. No torch."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from prefold.request import StructuredOutputs

JSON_OPTIONS: Any = {"whitespace_pattern": r"\n?[ \t]{1,40}|\n"}
"""At most a line end and an indentation between tokens: a model that is lost writes blanks for ever."""


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
    try:
        text = grammar_text(structured)
        refused, messages = LLMatcher.validate_grammar_with_warnings(text, limits=grammar_limits())
        if not refused:
            matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=grammar_limits())
            if not matcher.is_error():
                matcher.compute_bitmask()
            refused, messages = matcher.is_error(), [matcher.get_error()]
    except (ValueError, TypeError) as error:
        refused, messages = True, [str(error)]
    if refused:
        raise ValueError(f"structured_outputs cannot be used: {messages[0].strip()}")
