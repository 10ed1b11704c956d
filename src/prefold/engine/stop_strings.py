"""The text of one sample: appended piece by piece, ended by stop strings, shown only when it is certain."""

from __future__ import annotations


class StoppableText:
    """Grows until one of `stop` occurs in it; the text then ends before that string.

    `visible` never takes back what it showed: a tail that could become a stop string is held back
    until it does or can no longer.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.stop = stop
        self.text = ""
        self.stopped_by: str | None = None
        self._overlap = max((len(s) for s in stop), default=1) - 1

    def append(self, piece: str, search: bool = True) -> bool:
        """Add `piece`; True if a stop string ends the text (`stopped_by` names it).

        The leftmost occurrence counts, of several at one place the first in `stop`. Only strings that
        end in `piece` are found, so one that was passed with `search=False` stays passed.
        """
        assert self.stopped_by is None, "the text has ended"
        old_length = len(self.text)
        self.text += piece
        if not (search and piece and self.stop):
            return False
        found = [(at, s) for s in self.stop if (at := self._find(s, old_length)) >= 0]
        if not found:
            return False
        at, self.stopped_by = min(found, key=lambda match: match[0])
        self.text = self.text[:at]
        return True

    def visible(self, finished: bool) -> str:
        """The text as far as it is certain; all of it once the sample has finished."""
        held = 0 if finished else self._num_held()
        return self.text[: len(self.text) - held]

    def _find(self, stop: str, old_length: int) -> int:
        """Where the first occurrence of `stop` that ends after `old_length` characters starts, or -1."""
        return self.text.find(stop, max(0, old_length - len(stop) + 1))

    def _num_held(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        for length in range(min(self._overlap, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(len(s) > length and s.startswith(tail) for s in self.stop):
                return length
        return 0
