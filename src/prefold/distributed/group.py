"""Groups of ranks and their collectives.

A `Group` is a constructor argument of whoever talks to other ranks. A group of size 1 is the
identity for every collective, so nobody outside this file asks for a group's size to decide
whether to call one.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from prefold.distributed.errors import (
    CollectiveError,
    CollectiveTimeout,
    RanksMissing,
    describe_call,
    describe_missing,
)
from prefold.distributed.mesh import Mesh
from prefold.distributed.rendezvous import init_distributed, listening_interface, shutdown_distributed
from prefold.distributed.shm import Waiter
from prefold.distributed.shm_collectives import ShmCollectives
from prefold.distributed.shm_host import Host, meet
from prefold.distributed.slots import PIECE_BYTES
from prefold.distributed.torch_collectives import Store, TorchCollectives
from prefold.kernels.recording import again

__all__ = [
    "GROUP_NAMES",
    "CollectiveError",
    "CollectiveTimeout",
    "Exchange",
    "Gather",
    "Group",
    "begin_step",
    "init_distributed",
    "make_groups",
    "shutdown_distributed",
]

logger = logging.getLogger(__name__)

GROUP_NAMES = ("tp", "pcp", "pp", "dp", "dcp", "dcp_pcp", "dcp_tp", "ep")
"""See `Mesh.groups`."""

Result = TypeVar("Result")


class Pending(Protocol):
    """A transport's all-gather or all-to-all in flight."""

    def wait(self) -> list[torch.Tensor]: ...

    def release(self) -> None: ...


class Collectives(Protocol):
    """A transport: tensors are contiguous, not empty, and flat (`reduce_scatter`: [size, n] -> [n];
    `all_gather`: [n] -> [size, n]; `start_all_to_all`: [n, width], where n may be 0). Ranks are places in
    the group. Raises RanksMissing after the time-out."""

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def broadcast(self, x: torch.Tensor, src: int) -> None: ...

    def barrier(self) -> None: ...

    def gather_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor: ...

    def start_all_gather(self, x: torch.Tensor) -> Pending: ...

    def start_all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], capacity: int, receive_counts: Sequence[int] | None
    ) -> Pending: ...

    def send(self, x: torch.Tensor, dst: int) -> None: ...

    def recv(self, out: torch.Tensor, src: int) -> None: ...


