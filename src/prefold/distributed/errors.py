"""What a collective raises instead of hanging."""

from __future__ import annotations

from collections.abc import Sequence


class CollectiveError(RuntimeError):
    """A collective cannot complete: the group is unusable from here on."""


class CollectiveTimeout(CollectiveError):
    """A collective did not complete within its time-out.

    Attributes:
        op, group: what waited, e.g. "all_reduce" of group "tp".
        sequence: which call on that group it was, counted from 1 and equal on all ranks.
        missing: world ranks that did not arrive, as far as this rank can tell.
    """

    def __init__(self, op: str, group: str, sequence: int, missing: Sequence[int], timeout_s: float) -> None:
        # All arguments go to the base class, so that the exception can be pickled.
        super().__init__(op, group, sequence, list(missing), timeout_s)
        self.op = op
        self.group = group
        self.sequence = sequence
        self.missing = list(missing)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.missing) or "unknown"
        return (
            f"{self.op} (call {self.sequence} of group {self.group!r}) did not complete within "
            f"{self.timeout_s:g} s; missing ranks: {ranks}"
        )


class RanksMissing(Exception):
    """Raised by a transport, which knows neither op nor world ranks; Group makes it a CollectiveTimeout."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__(list(missing))
        self.missing = list(missing)
        """Ranks of the group."""
