"""What an engine says about itself: one record per step, one snapshot now and then.

`engine.observer` makes them where the engine runs; they travel as messages to whoever shows them. Times of
day are unix seconds, durations are seconds.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from prefold.step import StepStats

BUDGET, BLOCKS, MAX_NUM_SEQS, BEHIND = "budget", "blocks", "max_num_seqs", "behind "
"""Why a request waits: see `RequestState.why`."""


STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the buckets in which durations of steps, and times between tokens, are counted."""


class Histogram(msgspec.Struct, array_like=True):
    """Counts of values by bucket: `counts[i]` of those up to `bounds[i]`, above the bound before it; the last
    count is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """An empty one.

        >>> h = Histogram.of((1.0, 5.0))
        >>> h.observe(1.0); h.observe(3.0, count=2); h.observe(9.0)
        >>> h.counts, h.sum
        ([1, 2, 1], 16.0)
        """
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, that many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def plus(self, other: Histogram) -> Histogram:
        """The sum of both, which have the same bounds."""
        assert self.bounds == other.bounds, (self.bounds, other.bounds)
        counts = [mine + others for mine, others in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum + other.sum)


class RowParts(msgspec.Struct, array_like=True):
    """What a step computes of one request, and which rank computes which part of it.

    The step computes tokens `[start, start + num_tokens)`; `[0, start)` is cached context. `parts` are
    `(start, end, pcp_rank)`, by position; a decode token that a whole unit of ranks computes has one each.
    """

    request_id: str
    start: int
    num_tokens: int
    is_prefill: bool
    num_prompt_tokens: int
    parts: list[tuple[int, int, int]]


class StepRecord(msgspec.Struct, array_like=True):
    """One step that is done.

    Attributes:
        step_id, replica: a replica counts its own steps.
        start_s, duration_s: from the moment it was handed to the ranks until its output was there.
        num_prefill_tokens, num_decode_tokens: of the global batch.
        num_requests: in the step.
        rows: its prefills, the first few of them; none if the step only decodes.
        rank_tokens, rank_causal_pairs: per PCP rank, prefill and decode.
        forward_s: time on the rank that samples. So are all of the following.
        bytes_sent, calls, collective_s: by collective, such as "pcp.all_gather". Seconds are those that the
            rank waited in it.
        layer_s: per layer of the last pipeline stage.
        ways: requests with cached context by the way in which it was attended.
        workspace_bytes: that its steps have needed so far.
    """

    step_id: int
    replica: int
    start_s: float
    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_requests: int
    rows: list[RowParts]
    rank_tokens: list[int] = []
    rank_causal_pairs: list[int] = []
    forward_s: float = 0.0
    bytes_sent: dict[str, int] = {}
    calls: dict[str, int] = {}
    collective_s: dict[str, float] = {}
    layer_s: list[float] = []
    ways: dict[str, int] = {}
    workspace_bytes: int = 0


class RequestState(msgspec.Struct, array_like=True):
    """An unfinished request (one sample of a prompt).

    Attributes:
        state: "waiting", "running" or "preempted", which waits as well.
        num_computed_tokens: tokens in the KV cache; until its prefill is done the rest of
            `num_prefill_tokens` is to be computed.
        num_prefill_tokens: the prompt, and after a preemption what had been generated before.
        num_blocks: blocks that it holds, or, while it waits, that it needs besides those it would find in
            the prefix cache.
        wait_s: since it arrived.
        why: of one that waits: "max_num_seqs" (as many as may run do), "blocks" (too few are free),
            "budget" (other requests take all tokens of a step, or compute its prefix), "behind <id>".
    """

    request_id: str
    replica: int
    state: str
    num_prompt_tokens: int
    num_prefill_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    wait_s: float
    why: str = ""


class Totals(msgspec.Struct, array_like=True):
    """Sums over all steps of an engine that are done.

    Attributes:
        num_steps: per replica, summed; empty steps of replicas in lockstep do not count.
        num_prompt_tokens: of the prompts that were completed, tokens found in the prefix cache included.
        num_prefill_tokens, num_decode_tokens: computed; those of a preempted request again.
        num_generation_tokens: sampled, those cut off after the end of a request included.
        num_preemptions: requests that gave their blocks back and started anew.
        prefix_query_tokens, prefix_hit_tokens: looked up in the prefix cache, and found there.
        rank_tokens, rank_causal_pairs: replica d and PCP rank r are number d * PCP + r.
        forward_s, bytes_sent, calls, collective_s, ways: as in StepRecord.
        step_seconds: durations of steps.
        inter_token_seconds: per decode token of a step, the time since the step before was done (with PP
            pipeline stages: the PP-th before). At such intervals a client sees its tokens.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    rank_tokens: list[int] = []
    rank_causal_pairs: list[int] = []
    forward_s: float = 0.0
    bytes_sent: dict[str, int] = {}
    calls: dict[str, int] = {}
    collective_s: dict[str, float] = {}
    ways: dict[str, int] = {}
    step_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.of(STEP_SECONDS))
    inter_token_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.of(STEP_SECONDS))

    def add_step(self, stats: StepStats, replica: int) -> None:
        """Count what the sampling rank reports of a step."""
        self.num_steps += 1
        self.forward_s += stats.forward_s
        _add_at(self.rank_tokens, stats.rank_tokens, replica)
        _add_at(self.rank_causal_pairs, stats.rank_causal_pairs, replica)
        for total, step in (
            (self.bytes_sent, stats.bytes_sent),
            (self.calls, stats.calls),
            (self.collective_s, stats.collective_s),
            (self.ways, stats.ways),
        ):
            add_by_key(total, step)

    def plus(self, other: Totals) -> Totals:
        """The sum of both, field by field."""
        values = {}
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                values[name] = add_by_key(dict(mine), others)
            elif isinstance(mine, list):
                values[name] = _add_at(list(mine), others, 0)
            elif isinstance(mine, Histogram):
                values[name] = mine.plus(others)
            else:
                values[name] = mine + others
        return Totals(**values)