class Gather:
    """An all-gather that has been started. Call `wait`, then `release`, each once."""

    def __init__(
        self,
        parts: Callable[[], list[torch.Tensor]],
        release: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._release = release

    def wait(self) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order, own one included: to be read in place, never written.

        Valid until `release`. Other ranks may have to wait for that, so release soon.
        """
        return self._parts()

    def release(self) -> None:
        """The tensors that `wait` returned are no longer read."""
        self._release()


class Exchange(Gather):
    """An all-to-all that has been started: `wait` gives the rows from every rank, [n_i, width] each."""


class Group:
    """Ranks that run collectives together.

    All ranks of the group make the same calls in the same order, with tensors of equal shape and dtype:
    callers derive both from the global batch. A call on a tensor without elements does nothing at all.

    A call that does not complete within `timeout_s` raises CollectiveTimeout, which names the call
    and the missing ranks; if a rank that it waits for has died, CollectiveError says so at once. The group
    cannot be used after that. A group serves one thread.

    Args:
        name: see GROUP_NAMES; appears in `traffic` and in error messages.
        ranks: world ranks of the group; their order is that of all results.
        my_rank: this process's world rank.
        collectives: the transport; None for a group of size 1.
        transport: its name.

    Attributes:
        rank, size: place in the group, ranks in the group.
        transport: what is in use: "shm", "gloo" (torch.distributed, whatever its backend), or "none" for a
            group of size 1.
        traffic: `{"<name>.<op>": [calls, bytes]}`; bytes are what this rank hands to the collective
            (`x.nbytes`; for a broadcast only at its source; for an all-to-all only rows to other
            ranks; nothing for recv), whatever the transport makes of them.
        seconds: spent in calls and in their `wait`, under the same names, and recv: mostly waiting.
        spans: if a list, each of these appends (name, start, end) by `time.perf_counter`.
        step: of the engine, for error messages; see `begin_step`.
        trace: if a list, each call that is made appends (name, op, shape, dtype). The shape of an
            all-to-all is (capacity, width): how many rows go where is nothing that ranks agree on.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        my_rank: int,
        collectives: Collectives | None = None,
        transport: str = "none",
        timeout_s: float = 300.0,
    ) -> None:
        if my_rank not in ranks:
            raise ValueError(f"rank {my_rank} is not in group {name!r} of ranks {list(ranks)}")
        self.name = name
        self.ranks = list(ranks)
        self.rank = self.ranks.index(my_rank)
        self.size = len(self.ranks)
        self.transport = transport
        self.traffic: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] | None = None
        self.step: int | None = None
        self.trace: list[tuple[str, str, tuple[int, ...], str]] | None = None
        self._timeout_s = timeout_s
        self._sequence = 0
        self._collectives = collectives
        assert (collectives is None) == (self.size == 1), (name, self.ranks, collectives)

    @property
    def shares_memory(self) -> bool:
        """Whether ranks read each other's memory, rather than send. The same on all ranks of the group."""
        return self.transport == "shm"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place, and return it. Adds in float32; all ranks get equal bits.

        Where recorded layers are replayed it is called again, between their kernels.
        """
        if self._collectives is not None and x.numel():
            again(self._all_reduce, x)
        return x

    def _all_reduce(self, x: torch.Tensor) -> None:
        flat = x.contiguous().view(-1)
        self._call("all_reduce", x, x.nbytes, lambda c: c.all_reduce(flat))
        if not x.is_contiguous():
            x.copy_(flat.view(x.shape))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[...] -> [size, ...], into `out` (contiguous) if given. Size 1 without `out`: a view of `x`."""
        if self._collectives is None:
            return x.unsqueeze(0) if out is None else out.copy_(x.unsqueeze(0))
        if out is None:
            out = x.new_empty((self.size, *x.shape))
        assert out.shape == (self.size, *x.shape), (out.shape, x.shape)
        assert out.is_contiguous()
        if x.numel():
            flat, flat_out = x.contiguous().view(-1), out.view(self.size, -1)
            self._call("all_gather", x, x.nbytes, lambda c: c.all_gather(flat, flat_out))
        return out

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[size, ...] -> [...]: this rank's part of the sum, accumulated in float32, into `out`
        (contiguous) if given. Size 1 without `out`: a view of `x`."""
        assert x.shape[0] == self.size, (x.shape, self.size)
        if self._collectives is None:
            return x[0] if out is None else out.copy_(x[0])
        if out is None:
            out = x.new_empty(x.shape[1:])
        assert out.shape == x.shape[1:], (out.shape, x.shape)
        assert out.is_contiguous()
        if x.numel():
            flat, flat_out = x.contiguous().view(self.size, -1), out.view(-1)
            self._call("reduce_scatter", x, x.nbytes, lambda c: c.reduce_scatter(flat, flat_out))
        return out

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `x` with that of rank `src` of the group, and return it."""
        assert 0 <= src < self.size, (src, self.size)
        if self._collectives is not None and x.numel():
            flat = x.contiguous().view(-1)
            num_bytes = x.nbytes if self.rank == src else 0
            self._call("broadcast", x, num_bytes, lambda c: c.broadcast(flat, src))
            if not x.is_contiguous():
                x.copy_(flat.view(x.shape))
        return x

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self._collectives is not None:
            self._call("barrier", None, 0, lambda c: c.barrier())

    def gather_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to be filled and given to the next `start_all_gather`, which need not copy it then. It
        may be read until the gather is released."""
        numel = math.prod(shape)
        if self._collectives is None or numel == 0:
            return torch.empty(shape, dtype=dtype)
        started = time.perf_counter()
        try:
            flat = self._collectives.gather_buffer(numel, dtype)
        except (RanksMissing, CollectiveError) as error:
            raise self._explained(error, "all_gather", self._sequence + 1, self.step) from error
        self._note_time("all_gather", started)
        return flat.view(shape)

    def start_all_gather(self, x: torch.Tensor) -> Gather:
        """Begin to gather `x` and return at once; `x` may be overwritten after `wait`.

        A gather must be released before the second gather after it is started: two can be in
        flight. Other collectives of the group may run in between.
        """
        if self._collectives is None or x.numel() == 0:
            parts = [x] * self.size
            return Gather(lambda: parts, lambda: None)
        flat = x.contiguous().view(-1)
        pending = self._call("all_gather", x, x.nbytes, lambda c: c.start_all_gather(flat))
        return Gather(self._waiting("all_gather", pending, x.shape), pending.release)

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        capacity: int,
        receive_counts: Sequence[int] | None = None,
    ) -> Exchange:
        """Begin to send rows of `x` to the other ranks and return at once.

        `x` must not change before `release`: rows that a rank has for itself are not copied.

        An exchange must be released before the second exchange after it is started: two can be in
        flight. Other collectives of the group may run in between.

        Args:
            x: [n, width], contiguous, any dtype, sorted by destination. A rank without rows takes part, too.
            send_counts: [size] rows for each rank of the group, n in sum.
            capacity: at least n, and equal on all ranks: shared memory is sized by it. 0: nothing happens.
            receive_counts: [size] rows that come from each rank, if they are known; else they travel, too.
        """
        n, width = x.shape
        assert len(send_counts) == self.size, (send_counts, self.size)
        assert sum(send_counts) == n <= capacity, (send_counts, n, capacity)
        assert width
        assert x.is_contiguous()
        if self._collectives is None or capacity == 0:
            parts = [x] * self.size
            return Exchange(lambda: parts, lambda: None)
        num_bytes = (n - send_counts[self.rank]) * width * x.element_size()
        pending = self._call(
            "all_to_all",
            x,
            num_bytes,
            lambda c: c.start_all_to_all(x, send_counts, capacity, receive_counts),
            shape=(capacity, width),
        )
        return Exchange(self._waiting("all_to_all", pending), pending.release)

    def send(self, x: torch.Tensor, dst: int) -> None:
        """Give `x` to rank `dst` of the group, which calls `recv` with a tensor of the same shape and dtype.

        Returns without waiting for that while fewer than two earlier messages are unread; `x` may then be
        overwritten. This process must live until its messages are read.
        """
        assert dst != self.rank
        if x.numel():
            flat = x.contiguous().view(-1)
            self._call("send", x, x.nbytes, lambda c: c.send(flat, dst))

    def recv(self, out: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `out` (contiguous) with the next message of rank `src` of the group, and return it."""
        assert src != self.rank
        assert out.is_contiguous()
        if out.numel():
            self._call("recv", out, None, lambda c: c.recv(out.view(-1), src))
        return out

    def _waiting(
        self, op: str, pending: Pending, shape: torch.Size | None = None
    ) -> Callable[[], list[torch.Tensor]]:
        """The `wait` of what the last call started; parts get `shape`, if one is given."""
        sequence, step = self._sequence, self.step

        def wait() -> list[torch.Tensor]:
            started = time.perf_counter()
            try:
                parts = pending.wait()
            except (RanksMissing, CollectiveError) as error:
                raise self._explained(error, op, sequence, step) from error
            self._note_time(op, started)
            return parts if shape is None else [part.view(shape) for part in parts]

        return wait

    def _call(
        self,
        op: str,
        x: torch.Tensor | None,
        num_bytes: int | None,
        run: Callable[[Collectives], Result],
        shape: tuple[int, ...] | None = None,
    ) -> Result:
        """Count and run one collective. `num_bytes` None: another rank counts it."""
        assert self._collectives is not None
        self._sequence += 1
        if num_bytes is not None:
            count = self.traffic.setdefault(f"{self.name}.{op}", [0, 0])
            count[0] += 1
            count[1] += num_bytes
        if self.trace is not None:
            dtype = "" if x is None else str(x.dtype)
            self.trace.append((self.name, op, shape or (() if x is None else tuple(x.shape)), dtype))
        started = time.perf_counter()
        try:
            result = run(self._collectives)
        except (RanksMissing, CollectiveError) as error:
            raise self._explained(error, op, self._sequence, self.step) from error
        self._note_time(op, started)
        return result

    def _note_time(self, op: str, started: float) -> None:
        ended, key = time.perf_counter(), f"{self.name}.{op}"
        self.seconds[key] = self.seconds.get(key, 0.0) + ended - started
        if self.spans is not None:
            self.spans.append((key, started, ended))

    def _explained(
        self, error: RanksMissing | CollectiveError, op: str, sequence: int, step: int | None
    ) -> CollectiveError:
        """The error, saying which call of which group it was."""
        call = describe_call(op, self.name, sequence, step)
        if isinstance(error, CollectiveError):
            return CollectiveError(f"{call}: {error}")
        missing = [self.ranks[rank] for rank in error.missing]
        if error.reason is None:
            return CollectiveTimeout(op, self.name, sequence, missing, self._timeout_s, step)
        return CollectiveError(f"{call}: {error.reason}; {describe_missing(missing)}")


