"""Tool calls in the texts of models: the same calls however the text is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from prefold.server.tool_parsers import (
    TOOL_FORMATS,
    Grammar,
    ToolParser,
    choose_format,
    named_call,
    required_calls,
)

TOOLS = {"f": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}, "g": {}}

CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"

Found = list[tuple[str, str]]

CASES: list[tuple[str, str, Found]] = [
    ("hermes", "", []),
    ("hermes", " plain \n", [("text", " plain \n")]),
    (
        "hermes",
        'Hi.\n\n<tool_call>\n{"name": "f", "arguments": {"s": "a}\\"<b", "n": [1,{"x":2}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
        [
            ("text", "Hi."),
            ("name", "f"),
            ("arguments", '{"s": "a}\\"<b", "n": [1,{"x":2}]}'),
            ("name", "g"),
            ("arguments", "{}"),
        ],
    ),
    ("hermes", "no call <tool_ca", [("text", "no call <tool_ca")]),
    ("hermes", "x <tool_call>nope</tool_call> y ", [("text", "x <tool_call>nope</tool_call> y ")]),
    (
        "hermes",
        '<tool_call>[{"name":"f","arguments":"{\\"s\\":1}"},{"name":"g"}]</tool_call>',
        [("name", "f"), ("arguments", '{"s":1}'), ("name", "g"), ("arguments", "{}")],
    ),
    ("hermes", '<tool_call>{"nam', [("text", '<tool_call>{"nam')]),
    ("hermes", '<tool_call>{"name": "f", "argum', [("name", "f")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "unf',
        [("name", "f"), ("arguments", '{"s": "unf')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"s":1}</tool_call> bye',
        [("name", "f"), ("arguments", '{"s":1}'), ("text", " bye")],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}}\n<tool_call>{"name":"g","arguments":{}}',
        [("name", "f"), ("arguments", "{}"), ("name", "g"), ("arguments", "{}")],
    ),
    (
        "glm",
        "ok\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n"
        '<arg_value>12</arg_value>\n<arg_key>o</arg_key><arg_value>a "b"</arg_value></tool_call>'
        "<tool_call>g</tool_call>",
        [
            ("text", "ok"),
            ("name", "f"),
            ("arguments", '{"s": "12", "n": 12, "o": "a \\"b\\""}'),
            ("name", "g"),
            ("arguments", "{}"),
        ],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "x"}}, {"name":"g","arguments":{}}]',
        [("name", "f"), ("arguments", '{"s": "x"}'), ("name", "g"), ("arguments", "{}")],
    ),
    (
        "mistral",
        'sure [TOOL_CALLS]f[CALL_ID]123[ARGS]{"s": 1}[TOOL_CALLS]g{"y": 2}',
        [
            ("text", "sure"),
            ("name", "f"),
            ("arguments", '{"s": 1}'),
            ("name", "g"),
            ("arguments", '{"y": 2}'),
        ],
    ),
    ("mistral", "[TOOL_CALLS]x", [("text", "[TOOL_CALLS]x")]),
    ("mistral", "a list [1] [TOOL", [("text", "a list [1] [TOOL")]),
    (
        "deepseek_v3",
        f'hm\n{CALLS_BEGIN}{CALL_BEGIN}function{SEP}f\n```json\n{{"s": "x"}}\n```{CALL_END}\n'
        f'{CALL_BEGIN}g{SEP}{{"a":1}}{CALL_END}{CALLS_END}',
        [("text", "hm"), ("name", "f"), ("arguments", '{"s": "x"}'), ("name", "g"), ("arguments", '{"a":1}')],
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"s": "x"}}; {"name":"g","parameters":{}}',
        [("name", "f"), ("arguments", '{"s": "x"}'), ("name", "g"), ("arguments", "{}")],
    ),
    (
        "llama3_json",
        ' <|python_tag|>{"name": "f", "parameters": {"s": "x"}}\n',
        [("name", "f"), ("arguments", '{"s": "x"}')],
    ),
    ("llama3_json", '{"answer": 5} is it', [("text", '{"answer": 5} is it')]),
    ("llama3_json", ' so {"name":"f"}', [("text", ' so {"name":"f"}')]),
    ("llama3_json", '{"name": "z", "parameters": {}}', [("text", '{"name": "z", "parameters": {}}')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}} and so',
        [("name", "f"), ("arguments", "{}"), ("text", " and so")],
    ),
    (
        "required",
        '[{"name": "f", "arguments": {"s": "x"}}\n, {"name": "g", "arguments": {}}]',
        [("name", "f"), ("arguments", '{"s": "x"}'), ("name", "g"), ("arguments", "{}")],
    ),
    ("required", '[{"name": "f", "argu', [("name", "f")]),
    ("named", '{"s": [5, "}"]}', [("name", "f"), ("arguments", '{"s": [5, "}"]}')]),
    ("named", '{"s": 5', [("name", "f"), ("arguments", '{"s": 5')]),
    ("named", "", []),
]


def grammar_of(name: str) -> Grammar:
    if name == "named":
        return named_call("f")
    return required_calls if name == "required" else TOOL_FORMATS[name].grammar


def read(name: str, text: str, cuts: Iterable[int]) -> tuple[Found, list[Found]]:
    """(all that was found, what was found after each cut)."""
    parser = ToolParser(grammar_of(name), TOOLS)
    steps: list[Found] = [[(e.kind, e.text) for e in parser.read(text[:cut], False)] for cut in cuts]
    steps.append([(e.kind, e.text) for e in parser.read(text, True)])
    found: Found = []
    for kind, piece in (event for step in steps for event in step):
        if found and found[-1][0] == kind != "name":
            found[-1] = (kind, found[-1][1] + piece)
        else:
            found.append((kind, piece))
    return found, steps


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_any_cut_gives_the_same_calls(name: str, text: str, expected: Found):
    assert read(name, text, [])[0] == expected
    for cut in range(len(text) + 1):
        assert read(name, text, [cut])[0] == expected, text[:cut]
    assert read(name, text, range(len(text) + 1))[0] == expected
    for stride in (2, 3, 5, 7):
        for first in range(stride):
            assert read(name, text, range(first, len(text), stride))[0] == expected


def test_what_is_certain_comes_at_once():
    """Text before a marker, names, and arguments by the character."""
    text = 'Hi there. <tool_call>{"name": "f", "arguments": {"s": "abc"}}</tool_call>'
    _, steps = read("hermes", text, range(1, len(text) + 1))
    at = [i for i, step in enumerate(steps) if step]
    assert steps[0] == [("text", "H")]
    assert steps[text.index('f"')] == []
    assert steps[text.index('f"') + 1] == [("name", "f")]
    begins = text.index('{"s"')
    assert "".join(piece for step in steps[begins : begins + 12] for _, piece in step) == '{"s": "abc"}'
    assert at[-1] < text.index("}}") + 2


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<tool_call><function=", None),
        ("[TOOL_CALLS]", "mistral"),
        (CALLS_BEGIN, "deepseek_v3"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_templates_tell_the_format(template: str | None, expected: str | None):
    chosen = choose_format("auto", template)
    assert chosen == (None if expected is None else TOOL_FORMATS[expected])
    assert choose_format("none", template) is None
    assert choose_format("mistral", template) == TOOL_FORMATS["mistral"]
