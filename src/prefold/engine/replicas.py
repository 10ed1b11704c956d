"""Replicas (data parallelism): which one gets a request, and which ones step together.

A replica is a `Scheduler` and the ranks that run its steps. A *lane* is a set of replicas in lockstep: the
n-th steps of all of them run at the same time. With expert parallelism the ranks of all replicas meet
in every layer's exchange of tokens, so all replicas form one lane, and one without work runs an
empty step. Otherwise every replica is a lane of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefold.config import ParallelConfig
from prefold.engine.scheduler import Scheduler
from prefold.request import Request
from prefold.step import ModelRunnerOutput, SchedulerOutput


def choose_replica(schedulers: Sequence[Scheduler], request: Request) -> int:
    """The replica that would be done soonest with the request's prompt, among equals the lowest.

    Counted in tokens: those that the replica has yet to compute, less those that it would find in its
    prefix cache.
    """

    def cost(replica: int) -> int:
        scheduler = schedulers[replica]
        return scheduler.num_outstanding_tokens - scheduler.kv.num_cached_tokens(request)

    return min(range(len(schedulers)), key=cost)


def make_lanes(schedulers: Sequence[Scheduler], parallel: ParallelConfig) -> list[Lane]:
    """The lanes of all replicas."""
    replicas = range(len(schedulers))
    together = [replicas] if parallel.enable_expert_parallel else [[replica] for replica in replicas]
    return [Lane({replica: schedulers[replica] for replica in lane}) for lane in together]


@dataclass
class ReplicaStep:
    """A step of one replica. `num_prefill_tokens` of it are for the metrics, once it is done."""

    replica: int
    scheduler: Scheduler
    step: SchedulerOutput
    num_prefill_tokens: int = 0


class Lane:
    """Steps of replicas in lockstep, as many in flight as their schedulers allow."""

    def __init__(self, schedulers: dict[int, Scheduler]) -> None:
        self._schedulers = schedulers
        self._max_steps_in_flight = min(s.max_steps_in_flight for s in schedulers.values())
        self._in_flight: deque[list[ReplicaStep]] = deque()
        self._outputs: dict[int, deque[ModelRunnerOutput]] = {replica: deque() for replica in schedulers}
        """Of steps that are not complete yet."""

    @property
    def replicas(self) -> Iterable[int]:
        return self._schedulers.keys()

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    def schedule(self) -> list[ReplicaStep]:
        """The lane's next step, one part per replica; nothing if no replica has work for it, or if as
        many steps as may be are in flight."""
        if len(self._in_flight) >= self._max_steps_in_flight:
            return []
        parts = [ReplicaStep(replica, s, s.schedule()) for replica, s in self._schedulers.items()]
        if not any(part.step.num_scheduled_tokens for part in parts):
            return []
        self._in_flight.append(parts)
        return parts

    def complete(
        self, replica: int, output: ModelRunnerOutput
    ) -> list[tuple[ReplicaStep, ModelRunnerOutput]]:
        """Take a replica's next output. If that completes the oldest step, its parts and outputs."""
        self._outputs[replica].append(output)
        if not all(self._outputs.values()):
            return []
        return [(part, self._outputs[part.replica].popleft()) for part in self._in_flight.popleft()]

    def abandon(self) -> None:
        """Forget all steps in flight: their outputs will not come."""
        self._in_flight.clear()
        for outputs in self._outputs.values():
            outputs.clear()