def begin_step(groups: dict[str, Group], step_id: int) -> None:
    """Errors of collectives name this step from here on."""
    for group in groups.values():
        group.step = step_id


def make_groups(
    mesh: Mesh,
    rank: int,
    transport: str = "shm",
    timeout_s: float = 300.0,
    store: Store | None = None,
    piece_bytes: int = PIECE_BYTES,
    nnodes: int = 1,
) -> dict[str, Group]:
    """This rank's groups, by GROUP_NAMES. All ranks call it together, after `init_distributed`.

    Args:
        transport: "shm" (CPU tensors; groups that span nodes use gloo, and so do all, with a warning, where
            shared memory is impossible) or "gloo" (whatever backend torch.distributed has, so also NCCL).
        timeout_s: how long a call may take.
        store: what `init_distributed` returned.
        piece_bytes: large tensors move through shared memory in pieces of this size.
        nnodes: ranks are spread over so many hosts evenly, in order.
    """
    if transport not in ("shm", "gloo"):
        raise ValueError(f"transport={transport!r} is neither 'shm' nor 'gloo'")
    if mesh.world_size % nnodes:
        raise ValueError(f"world size {mesh.world_size} is not a multiple of nnodes={nnodes}")
    ranks_per_node = mesh.world_size // nnodes
    own = {name: mesh.group_of(name, rank) for name in GROUP_NAMES}
    words = {name: ShmCollectives.header_words(len(own[name])) for name in GROUP_NAMES}
    host = None
    if transport == "shm" and mesh.world_size > 1:
        host = _meet_host(rank, ranks_per_node, sum(words.values()))

    def shares_memory(ranks: list[int]) -> bool:
        return host is not None and len({member // ranks_per_node for member in ranks}) == 1

    all_groups = [ranks for name in GROUP_NAMES for ranks in mesh.groups(name) if not shares_memory(ranks)]
    process_groups = _make_process_groups(all_groups, rank, timeout_s, store)
    # os.cpu_count, not the affinity: a worker pinned to its core still has that core to itself.
    can_spin = ranks_per_node <= (os.cpu_count() or 1)
    groups = {}
    start = 0
    for name, ranks in own.items():
        place = ranks.index(rank)
        if len(ranks) == 1:
            groups[name] = Group(name, ranks, rank)
        elif host is not None and shares_memory(ranks):
            waiter = Waiter(timeout_s, can_spin, _ended_places(host, ranks))
            headers = host.headers(ranks, start, words[name])
            pids = [host.pids[member] for member in ranks]
            shm = ShmCollectives(place, headers, pids, waiter, piece_bytes)
            groups[name] = Group(name, ranks, rank, shm, "shm", timeout_s)
        else:
            pg = process_groups[frozenset(ranks)]
            gloo = TorchCollectives(name, ranks, place, pg, timeout_s, store)
            groups[name] = Group(name, ranks, rank, gloo, "gloo", timeout_s)
        start += words[name]
    return groups


def _meet_host(rank: int, ranks_per_node: int, words: int) -> Host | None:
    """None, on all ranks, if one of them cannot share memory."""

    def exchange(value: object) -> list:
        values: list = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    first = rank // ranks_per_node * ranks_per_node
    host = meet(rank, range(first, first + ranks_per_node), words, exchange)
    if isinstance(host, str):
        logger.warning("all groups use gloo, which is slower: %s", host)
        return None
    return host


def _ended_places(host: Host, ranks: list[int]) -> Callable[[Sequence[int]], list[int]]:
    """Host.ended in places of a group."""
    return lambda places: [ranks.index(member) for member in host.ended([ranks[place] for place in places])]


def _make_process_groups(
    groups: list[list[int]], rank: int, timeout_s: float, store: Store | None
) -> dict[frozenset[int], dist.ProcessGroup]:
    """One for each set of ranks that `rank` belongs to, however many groups it has.

    Every rank takes part in making every process group, in the same order.
    """
    made: dict[frozenset[int], dist.ProcessGroup] = {}
    seen: set[frozenset[int]] = set()
    for ranks in groups:
        members = frozenset(ranks)
        if len(ranks) == 1 or members in seen:
            continue
        seen.add(members)
        # Not dist.group.WORLD either: after a time-out gloo closes all connections of a process group.
        with listening_interface(store):
            pg = dist.new_group(sorted(ranks), timeout=timedelta(seconds=timeout_s))
        if rank in members:
            assert isinstance(pg, dist.ProcessGroup)
            made[members] = pg
    return made
