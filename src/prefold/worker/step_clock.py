"""Where the time of a step goes on one rank: layers and collectives; in a trace also phases and attention.

What is always measured costs two readings of a clock per collective, and one per layer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from prefold.attention.backend import AttentionContext, HeadRows, LatentRows
from prefold.attention.plan import StepPlan
from prefold.distributed.group import Group
from prefold.distributed.pcp_layout import Partition
from prefold.kernels.recording import note_time
from prefold.step import StepStats
from prefold.tracing import Span, TraceWriter


class StepClock:
    """One per rank, used step after step.

    Args:
        groups: this rank's; their counters are read.
        layers: numbers of this stage's.
        trace: where spans go; None: nowhere.
    """

    def __init__(self, groups: Mapping[str, Group], layers: range, trace: TraceWriter | None) -> None:
        self._groups = list(groups.values())
        self._first_layer = layers.start
        self._trace = trace
        self._step_id = 0
        self._marks: list[tuple[str, float]] = []
        self._layer_starts = torch.zeros(len(layers), dtype=torch.float64)
        self._layers_ended = 0.0
        self._attention: list[Span] = []
        self._ways: dict[str, int] = {}
        self._before: tuple[dict[str, tuple[int, int]], dict[str, float]] = ({}, {})
        if trace is not None:
            for group in self._groups:
                group.spans = []

    def begin_step(self, step_id: int) -> None:
        """What follows belongs to this step."""
        self._step_id = step_id
        self._marks = [("", time.perf_counter())]
        self._attention.clear()

    def begin_counting(self) -> None:
        """What follows is what computing the step takes: the check of its plan, for one, is not."""
        self._before = self._traffic(), self._seconds()

    def plan_is(self, plan: StepPlan) -> None:
        """The plan of this step."""
        self._ways = plan.ways

    def mark(self, name: str) -> None:
        """The phase `name` ends here; it began where the one before ended."""
        self._marks.append((name, time.perf_counter()))

    def layer_begins(self, layer_idx: int) -> None:
        """The rank's next layer; the one before has ended."""
        note_time(self._layer_starts, layer_idx)  # also where recorded layers are replayed

    def layers_end(self) -> None:
        """The last layer has ended."""
        self.mark("layers")
        self._layers_ended = self._marks[-1][1]

    def watched(self, attention: AttentionContext) -> AttentionContext:
        """The same attention, with its calls in the trace if there is one."""
        return attention if self._trace is None else _WatchedAttention(attention, self._note_attention)

    def _note_attention(self, started: float) -> None:
        name = " + ".join(["attention", *sorted(self._ways)])
        self._attention.append(Span(name, started, time.perf_counter()))

    def stats(self, parts: Partition, workspace_bytes: int) -> StepStats:
        """Of the step until now."""
        traffic_before, seconds_before = self._before
        counted = {}
        for key, (calls, sent) in self._traffic().items():
            calls_before, sent_before = traffic_before.get(key, (0, 0))
            if calls > calls_before:
                counted[key] = (calls - calls_before, sent - sent_before)
        seconds = {key: total - seconds_before.get(key, 0.0) for key, total in self._seconds().items()}
        return StepStats(
            rank_tokens=parts.num_tokens.tolist(),
            rank_causal_pairs=parts.causal_pairs.tolist(),
            forward_s=time.perf_counter() - self._marks[0][1],
            bytes_sent={key: sent for key, (_, sent) in counted.items()},
            calls={key: calls for key, (calls, _) in counted.items()},
            collective_s={key: value for key, value in seconds.items() if value > 0},
            layer_s=[end - start for start, end in self._layer_bounds()],
            ways=dict(self._ways),
            workspace_bytes=workspace_bytes,
        )

    def _layer_bounds(self) -> Iterator[tuple[float, float]]:
        """When each layer began and ended."""
        starts = self._layer_starts.tolist()
        return zip(starts, [*starts[1:], self._layers_ended])

    def _traffic(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) so far, by collective."""
        return {key: (calls, sent) for group in self._groups for key, (calls, sent) in group.traffic.items()}

    def _seconds(self) -> dict[str, float]:
        """Time in collectives so far, by collective."""
        return {key: seconds for group in self._groups for key, seconds in group.seconds.items()}

    def end_step(self) -> None:
        """Write the step's spans, if there is a trace."""
        if self._trace is None:
            return
        self.mark("")
        times = [at for _, at in self._marks]
        facts: dict[str, Any] = {"step": self._step_id, **self._ways}
        spans = [Span(f"step {self._step_id}", times[0], times[-1], facts)]
        spans += [Span(name, start, end) for start, (name, end) in zip(times, self._marks[1:]) if name]
        for layer, (start, end) in enumerate(self._layer_bounds(), start=self._first_layer):
            spans.append(Span(f"layer {layer}", start, end))
        spans += self._attention
        for group in self._groups:
            assert group.spans is not None
            spans += (Span(*span) for span in group.spans)
            group.spans.clear()
        self._trace.write(spans)


class _WatchedAttention:
    """An AttentionContext that tells when a call began, after each."""

    def __init__(self, attention: AttentionContext, note: Any) -> None:
        self._attention, self._note = attention, note

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        started = time.perf_counter()
        out = self._attention.attend(layer_idx, q, kv, rows)
        self._note(started)
        return out
