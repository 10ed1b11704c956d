"""Groups of ranks and their collectives.

A `Group` is a constructor argument of whoever talks to other ranks. A group of size 1 is the
identity for every collective, so nobody outside this file asks for a group's size to decide
whether to call one.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from prefold.distributed.errors import CollectiveError, CollectiveTimeout, RanksMissing
from prefold.distributed.mesh import Mesh
from prefold.distributed.shm import Waiter, shared_memory_is_supported
from prefold.distributed.shm_collectives import ShmCollectives
from prefold.distributed.torch_collectives import Store, TorchCollectives

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "Gather",
    "Group",
    "init_distributed",
    "make_groups",
    "shutdown_distributed",
]

logger = logging.getLogger(__name__)

SLOT_BYTES = 4 << 20
"""Default size of a shared-memory slot for started gathers."""

Result = TypeVar("Result")


class PendingGather(Protocol):
    """A transport's all-gather in flight."""

    def wait(self) -> list[torch.Tensor]: ...

    def release(self) -> None: ...


class Collectives(Protocol):
    """A transport: tensors are contiguous, not empty, and flat (`reduce_scatter`: [size, n] -> [n];
    `all_gather`: [n] -> [size, n]). Raises RanksMissing after the time-out."""

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def broadcast(self, x: torch.Tensor, src: int) -> None: ...

    def barrier(self) -> None: ...

    def start_all_gather(self, x: torch.Tensor) -> PendingGather: ...


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


