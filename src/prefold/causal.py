"""How many (query, key) pairs causal attention has: what work is counted in, wherever it is counted."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntOrArray = TypeVar("IntOrArray", int, NDArray[np.int64])


def causal_pairs(start: IntOrArray, end: IntOrArray) -> IntOrArray:
    """Keys that queries at positions [start, end) see under a causal mask, themselves included. Exact.

    >>> causal_pairs(2, 5)  # 3 + 4 + 5
    12
    """
    return (end - start) * (start + end + 1) // 2


def limited_pairs(start: int, end: int, limit: int | None) -> int:
    """The same where a query sees at most `limit` keys (those that are selected, or a window); None: all.

    >>> limited_pairs(2, 5, limit=4)  # 3 + 4 + 4
    11
    """
    if limit is None:
        return causal_pairs(start, end)
    growing = causal_pairs(min(start, limit), min(end, limit))
    return growing + limit * (max(end, limit) - max(start, limit))
