"""Ranks as threads of one process: a whole mesh of them starts in milliseconds.

`ThreadGroup` has the ops of `distributed.group.Group` and is stricter: ranks that do not make the same
call with the same shape are told at once who called what, inputs must not change before `wait`, and what
is read after `release` is poisoned. For ranks as processes, with the real collectives, see `run_ranks`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from prefold.distributed.errors import CollectiveError, CollectiveTimeout, describe_call
from prefold.distributed.mesh import AXES, CARVED, Mesh
from prefold.kernels.recording import again

T = TypeVar("T")

IN_FLIGHT = 2
"""Exchanges of a kind, and unread messages to a rank, that may be in flight in a group."""

TIMEOUT_S = 60.0


class RankEnded(CollectiveError):
    """This rank ends because another one has failed or has returned: that is the error to look at."""


@dataclass(frozen=True)
class Signature:
    """What all ranks of a group must agree on in a call."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    about: str = ""

    def __str__(self) -> str:
        return f"{self.op}{self.about} of {list(self.shape)} {self.dtype}".rstrip()


class _Call:
    """One collective of a group, from the first rank that comes to the last that leaves."""

    def __init__(self, signature: Signature, rank: int, size: int) -> None:
        self.signature, self.first = signature, rank
        self.inputs: list[list[torch.Tensor] | None] = [None] * size
        self.left: set[int] = set()


class _Hub:
    """Where the ranks of one group meet."""

    def __init__(self, name: str, ranks: list[int], world: ThreadWorld) -> None:
        self.name, self.ranks, self.world = name, ranks, world
        self.condition = threading.Condition()
        self.calls: dict[int, _Call] = {}
        self.messages: dict[tuple[int, int], deque[tuple[Signature, torch.Tensor]]] = {}

    def wait(self, missing: Callable[[], list[int]], what: tuple[str, int, int | None]) -> None:
        """Until `missing()` names no place any more; `what` is (op, sequence, step). `condition` is held.

        RankEnded as soon as that cannot happen, CollectiveTimeout after a while.
        """
        world = self.world

        def gone() -> list[int]:
            return [self.ranks[place] for place in missing() if self.ranks[place] in world.ended]

        def settled() -> bool:
            return world.failure is not None or bool(gone()) or not missing()

        in_time = self.condition.wait_for(settled, world.timeout_s)
        if not missing():
            return
        op, sequence, step = what
        if not in_time:
            late = [self.ranks[place] for place in missing()]
            raise CollectiveTimeout(op, self.name, sequence, late, world.timeout_s, step)
        call = describe_call(op, self.name, sequence, step)
        if world.failure is not None:
            raise RankEnded(f"{call} ends with the failure of another rank")
        raise RankEnded(f"{call} waits for rank {gone()[0]}, which has returned")


class ThreadWorld:
    """What the ranks of a mesh share.

    Attributes:
        timeout_s: how long a call may wait for other ranks.
        failure: the first error of a rank. From then on every call on any group raises RankEnded.
        ended: ranks that have returned.
    """

    def __init__(self, mesh: Mesh, timeout_s: float = TIMEOUT_S) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self.failure: BaseException | None = None
        self.ended: set[int] = set()
        self._hubs = {
            name: [_Hub(name, ranks, self) for ranks in mesh.groups(name)] for name in (*AXES, *CARVED)
        }

    def groups(self, rank: int) -> dict[str, ThreadGroup]:
        """All groups of `rank`, by the names that `make_groups` gives them. To be called once per rank."""
        found = {}
        for name, hubs in self._hubs.items():
            hub = next(hub for hub in hubs if rank in hub.ranks)
            found[name] = ThreadGroup(hub, rank)
        return found

    def fail(self, error: BaseException) -> None:
        """End all ranks at their next or present call."""
        if self.failure is None:
            self.failure = error
        self._wake()

    def end(self, rank: int) -> None:
        """`rank` makes no more calls: whoever waits for it is told."""
        self.ended.add(rank)
        self._wake()

    def _wake(self) -> None:
        for hubs in self._hubs.values():
            for hub in hubs:
                with hub.condition:
                    hub.condition.notify_all()


