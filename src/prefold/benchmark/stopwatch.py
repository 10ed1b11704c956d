"""When the prompts of a batch had their first tokens, and how fast all of them decoded together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any


class Stopwatch:
    """Starts when it is made; ends when every request has `output_len` tokens.

    Args:
        num_requests: that run at once.
        output_len: tokens that each is to generate.
    """

    def __init__(self, num_requests: int, output_len: int) -> None:
        self._num_requests, self._output_len = num_requests, output_len
        self._begin = time.monotonic()
        self._first: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._decode: list[tuple[float, int]] = []
        """(time, tokens of all requests) when the last one had its first token, and at the end."""
        self.is_over = False

    def note(self, now: float, counts: Mapping[str, int], any_finished: bool = False) -> None:
        """Request i has `counts[i]` tokens now. One that has finished ends the time that all decode.

        ValueError if one finishes before all have begun.
        """
        self._counts |= counts
        for request_id in counts:
            self._first.setdefault(request_id, now)
        all_begun = len(self._first) == self._num_requests
        if any_finished and not all_begun:
            raise ValueError(
                f"{len(self._first)} of {self._num_requests} requests ran at the same time: raise "
                f"kv_cache_memory_bytes, max_num_seqs or max_model_len"
            )
        if all_begun and not self._decode:
            self._decode.append((now, sum(self._counts.values())))
        done = all_begun and min(self._counts.values()) >= self._output_len
        if not self.is_over and (done or any_finished):
            self._decode.append((now, sum(self._counts.values())))
            self.is_over = True

    def times(self) -> dict[str, Any]:
        """ttft_s: mean over the requests; prefill_s: until the last one's first token; tpot_s: between two
        tokens of a request while all decode, None where there is one token."""
        (start, before), (end, after) = self._decode
        waits = [at - self._begin for at in self._first.values()]
        num_tokens = after - before
        return {
            "ttft_s": statistics.fmean(waits),
            "prefill_s": max(waits),
            "tpot_s": (end - start) * self._num_requests / num_tokens if num_tokens else None,
        }
