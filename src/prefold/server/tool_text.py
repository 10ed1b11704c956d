"""Reads the text of tool calls while it is being written.

Parsers are generators over a `CallText` that yield where they need to know more of the text. What they find
therefore depends on the text alone, not on the pieces it comes in.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Returns T once enough of the text is there."""

BLANKS = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")


class Event(NamedTuple):
    """A piece of an answer. A name begins a call; the arguments that follow are those of the latest call."""

    kind: Literal["text", "name", "arguments"]
    text: str


class CallText:
    """A text that grows, and how far it has been read.

    Attributes:
        text: all of it so far.
        pos: index of the next character.
        text_end: where the latest `pass_text` stopped.
        closed: nothing more will come.
        events: what was found since somebody took them.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.text_end = 0
        self.closed = False
        self.num_calls = 0
        self.events: list[Event] = []

    def emit(self, kind: Literal["text", "name", "arguments"], text: str) -> None:
        """Pieces of the same kind that follow each other become one."""
        if kind == "name":
            self.num_calls += 1
        elif not text:
            return
        elif self.events and self.events[-1].kind == kind:
            text = self.events.pop().text + text
        self.events.append(Event(kind, text))

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self.pos == len(self.text) and not self.closed:
            yield
        return self.text[self.pos : self.pos + 1]

    def take(self, marker: str) -> Reading[bool]:
        """Skip `marker` if it comes next; whether it did."""
        while (
            not self.closed
            and len(self.text) - self.pos < len(marker)
            and marker.startswith(self.text[self.pos :])
        ):
            yield
        found = self.text.startswith(marker, self.pos)
        self.pos += len(marker) * found
        return found

    def skip_blanks(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in BLANKS:
            self.pos += 1

    def until(self, markers: Sequence[str]) -> Reading[tuple[str, str]]:
        """Read up to one of `markers`, which is skipped, or to the end: (what comes before, marker or "")."""
        start = self.pos
        while True:
            found = _first(self.text, markers, self.pos)
            if found is not None:
                at, marker = found
                self.pos = at + len(marker)
                return self.text[start:at], marker
            if self.closed:
                self.pos = len(self.text)
                return self.text[start:], ""
            self.pos = max(self.pos, len(self.text) - max(map(len, markers)) + 1)
            yield

    def pass_text(self, marker: str | None = None) -> Reading[bool]:
        """Emit text up to `marker`, which is skipped; False if it does not come.

        Blanks before it, and those at the end if there were calls, are no text; `text_end` is where they
        begin.
        """
        while True:
            at = -1 if marker is None else self.text.find(marker, self.pos)
            end = len(self.text) if at < 0 else at
            if marker is not None and at < 0 and not self.closed:
                end -= _begun(self.text, self.pos, marker)
            if at >= 0 or not self.closed or self.num_calls:
                end = self.pos + len(self.text[self.pos : end].rstrip(BLANKS))
            self.emit("text", self.text[self.pos : end])
            self.pos = self.text_end = end
            if marker is not None and at >= 0:
                self.pos = at + len(marker)
                return True
            if self.closed:
                return False
            yield

    def value(self, emits: bool = False) -> Reading[str]:
        """Read one JSON value; its text. With `emits` it is emitted as arguments, as it comes."""
        start = sent = self.pos
        depth, quoted, escaped, done = 0, False, False, False
        while not done:
            while self.pos < len(self.text) and not done:
                character = self.text[self.pos]
                if not quoted and depth == 0 and character in ",:]}<" + BLANKS:
                    done = True
                    break
                self.pos += 1
                if quoted:
                    quoted = escaped or character != '"'
                    escaped = not escaped and character == "\\"
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                else:
                    quoted = character == '"'
                    continue
                done = depth == 0 and not quoted
            if emits:
                self.emit("arguments", self.text[sent : self.pos])
                sent = self.pos
            if self.closed:
                break
            if not done:
                yield
        return self.text[start : self.pos]


def _first(text: str, markers: Sequence[str], start: int) -> tuple[int, str] | None:
    """The first of `markers` in `text`, and where."""
    return min(((at, m) for m in markers if (at := text.find(m, start)) >= 0), default=None)


def _begun(text: str, start: int, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def loads(text: str) -> object:
    """Its JSON value; None if it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_call(source: CallText, known: frozenset[str] | None = None) -> Reading[bool]:
    """Read `{"name": ..., "arguments": {...}}`, its keys in any order, as a call.

    Args:
        known: names that count; None: all.

    Returns:
        Whether it was one: False means that nothing was emitted. What goes wrong once the name is known is
        left to whoever uses the arguments.
    """
    named, held, complete, ended = False, "", False, False
    if not (yield from source.take("{")):
        return False
    while True:
        yield from source.skip_blanks()
        ended = yield from source.take("}")
        if ended or (yield from source.peek()) != '"':
            break
        key = loads((yield from source.value()))
        yield from source.skip_blanks()
        if not (yield from source.take(":")):
            break
        yield from source.skip_blanks()
        is_object = (yield from source.peek()) != '"'
        if key in ARGUMENT_KEYS and named and is_object:
            yield from source.value(emits=True)
            complete = True
        else:
            raw = yield from source.value()
            value = loads(raw)
            if key == "name":
                if named or not isinstance(value, str) or (known is not None and value not in known):
                    break
                source.emit("name", value)
                named = True
            elif key in ARGUMENT_KEYS:
                # Some models write a text that holds the object.
                held = value if isinstance(value, str) else raw
        if named and held:
            source.emit("arguments", held)
            held, complete = "", True
        yield from source.skip_blanks()
        yield from source.take(",")
    if named and ended and not complete:
        source.emit("arguments", "{}")
    return named


def read_calls(source: CallText) -> Reading[bool]:
    """Read `[{...}, {...}]`; whether it held a call."""
    if not (yield from source.take("[")):
        return False
    found = False
    while True:
        yield from source.skip_blanks()
        if not (yield from read_call(source)):
            break
        found = True
        yield from source.skip_blanks()
        if not (yield from source.take(",")):
            yield from source.take("]")
            break
    return found