class ThreadGroup:
    """One rank's handle on a group; see `distributed.group.Group` for the contract of each op.

    Attributes:
        shares_memory, name, ranks, rank, size, traffic, seconds, spans, step, trace: as Group's.
        num_gathers: calls of `start_all_gather` that moved something.
    """

    transport = "threads"
    shares_memory = True

    def __init__(self, hub: _Hub, my_rank: int) -> None:
        self.name, self.ranks = hub.name, list(hub.ranks)
        self.rank, self.size = self.ranks.index(my_rank), len(self.ranks)
        self.traffic: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] | None = None
        self.step: int | None = None
        self.trace: list | None = None
        self.num_gathers = 0
        self._hub = hub
        self._sequence = 0
        self._started: dict[str, list[int]] = {"all_gather": [], "all_to_all": []}
        self._in_flight = {"all_gather": 0, "all_to_all": 0}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place, added in the order of the ranks on each of them."""
        if self.size > 1 and x.numel():
            again(self._all_reduce, x)
        return x

    def _all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(_sum(self._exchange(_signature("all_reduce", x), x)))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x of every rank: [size, *x.shape]."""
        if self.size == 1:
            return x.unsqueeze(0) if out is None else out.copy_(x.unsqueeze(0))
        out = x.new_empty((self.size, *x.shape)) if out is None else out
        assert out.shape == (self.size, *x.shape), (out.shape, x.shape)
        assert out.is_contiguous()
        if x.numel():
            torch.stack(self._exchange(_signature("all_gather", x), x), out=out)
        return out

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[size, ...] -> [...]: this rank's part of the sum."""
        assert x.shape[0] == self.size, (x.shape, self.size)
        if self.size == 1:
            return x[0] if out is None else out.copy_(x[0])
        out = x.new_empty(x.shape[1:]) if out is None else out
        assert out.shape == x.shape[1:], (out.shape, x.shape)
        assert out.is_contiguous()
        if x.numel():
            parts = self._exchange(_signature("reduce_scatter", x), x)
            out.copy_(_sum([part[self.rank] for part in parts]))
        return out

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `x` with that of place `src`, and return it."""
        assert 0 <= src < self.size, (src, self.size)
        if self.size == 1 or x.numel() == 0:
            return x
        num_bytes = x.nbytes if self.rank == src else 0
        sequence = self._post(_signature("broadcast", x, f" from place {src}"), [x.clone()], num_bytes)
        x.copy_(self._collect(sequence, [src])[0][0])
        self._leave(sequence)
        return x

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self.size > 1:
            sequence = self._post(Signature("barrier", (), ""), [], 0)
            self._collect(sequence)
            self._leave(sequence)

    def gather_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def start_all_gather(self, x: torch.Tensor) -> ThreadExchange:
        """x of every rank, later; x must not change before `wait`."""
        if self.size == 1 or x.numel() == 0:
            return ThreadExchange(lambda: [x] * self.size, lambda: None, x)
        self.num_gathers += 1
        return self._start(_signature("all_gather", x), [x.clone()] * self.size, x.nbytes, x)

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        capacity: int,
        receive_counts: Sequence[int] | None = None,
    ) -> ThreadExchange:
        """Rows of x [n, width], sorted by destination: `send_counts[i]` of them to place i."""
        num_rows, width = x.shape
        counts = list(send_counts)
        assert len(counts) == self.size, (counts, self.size)
        assert min(counts) >= 0, counts
        assert sum(counts) == num_rows <= capacity, (counts, num_rows, capacity)
        if self.size == 1 or capacity == 0 or width == 0:
            assert self.size == 1 or num_rows == 0 or width == 0, "capacity 0 has no rows"
            parts = list(x.split(counts))
            return ThreadExchange(lambda: parts, lambda: None, x)
        shape = Signature("all_to_all", (capacity, width), str(x.dtype))
        num_bytes = (num_rows - counts[self.rank]) * width * x.element_size()
        expected = None if receive_counts is None else list(receive_counts)
        return self._start(shape, list(x.clone().split(counts)), num_bytes, x, expected)

    def send(self, x: torch.Tensor, dst: int) -> None:
        """To place `dst`; waits only while IN_FLIGHT messages to it are unread."""
        assert 0 <= dst < self.size, (dst, self.size)
        assert dst != self.rank, "a rank sends nothing to itself"
        if x.numel() == 0:
            return
        signature = _signature("send", x)
        self._count(signature, x.nbytes)
        with self._hub.condition:
            queue = self._hub.messages.setdefault((self.rank, dst), deque())
            self._wait("send", lambda: [dst] if len(queue) >= IN_FLIGHT else [])
            queue.append((signature, x.clone()))
            self._hub.condition.notify_all()

    def recv(self, out: torch.Tensor, src: int) -> torch.Tensor:
        """The next message of place `src`, into `out`."""
        assert 0 <= src < self.size, (src, self.size)
        assert src != self.rank, "a rank sends nothing to itself"
        if out.numel() == 0:
            return out
        wanted = _signature("send", out)
        self._count(_signature("recv", out), 0)
        with self._hub.condition:
            queue = self._hub.messages.setdefault((src, self.rank), deque())
            self._wait("recv", lambda: [] if queue else [src])
            signature, message = queue.popleft()
            self._hub.condition.notify_all()
        if signature != wanted:
            self._disagree(f"expects {wanted}", self.ranks[src], f"sent {signature}")
        return out.copy_(message)

    def _start(
        self,
        signature: Signature,
        rows: list[torch.Tensor],
        num_bytes: int,
        x: torch.Tensor,
        receive_counts: list[int] | None = None,
    ) -> ThreadExchange:
        """Begin what is waited for later. `rows`: what goes to each place."""
        op = signature.op
        assert self._in_flight[op] < IN_FLIGHT, f"{IN_FLIGHT} of {op} are in flight: release one first"
        started = self._started[op]
        if len(started) >= IN_FLIGHT:
            with self._hub.condition:
                last = started.pop(0)
                held = self._holders(last)
                assert self.rank not in held, f"release call {last}, {op}, before the second after it"
                self._wait(op, lambda: self._holders(last))
        sequence = self._post(signature, rows, num_bytes)
        started.append(sequence)
        self._in_flight[op] += 1

        def wait() -> list[torch.Tensor]:
            parts = [sent[self.rank].clone() for sent in self._collect(sequence)]
            if receive_counts is not None:
                assert [len(part) for part in parts] == receive_counts, "receive_counts are wrong"
            return parts

        def release() -> None:
            self._in_flight[op] -= 1
            self._leave(sequence)

        return ThreadExchange(wait, release, x)

    def _holders(self, sequence: int) -> list[int]:
        """Places that have not released call `sequence`."""
        call = self._hub.calls.get(sequence)
        return [] if call is None else [i for i in range(self.size) if i not in call.left]

    def _exchange(self, signature: Signature, x: torch.Tensor) -> list[torch.Tensor]:
        sequence = self._post(signature, [x.clone()], x.nbytes)
        parts = [sent[0] for sent in self._collect(sequence)]
        self._leave(sequence)
        return parts

    def _post(self, signature: Signature, sent: list[torch.Tensor], num_bytes: int) -> int:
        """Take part in the next call, without waiting. CollectiveError if other ranks make another call."""
        self._sequence += 1
        self._count(signature, num_bytes)
        with self._hub.condition:
            calls = self._hub.calls
            call = calls.setdefault(self._sequence, _Call(signature, self.rank, self.size))
            if call.signature != signature:
                self._disagree(f"calls {signature}", self.ranks[call.first], f"called {call.signature}")
            call.inputs[self.rank] = sent
            self._hub.condition.notify_all()
        return self._sequence

    def _collect(self, sequence: int, places: Sequence[int] | None = None) -> list[list[torch.Tensor]]:
        """What all places (or `places`) brought to call `sequence`, when it is there."""
        call = self._hub.calls[sequence]
        wanted = range(self.size) if places is None else places
        with self._hub.condition:
            self._wait(call.signature.op, lambda: [i for i in wanted if call.inputs[i] is None], sequence)
        return [sent for i in wanted if (sent := call.inputs[i]) is not None]

    def _leave(self, sequence: int) -> None:
        with self._hub.condition:
            call = self._hub.calls[sequence]
            call.left.add(self.rank)
            if len(call.left) == self.size:
                del self._hub.calls[sequence]
            self._hub.condition.notify_all()

    def _wait(self, op: str, missing: Callable[[], list[int]], sequence: int | None = None) -> None:
        started = time.perf_counter()
        self._hub.wait(missing, (op, self._sequence if sequence is None else sequence, self.step))
        ended, key = time.perf_counter(), f"{self.name}.{op}"
        self.seconds[key] = self.seconds.get(key, 0.0) + ended - started
        if self.spans is not None:
            self.spans.append((key, started, ended))

    def _count(self, signature: Signature, num_bytes: int) -> None:
        op = signature.op
        if op != "recv":
            count = self.traffic.setdefault(f"{self.name}.{op}", [0, 0])
            count[0] += 1
            count[1] += num_bytes
        if self.trace is not None:
            self.trace.append((self.name, op, signature.shape, signature.dtype))

    def _disagree(self, ours: str, other: int, theirs: str) -> None:
        at = "" if self.step is None else f"step {self.step}: "
        raise CollectiveError(
            f"{at}call {self._sequence} of group {self.name!r} {self.ranks}: "
            f"rank {self.ranks[self.rank]} {ours}, rank {other} {theirs}"
        )


class ThreadExchange:
    """See `distributed.group.Gather`. What breaks its rules shows: `x` changed before `wait`, parts
    written, or read after `release`, or either called twice."""

    def __init__(
        self, parts: Callable[[], list[torch.Tensor]], release: Callable[[], None], x: torch.Tensor
    ) -> None:
        self._collect, self._release = parts, release
        self._x, self._at_start = x, x.clone()
        self._parts: list[torch.Tensor] | None = None
        self._kept: list[torch.Tensor] = []

    def wait(self) -> list[torch.Tensor]:
        """Every rank's part, to be read until `release`."""
        assert self._parts is None, "waited for twice"
        assert _same_bits(self._x, self._at_start), "changed while it was exchanged"
        self._parts = self._collect()
        self._kept = [part.clone() for part in self._parts]
        return list(self._parts)

    def release(self) -> None:
        """The parts are no longer read."""
        assert self._parts is not None, "released before it was waited for, or twice"
        own = self._x.untyped_storage().data_ptr()
        for part, kept in zip(self._parts, self._kept, strict=True):
            if part.untyped_storage().data_ptr() == own:
                continue  # a group of one hands out x itself, which may be overwritten by now
            assert _same_bits(part, kept), "a part was written: other ranks read the same memory"
            part.fill_(torch.nan if part.is_floating_point() else 77)
        self._parts = None
        self._release()


