"""Stop strings in text that arrives in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.engine.stop_strings import StoppableText


def test_a_stop_string_across_pieces_cuts_the_text_before_it():
    text = StoppableText(("END",))
    assert not text.append("abcE")
    assert not text.append("N")
    assert text.append("D and more")
    assert text.text == "abc"
    assert text.stopped_by == "END"


def test_what_could_become_a_stop_string_is_held_back():
    text = StoppableText(("aab",))
    shown = []
    for piece in ["x", "a", "a", "a", "c", "a"]:
        text.append(piece)
        shown.append(text.visible(False))
    assert shown == ["x", "x", "x", "xa", "xaaac", "xaaac"]
    assert text.visible(True) == "xaaaca"


def test_the_leftmost_stop_string_counts_then_the_first_named():
    text = StoppableText(("cd", "bcd", "bc"))
    assert text.append("abcd")
    assert (text.text, text.stopped_by) == ("a", "bcd")


def test_text_that_was_not_searched_is_not_searched_later():
    text = StoppableText(("##",))
    assert not text.append("a##", search=False)
    assert not text.append("b")
    assert not text.append("#")
    assert text.append("#", search=True)
    assert text.text == "a##b"


def test_a_stop_string_that_was_passed_is_not_held_back_whole():
    text = StoppableText(("##", "abcdef"))
    text.append("a##", search=False)
    assert text.visible(False) == "a#", "one more # would end the text before the last one"


def test_a_stop_string_that_ends_in_searched_text_is_found():
    text = StoppableText(("##",))
    text.append("a#", search=False)
    assert text.append("#b")
    assert text.text == "a"


def test_without_stop_strings_everything_is_visible():
    text = StoppableText()
    assert not text.append("abc")
    assert text.visible(False) == "abc"


letters = st.text(alphabet="ab", min_size=1, max_size=4)


def naive(text, stop):
    """Append character by character; the first character that completes a string ends it."""
    for end in range(1, len(text) + 1):
        ends = [text[:end].rfind(s) for s in stop if text[:end].endswith(s)]
        if ends:
            return text[: min(ends)]
    return None


@settings(max_examples=500)
@given(text=st.text(alphabet="abc", max_size=20), stop=st.lists(letters, min_size=1, max_size=3))
def test_one_character_at_a_time(text, stop):
    state = StoppableText(tuple(stop))
    shown = ""
    for character in text:
        stopped = state.append(character)
        now = state.visible(stopped)
        assert now.startswith(shown), "shown text was taken back"
        shown = now
        if stopped:
            break
    expected = naive(text, stop)
    assert state.visible(True) == (text if expected is None else expected)
    assert (state.stopped_by is not None) == (expected is not None)


@settings(max_examples=500)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=8),
    stop=st.lists(letters, min_size=1, max_size=3),
)
def test_pieces_of_any_size(pieces, stop):
    state = StoppableText(tuple(stop))
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        stopped = state.append(piece)
        now = state.visible(stopped)
        assert now.startswith(shown)
        # Not more is held back than the beginning of a stop string, and nothing that is one is shown.
        assert stopped or any(s.startswith(seen[len(now) :]) for s in stop)
        assert not any(s in now for s in stop)
        shown = now
        if stopped:
            break
    assert (state.stopped_by is None) == (not any(s in seen for s in stop))
    expected = min((seen.find(s) for s in stop if s in seen), default=len(seen))
    assert state.visible(True) == seen[:expected]


@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_search_is_limited_to_the_new_text(length):
    class Counting(str):
        starts: list = []  # noqa: RUF012

        def find(self, needle, start=0):
            self.starts.append(len(self) - start)
            return str.find(self, needle, start)

        def __add__(self, other):
            return Counting(str.__add__(self, other))

    state = StoppableText(("x" * length,))
    state.text = Counting()
    for _ in range(50):
        state.append("ab")
    assert max(Counting.starts) <= 2 + length - 1
