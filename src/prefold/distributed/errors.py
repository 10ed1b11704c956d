"""What a collective raises instead of hanging."""

from __future__ import annotations

from collections.abc import Sequence


class CollectiveError(RuntimeError):
    """A collective cannot complete: the group is unusable from here on."""


class CollectiveTimeout(CollectiveError):
    """A collective did not complete within its time-out.

    Attributes:
        op, group: what waited, e.g. "all_reduce" of group "tp".
        sequence: which call on that group it was, counted from 1; equal on all ranks, but for send and recv.
        missing: world ranks that did not arrive, as far as this rank can tell.
        step: of the engine, if it is known.
    """

    def __init__(
        self,
        op: str,
        group: str,
        sequence: int,
        missing: Sequence[int],
        timeout_s: float,
        step: int | None = None,
    ) -> None:
        # All arguments go to the base class, so that the exception can be pickled.
        super().__init__(op, group, sequence, list(missing), timeout_s, step)
        self.op = op
        self.group = group
        self.sequence = sequence
        self.missing = list(missing)
        self.timeout_s = timeout_s
        self.step = step

    def __str__(self) -> str:
        call = describe_call(self.op, self.group, self.sequence, self.step)
        return f"{call} did not complete within {self.timeout_s:g} s; {describe_missing(self.missing)}"


class RanksMissing(Exception):
    """Raised by a transport, which knows neither op nor world ranks; Group makes a CollectiveError of it.

    Attributes:
        missing: ranks of the group.
        reason: why it is certain before the time-out; None: the time-out has passed.
    """

    def __init__(self, missing: Sequence[int], reason: str | None = None) -> None:
        super().__init__(list(missing), reason)
        self.missing = list(missing)
        self.reason = reason


def describe_call(op: str, group: str, sequence: int, step: int | None) -> str:
    """
    >>> describe_call("all_gather", "pcp", 7, step=12)
    "step 12: all_gather (call 7 of group 'pcp')"
    """
    where = "" if step is None else f"step {step}: "
    return f"{where}{op} (call {sequence} of group {group!r})"


def describe_missing(ranks: Sequence[int]) -> str:
    """
    >>> describe_missing([1, 3])
    'missing ranks: 1, 3'
    """
    return f"missing ranks: {', '.join(str(rank) for rank in ranks) or 'unknown'}"