class EngineSnapshot(msgspec.Struct, array_like=True):
    """An engine at one moment.

    Attributes:
        time_s: when.
        started_s: when the engine began to count: `totals` start at 0 with another engine.
        blocks_total, blocks_used, blocks_cached: blocks of all replicas; used ones belong to requests, cached
            ones hold content that a new request could reuse, be they used or free.
        requests: running ones first, then waiting ones in order, at most MAX_REQUESTS in all.
        steps: those done since the last snapshot, the latest MAX_STEPS of them.
        in_flight: those being computed: what ranks report is empty, and `duration_s` is the time until now.
        workspace_bytes, workspace_planned: that steps have needed on the fullest rank that samples, and what
            the plan allows a rank.
    """

    time_s: float = 0.0
    started_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    totals: Totals = msgspec.field(default_factory=Totals)
    requests: list[RequestState] = []
    steps: list[StepRecord] = []
    in_flight: list[StepRecord] = []
    workspace_bytes: int = 0
    workspace_planned: int = 0


def imbalance(counts: list[int]) -> float:
    """The fullest rank's count over the mean; 1 is a perfect balance, also of no work at all.

    >>> imbalance([30, 10])
    1.5
    """
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def add_by_key(total: dict, step: dict) -> dict:
    """`total[key] += step[key]`; returns `total`."""
    for key, value in step.items():
        total[key] = total.get(key, 0) + value
    return total


def _add_at(total: list, step: list, replica: int) -> list:
    """Add one replica's entries to its share of `total`, which grows as needed."""
    first = replica * len(step)
    total.extend([0] * (first + len(step) - len(total)))
    for rank, count in enumerate(step, start=first):
        total[rank] += count
    return total
