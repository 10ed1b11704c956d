"""What the tools of a chat mean for its answers: what they must look like, and which calls they hold."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from prefold.request import StructuredOutputs
from prefold.server.errors import APIError
from prefold.server.protocol import ChatCompletionRequest, NamedTool, Tool
from prefold.server.responses import AssistantMessage, Delta
from prefold.server.structured import of_schema
from prefold.server.tool_parsers import (
    Grammar,
    ToolParser,
    Tools,
    choose_format,
    named_call,
    required_calls,
)


@dataclass(frozen=True)
class ToolUse:
    """How the answers of one chat are read.

    Attributes:
        grammar: finds the calls; None: all is text.
        tools: parameters by name.
        structured: what tool_choice demands of the text.
        keeps_special: special tokens mark calls, so they must not be left out.
        first_only: without parallel calls the first one counts.
        id_length: characters of a call's id; None: as OpenAI's are.
    """

    grammar: Grammar | None = None
    tools: Tools = field(default_factory=dict)
    structured: StructuredOutputs | None = None
    keeps_special: bool = False
    first_only: bool = False
    id_length: int | None = None

    def reader(self) -> AnswerReader:
        """For one answer."""
        return AnswerReader(self)


def tool_use(body: ChatCompletionRequest, parser: str, chat_template: str | None) -> ToolUse:
    """What a request asks for.

    Args:
        parser: name of a format, "auto" or "none".

    Raises:
        APIError: 400.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise APIError(400, "tool_choice is only allowed when tools are given", param="tool_choice")
        return ToolUse()
    tools = {tool.function.name: _parameters(tool) for tool in body.tools}
    first_only = body.parallel_tool_calls is False
    form = choose_format(parser, chat_template)
    id_length = None if form is None else form.id_length
    if choice == "none":
        return ToolUse()
    if choice == "required":
        try:
            calls = _calls_schema(tools, first_only)
        except RecursionError:
            raise APIError(400, "tools is nested too deeply", param="tools") from None
        schema = of_schema(calls, "tools")
        return ToolUse(required_calls, tools, schema, first_only=first_only, id_length=id_length)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in tools:
            raise APIError(400, f"tool_choice names {name[:200]!r}, which is no tool", param="tool_choice")
        schema = of_schema(tools[name], "tools")
        return ToolUse(named_call(name), tools, schema, id_length=id_length)
    constrained = body.response_format is not None and body.response_format.type != "text"
    if form is None or constrained or body.structured_outputs is not None:
        return ToolUse()
    return ToolUse(form.grammar, tools, None, form.special, first_only, id_length)


def _parameters(tool: Tool) -> dict[str, Any]:
    """A function without parameters takes none."""
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _calls_schema(tools: Tools, only_one: bool) -> dict[str, Any]:
    """A list of calls, at least one. Schemas of parameters keep what they refer to."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, name in enumerate(tools)
    ]
    schema = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": {
            str(number): _moved(parameters, f"#/$defs/{number}")
            for number, parameters in enumerate(tools.values())
        },
    }
    return schema | ({"maxItems": 1} if only_one else {})


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references within itself hold when it stands at `root` of another."""
    if isinstance(schema, list):
        return [_moved(entry, root) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }


class AnswerReader:
    """Turns one answer into deltas of a message."""

    def __init__(self, use: ToolUse) -> None:
        self._parser = None if use.grammar is None else ToolParser(use.grammar, use.tools)
        self._use = use
        self._num_chars = 0
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def read(self, text: str, finished: bool) -> list[Delta]:
        """What is new. `text` is the whole answer so far; `finished`: nothing will be added."""
        if self._parser is None:
            new, self._num_chars = text[self._num_chars :], len(text)
            return [Delta(content=new)]
        deltas: list[Delta] = []
        for kind, piece in self._parser.read(text, finished):
            self._num_calls += kind == "name"
            if self._use.first_only and self._num_calls > 1:
                continue
            if kind == "text":
                deltas.append(Delta(content=piece))
            elif kind == "name":
                call = {
                    "id": self._new_id(),
                    "type": "function",
                    "function": {"name": piece, "arguments": ""},
                }
                deltas.append(Delta(tool_calls=[{"index": self._num_calls - 1, **call}]))
            else:
                call = {"function": {"arguments": piece}}
                deltas.append(Delta(tool_calls=[{"index": self._num_calls - 1, **call}]))
        return deltas

    def message(self, text: str) -> AssistantMessage:
        """The whole answer at once."""
        content, calls = "", []
        for delta in self.read(text, True):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: value for key, value in call.items() if key != "index"})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message = AssistantMessage(role="assistant", content=content, refusal=None)
        if calls:
            message["content"] = content or None
            message["tool_calls"] = calls
        return message

    def _new_id(self) -> str:
        name = uuid.uuid4().hex
        return f"call_{name[:24]}" if self._use.id_length is None else name[: self._use.id_length]