def _signature(op: str, x: torch.Tensor, about: str = "") -> Signature:
    return Signature(op, tuple(x.shape), str(x.dtype), about)


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32, in the order of the ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    def flat(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().view(-1).view(torch.uint8)

    return x.numel() == 0 or torch.equal(flat(x), flat(y))


def run_mesh_threads(
    mesh: Mesh, function: Callable[[int, dict[str, ThreadGroup]], T], timeout_s: float = TIMEOUT_S
) -> list[T]:
    """`function(rank, groups)` on a thread per rank of `mesh`; results by rank. The first error is raised."""
    world = ThreadWorld(mesh, timeout_s)

    def rank_main(rank: int) -> T:
        try:
            torch.set_num_threads(1)
            result = function(rank, world.groups(rank))
        except BaseException as error:
            world.fail(error)
            raise
        world.end(rank)
        return result

    with ThreadPoolExecutor(mesh.world_size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(mesh.world_size)]
    if world.failure is not None:
        raise world.failure
    return [future.result() for future in futures]


def run_threads(size: int, function: Callable[[ThreadGroup], T]) -> list[T]:
    """`function(group)` on `size` threads that share a group, "tp"; results by rank."""
    return run_mesh_threads(Mesh(tp=size), lambda rank, groups: function(groups["tp"]))


def single_rank_groups() -> dict[str, ThreadGroup]:
    """The groups of a world of one rank: every collective is the identity."""
    return ThreadWorld(Mesh()).groups(0)


def single_rank() -> ThreadGroup:
    """A group of one: every collective is the identity."""
    return single_rank_groups()["tp"]