class Group:
    """Ranks that run collectives together.

    All ranks of the group make the same calls in the same order, with tensors of equal shape and dtype:
    callers derive both from the global batch. A call on a tensor without elements does nothing at all.

    A call that does not complete within `timeout_s` raises CollectiveTimeout, which names the call
    and the missing ranks. The group cannot be used after that. A group serves one thread.

    Args:
        name: of the axis ("tp", "pcp"); appears in `traffic` and in error messages.
        ranks: world ranks of the group, ascending.
        my_rank: this process's world rank.
        transport: "shm" (ranks of one host, CPU tensors; falls back to gloo, with a warning, where that
            is impossible) or "gloo" (whatever backend `pg` has, so also NCCL).
        timeout_s: how long a call may take.
        pg: process group over `ranks`; not needed by a group of size 1. "shm" uses it to set up.
        store: the rendezvous store, by which gloo finds out who is missing.
        slot_bytes: shared memory for what `start_all_gather` sends; each rank has two such slots, and they
            grow when a larger tensor comes.
        can_spin: waiting may keep a core busy; pass False if there are more ranks than cores.

    Attributes:
        rank, size: place in the group, ranks in the group.
        transport: what is in use: "shm", "gloo", or "none" for a group of size 1.
        traffic: `{"<name>.<op>": [calls, bytes]}`; bytes are what this rank hands to the collective
            (`x.nbytes`; for a broadcast only at its source), whatever the transport makes of them.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        my_rank: int,
        transport: str = "gloo",
        timeout_s: float = 300.0,
        pg: dist.ProcessGroup | None = None,
        store: Store | None = None,
        slot_bytes: int = SLOT_BYTES,
        can_spin: bool = True,
    ) -> None:
        if my_rank not in ranks:
            raise ValueError(f"rank {my_rank} is not in group {name!r} of ranks {ranks}")
        if transport not in ("shm", "gloo"):
            raise ValueError(f"transport={transport!r} is neither 'shm' nor 'gloo'")
        self.name = name
        self.ranks = list(ranks)
        self.rank = ranks.index(my_rank)
        self.size = len(ranks)
        self.traffic: dict[str, list[int]] = {}
        self._timeout_s = timeout_s
        self._sequence = 0
        self._collectives: Collectives | None = None
        self.transport = "none"
        if self.size == 1:
            return
        assert pg is not None, f"group {name!r} has {self.size} ranks and no process group"
        if transport == "shm":
            waiter = Waiter(timeout_s, can_spin)
            self._collectives = self._share_memory(pg, slot_bytes, waiter)
            self.transport = "shm"
        if self._collectives is None:
            self.transport = "gloo"
            self._collectives = TorchCollectives(self.ranks, self.rank, pg, timeout_s, store)

    def _share_memory(self, pg: dist.ProcessGroup, slot_bytes: int, waiter: Waiter) -> ShmCollectives | None:
        """None, on all ranks, if the machine or the memory left does not allow it."""

        def exchange(value: object) -> list:
            values: list = [None] * self.size
            dist.all_gather_object(values, value, group=pg)
            return values

        if not shared_memory_is_supported():
            logger.warning("group %r uses gloo: shared memory needs x86-64 Linux", self.name)
            return None
        try:
            return ShmCollectives(self.rank, self.size, slot_bytes, waiter, exchange)
        except CollectiveError as error:
            logger.warning("group %r uses gloo, which is slower: %s", self.name, error)
            return None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place, and return it. Adds in float32; all ranks get equal bits."""
        if self._collectives is not None and x.numel():
            flat = x.contiguous().view(-1)
            self._call("all_reduce", x.nbytes, lambda c: c.all_reduce(flat))
            if not x.is_contiguous():
                x.copy_(flat.view(x.shape))
        return x

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
            self._call("all_gather", x.nbytes, lambda c: c.all_gather(flat, flat_out))
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
            self._call("reduce_scatter", x.nbytes, lambda c: c.reduce_scatter(flat, flat_out))
        return out

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `x` with that of rank `src` of the group, and return it."""
        assert 0 <= src < self.size, (src, self.size)
        if self._collectives is not None and x.numel():
            flat = x.contiguous().view(-1)
            num_bytes = x.nbytes if self.rank == src else 0
            self._call("broadcast", num_bytes, lambda c: c.broadcast(flat, src))
            if not x.is_contiguous():
                x.copy_(flat.view(x.shape))
        return x

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self._collectives is not None:
            self._call("barrier", 0, lambda c: c.barrier())

    def start_all_gather(self, x: torch.Tensor) -> Gather:
        """Begin to gather `x` and return at once; `x` may be overwritten after `wait`.

        A gather must be released before the second gather after it is started: two can be in
        flight. Other collectives of the group may run in between.
        """
        if self._collectives is None or x.numel() == 0:
            parts = [x] * self.size
            return Gather(lambda: parts, lambda: None)
        flat = x.contiguous().view(-1)
        pending = self._call("all_gather", x.nbytes, lambda c: c.start_all_gather(flat))
        sequence = self._sequence

        def wait() -> list[torch.Tensor]:
            with self._named("all_gather", sequence):
                return [part.view(x.shape) for part in pending.wait()]

        return Gather(wait, pending.release)

    def _call(self, op: str, num_bytes: int, run: Callable[[Collectives], Result]) -> Result:
        """Count and run one collective."""
        assert self._collectives is not None
        self._sequence += 1
        count = self.traffic.setdefault(f"{self.name}.{op}", [0, 0])
        count[0] += 1
        count[1] += num_bytes
        with self._named(op, self._sequence):
            return run(self._collectives)

    @contextmanager
    def _named(self, op: str, sequence: int) -> Iterator[None]:
        """Say in errors which call of which group it was."""
        try:
            yield
        except RanksMissing as error:
            missing = [self.ranks[rank] for rank in error.missing]
            raise CollectiveTimeout(op, self.name, sequence, missing, self._timeout_s) from error
        except CollectiveError as error:
            raise CollectiveError(f"{op} (call {sequence} of group {self.name!r}): {error}") from error


def init_distributed(
    rank: int,
    world_size: int,
    init_file: str | Path,
    backend: str = "gloo",
    timeout_s: float = 300.0,
) -> Store | None:
    """Meet the other ranks by way of `init_file`, a path that does not exist yet (no ports needed).

    Returns the rendezvous store for `make_groups`. A world of 1 needs none and does not touch
    torch.distributed.
    """
    if world_size == 1:
        return None
    timeout = timedelta(seconds=timeout_s)
    store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        str(init_file), world_size
    )
    store.set_timeout(timeout)
    with _loopback():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def make_groups(
    mesh: Mesh,
    rank: int,
    transport: str = "shm",
    timeout_s: float = 300.0,
    store: Store | None = None,
    slot_bytes: int = SLOT_BYTES,
) -> dict[str, Group]:
    """{"tp": Group, "pcp": Group} of this rank. All ranks call it together, after `init_distributed`."""
    # os.cpu_count, not the affinity: a worker pinned to its core still has that core to itself.
    can_spin = mesh.world_size <= (os.cpu_count() or 1)
    groups = {}
    for axis in ("tp", "pcp"):
        own_pg = None
        for ranks in mesh.groups(axis):
            # Every rank takes part in making every process group, in the same order.
            if len(ranks) > 1:
                with _loopback():
                    pg = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
                if rank in ranks:
                    assert isinstance(pg, dist.ProcessGroup)
                    own_pg = pg
        groups[axis] = Group(
            axis, mesh.group_of(axis, rank), rank, transport, timeout_s, own_pg, store, slot_bytes, can_spin
        )
    return groups


def shutdown_distributed() -> None:
    """Leave torch.distributed, if this process ever joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo listen on the loopback interface, unless the user chose one: all ranks are on this host.

    gloo reads its choice from the environment when a process group is made, and only then.
    """
    variable = "GLOO_SOCKET_IFNAME"
    if variable in os.environ or all(name != "lo" for _, name in socket.if_nameindex()):
        yield
        return
    os.environ[variable] = "lo"
    try:
        yield
    finally:
        del os.environ[variable]
