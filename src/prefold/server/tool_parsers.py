"""How models write tool calls, by family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefold.server.tool_text import CallText, Event, Reading, loads, read_call, read_calls

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a function -> JSON schema of its parameters."""

BAR = "\N{FULLWIDTH VERTICAL LINE}"
"""In DeepSeek's special tokens."""

Grammar = Callable[[CallText, Tools], Reading[None]]


class ToolParser:
    """Splits one answer into text and calls, while it is being written."""

    def __init__(self, grammar: Grammar, tools: Tools) -> None:
        self._source = CallText()
        self._reading = self._read_all(grammar, tools)
        self._done = False

    def read(self, text: str, finished: bool) -> list[Event]:
        """What has become certain. `text` is the whole answer so far; `finished`: nothing will be added."""
        source = self._source
        source.text, source.closed = text, finished
        while not self._done:
            try:
                next(self._reading)
            except StopIteration:
                self._done = True
            if not finished:
                break
        events, source.events = source.events, []
        return events

    def _read_all(self, grammar: Grammar, tools: Tools) -> Reading[None]:
        yield from grammar(self._source, tools)
        yield from self._source.pass_text()


def _hermes(source: CallText, tools: Tools) -> Reading[None]:
    """`<tool_call>{...}</tool_call>`, also with a list of calls inside."""
    opening, closing = "<tool_call>", "</tool_call>"
    while (yield from source.pass_text(opening)):
        start = source.text_end
        yield from source.skip_blanks()
        is_list = (yield from source.peek()) == "["
        if (yield from (read_calls(source) if is_list else read_call(source))):
            yield from _skip_to(source, closing, opening)
        else:
            source.emit("text", source.text[start : source.pos])


def _skip_to(source: CallText, closing: str, opening: str) -> Reading[None]:
    """Leave the rest of a call out, up to its end or, if that is missing, the next call."""
    _, marker = yield from source.until((closing, opening))
    if marker == opening:
        source.pos -= len(opening)


def _llama3_json(source: CallText, tools: Tools) -> Reading[None]:
    """`{"name": ..., "parameters": {...}}` and nothing else; several are separated by semicolons."""
    start = source.pos
    yield from source.skip_blanks()
    yield from source.take("<|python_tag|>")
    while True:
        yield from source.skip_blanks()
        if not (yield from read_call(source, frozenset(tools))):
            source.emit("text", source.text[start : source.pos])
            return
        start = source.pos
        yield from source.skip_blanks()
        if not (yield from source.take(";")):
            source.pos = start
            return


def _mistral(source: CallText, tools: Tools) -> Reading[None]:
    """`[TOOL_CALLS][{...}, {...}]`, or in newer models `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    opening = "[TOOL_CALLS]"
    while (yield from source.pass_text(opening)):
        start = source.text_end
        yield from source.skip_blanks()
        first = yield from source.peek()
        if first == "[":
            if not (yield from read_calls(source)):
                source.emit("text", source.text[start : source.pos])
        elif first == "{":
            if not (yield from read_call(source)):
                source.emit("text", source.text[start : source.pos])
        else:
            name, marker = yield from source.until(("[CALL_ID]", "[ARGS]", "{"))
            if not marker:
                source.emit("text", source.text[start : source.pos])
                return
            if marker == "[CALL_ID]":
                _, marker = yield from source.until(("[ARGS]", "{"))
            source.pos -= marker == "{"
            source.emit("name", name.strip())
            yield from source.skip_blanks()
            yield from source.value(emits=True)


def _deepseek_v3(source: CallText, tools: Tools) -> Reading[None]:
    """Both forms: `function<sep>name`, a block of JSON (V3, R1), and `name<sep>{...}` (V3.1)."""
    opening, separator, end = (
        f"<{BAR}tool▁call▁begin{BAR}>",
        f"<{BAR}tool▁sep{BAR}>",
        f"<{BAR}tool▁call▁end{BAR}>",
    )
    while (yield from source.pass_text(f"<{BAR}tool▁calls▁begin{BAR}>")):
        while True:
            yield from source.skip_blanks()
            if not (yield from source.take(opening)):
                break
            name, _ = yield from source.until((separator,))
            if name.strip() == "function":
                name, _ = yield from source.until(("\n",))
                yield from source.skip_blanks()
                yield from source.take("```json")
            source.emit("name", name.strip())
            yield from source.skip_blanks()
            yield from source.value(emits=True)
            yield from _skip_to(source, end, opening)
        yield from source.take(f"<{BAR}tool▁calls▁end{BAR}>")


def _glm(source: CallText, tools: Tools) -> Reading[None]:
    """`<tool_call>name`, then `<arg_key>k</arg_key><arg_value>v</arg_value>` for each argument."""
    opening, closing, key_opening = "<tool_call>", "</tool_call>", "<arg_key>"
    while (yield from source.pass_text(opening)):
        name, marker = yield from source.until((key_opening, closing))
        name = name.strip()
        source.emit("name", name)
        before = "{"
        while marker == key_opening:
            key, _ = yield from source.until(("</arg_key>",))
            yield from source.until(("<arg_value>",))
            value, _ = yield from source.until(("</arg_value>",))
            argument = _glm_value(value, tools.get(name, {}), key.strip())
            source.emit("arguments", f"{before}{json.dumps(key.strip())}: {argument}")
            before = ", "
            _, marker = yield from source.until((key_opening, closing))
        source.emit("arguments", "{}" if before == "{" else "}")


def _glm_value(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """JSON of an argument: texts come without quotes, so the schema decides."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    if not is_text and (text.strip() == "null" or loads(text) is not None):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def required_calls(source: CallText, tools: Tools) -> Reading[None]:
    """What the grammar of tool_choice "required" has: a list of calls and nothing else."""
    yield from source.skip_blanks()
    yield from read_calls(source)
    while not source.closed:
        yield
    source.pos = len(source.text)


def named_call(name: str) -> Grammar:
    """What that of a named function has: its arguments."""

    def read(source: CallText, tools: Tools) -> Reading[None]:
        yield from source.skip_blanks()
        if (yield from source.peek()):
            source.emit("name", name)
            yield from source.value(emits=True)

    return read


@dataclass(frozen=True)
class ToolFormat:
    """A family's way.

    Attributes:
        grammar: reads it.
        in_template: a chat template that holds one of these texts asks for it.
        not_in_template: unless it holds one of these.
        special: its markers are special tokens, which are then not left out of the text.
        id_length: of calls' ids, where the template takes no others.
    """

    grammar: Grammar
    in_template: Sequence[str]
    not_in_template: Sequence[str] = ()
    special: bool = False
    id_length: int | None = None


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(_hermes, ("<tool_call>",), not_in_template=("<arg_key>", "<function=")),
    "glm": ToolFormat(_glm, ("<arg_key>",), special=True),
    "mistral": ToolFormat(_mistral, ("[TOOL_CALLS]",), special=True, id_length=9),
    "deepseek_v3": ToolFormat(_deepseek_v3, (f"<{BAR}tool▁calls▁begin{BAR}>",), special=True),
    "llama3_json": ToolFormat(_llama3_json, ("<|python_tag|>", '{"name": function name, "parameters":')),
}
"""By the names of --tool-call-parser."""


def choose_format(name: str, chat_template: str | None) -> ToolFormat | None:
    """A format by its name; "auto": the one that the chat template uses, None if it uses none of them."""
    if name != "auto":
        return TOOL_FORMATS.get(name)
    template = chat_template or ""
    for form in TOOL_FORMATS.values():
        if any(text in template for text in form.in_template) and not any(
            text in template for text in form.not_in_template
        ):
            return form
    return None
