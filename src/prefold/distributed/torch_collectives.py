"""Collectives over torch.distributed: gloo between CPU ranks, NCCL between CUDA ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from prefold.distributed.errors import RanksMissing

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]

GRACE_S = 1.0
"""After a failure, how long ranks wait for each other's note that they were there."""

NUM_SENDS = 2
"""Messages to a rank that may be unread before a send waits."""


class TorchPending:
    """A gather or an exchange in flight into a buffer of its own. `parts` are views of it."""

    def __init__(
        self, finish: Callable[[], None], parts: list[torch.Tensor], give_back: Callable[[], None]
    ) -> None:
        self._finish = finish
        self._parts = parts
        self._give_back = give_back

    def wait(self) -> list[torch.Tensor]:
        self._finish()
        return self._parts

    def release(self) -> None:
        self._give_back()


class TorchCollectives:
    """See `group.Collectives`. Sums run in float32, in the order that the library chooses.

    A process group sorts its ranks, and groups of the same ranks share one: `ranks` may have another order.

    With NCCL, calls return when the work is queued on the current stream, and its watchdog, not this
    class, ends ranks that hang. With gloo a time-out or a lost peer raises here.

    Args:
        name: of the group.
        ranks: world ranks of the group.
        rank: in the group.
        pg: process group over `ranks`.
        store: the rendezvous store, to find out who is missing after a failure.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        pg: dist.ProcessGroup,
        timeout_s: float,
        store: Store | None,
    ) -> None:
        self._name = name
        self._ranks = ranks
        self._rank = rank
        self._pg = pg
        self._timeout_s = timeout_s
        self._store = store
        self._places = [ranks.index(member) for member in sorted(ranks)]
        self._calls = 0
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._free_buffers: list[torch.Tensor] = []
        self._sends: dict[int, list[tuple[Callable[[], None], torch.Tensor]]] = {}

    def all_reduce(self, x: torch.Tensor) -> None:
        total = self._in_float32(x)
        self._run(lambda: dist.all_reduce(total, group=self._pg, async_op=True))
        if total is not x:
            x.copy_(total)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        rows = [out[place] for place in self._places]
        self._run(lambda: dist.all_gather(rows, x, group=self._pg, async_op=True))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        terms = self._in_float32(x)
        if x.is_cuda:
            total = self._buffer("reduce_scatter", out.numel(), terms)
            rows = [terms[place] for place in self._places]
            self._run(lambda: dist.reduce_scatter(total, rows, group=self._pg, async_op=True))
            out.copy_(total)
            return
        # gloo's own reduce-scatter is slower than its all-reduce.
        total = terms if terms is not x else self._buffer("sum", x.numel(), x).view_as(x).copy_(x)
        self._run(lambda: dist.all_reduce(total, group=self._pg, async_op=True))
        out.copy_(total[self._rank])

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        self._run(lambda: dist.broadcast(x, src=self._ranks[src], group=self._pg, async_op=True))

    def barrier(self) -> None:
        self._run(lambda: dist.barrier(group=self._pg, async_op=True))

    def gather_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def start_all_gather(self, x: torch.Tensor) -> TorchPending:
        out, give_back = self._take_buffer(len(self._ranks) * x.numel(), x)
        finish = self._start(lambda: dist.all_gather_into_tensor(out, x, group=self._pg, async_op=True))
        return TorchPending(finish, self._in_order(out.view(len(self._ranks), -1).unbind(0)), give_back)

    def start_all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], capacity: int, receive_counts: Sequence[int] | None
    ) -> TorchPending:
        """If counts travel, this waits for the other ranks to start; the rows then travel meanwhile.
        Rows of a rank to itself stay where they are."""
        if receive_counts is None:
            receive_counts = self._swap_counts(send_counts)
        segments = [x[start:stop] for start, stop in pairwise(accumulate(send_counts, initial=0))]
        own = segments[self._rank]
        segments[self._rank] = x[:0]
        width = x.shape[1]
        # Without the own rows, in the order of the process group.
        outgoing, give_back_outgoing = self._take_buffer((len(x) - len(own)) * width, x)
        torch.cat([segments[place] for place in self._places], out=outgoing.view(-1, width))
        send = [len(segments[place]) for place in self._places]
        receive = [0 if place == self._rank else receive_counts[place] for place in self._places]
        incoming, give_back_incoming = self._take_buffer(sum(receive) * width, x)
        rows, sent = incoming.view(-1, width), outgoing.view(-1, width)
        finish = self._start(
            lambda: dist.all_to_all_single(rows, sent, receive, send, group=self._pg, async_op=True)
        )
        parts = self._in_order(rows.split(receive))
        parts[self._rank] = own

        def give_back() -> None:
            give_back_outgoing()
            give_back_incoming()

        return TorchPending(finish, parts, give_back)

    def send(self, x: torch.Tensor, dst: int) -> None:
        """The library reads a message when the receiver asks for it, so it gets a copy."""
        sends = self._sends.setdefault(dst, [])
        buffer = None
        if len(sends) == NUM_SENDS:
            finish, buffer = sends.pop(0)
            finish()
        if buffer is None or buffer.numel() < x.nbytes:
            with torch.inference_mode(False):
                buffer = torch.empty(x.nbytes, dtype=torch.uint8, device=x.device)
        copy = buffer[: x.nbytes].view(x.dtype).copy_(x)
        finish = self._start(lambda: dist.isend(copy, self._ranks[dst], group=self._pg), dst)
        sends.append((finish, buffer))

    def recv(self, out: torch.Tensor, src: int) -> None:
        self._run(lambda: dist.irecv(out, self._ranks[src], group=self._pg), src)

    def _swap_counts(self, send_counts: Sequence[int]) -> list[int]:
        """How many rows each rank of the group sends to this one."""
        device = "cuda" if dist.get_backend(self._pg) == "nccl" else "cpu"
        sent = torch.tensor([send_counts[place] for place in self._places], device=device)
        received = torch.empty_like(sent)
        self._run(lambda: dist.all_to_all_single(received, sent, group=self._pg, async_op=True))
        return self._in_order(received.tolist())

    def _in_order(self, of_sorted: Sequence) -> list:
        """From the order of the process group to that of this group."""
        items = list(of_sorted)
        for place, item in zip(self._places, of_sorted, strict=True):
            items[place] = item
        return items

    def _in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, or a float32 copy if summing in its dtype would round at every step."""
        if x.dtype not in (torch.bfloat16, torch.float16):
            return x
        return self._buffer("float32", x.numel(), x, torch.float32).view_as(x).copy_(x)

    def _buffer(
        self, name: str, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dtype = dtype or like.dtype
        flat = self._scratch.get((name, dtype))
        if flat is None or flat.numel() < numel:
            with torch.inference_mode(False):
                flat = torch.empty(numel, dtype=dtype, device=like.device)
            self._scratch[(name, dtype)] = flat
        return flat[:numel]

    def _take_buffer(self, numel: int, like: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """([numel] of a buffer that nobody uses, what to call when it is free again)."""
        num_bytes = numel * like.element_size()
        buffer = self._free_buffers.pop() if self._free_buffers else None
        if buffer is None or buffer.numel() < num_bytes:
            with torch.inference_mode(False):
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        taken = buffer
        return taken[:num_bytes].view(like.dtype), lambda: self._free_buffers.append(taken)

    def _run(self, issue: Callable[[], dist.Work | None], peer: int | None = None) -> None:
        self._start(issue, peer)()

    def _start(self, issue: Callable[[], dist.Work | None], peer: int | None = None) -> Callable[[], None]:
        """Start a collective, or a message to or from `peer`; returns what waits for it.

        RanksMissing after the time-out, or as soon as the library gives up, now or when waited for.
        """
        if peer is None:
            self._calls += 1
        call = self._calls
        with self._naming_the_missing(call, peer):
            work = issue()
        assert work is not None

        def finish() -> None:
            with self._naming_the_missing(call, peer):
                work.wait(timedelta(seconds=self._timeout_s))

        return finish

    @contextmanager
    def _naming_the_missing(self, call: int, peer: int | None) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            # A message's time begins when it is sent, which is before it is waited for.
            is_late = time.monotonic() - start >= self._timeout_s or "timed out" in str(error).lower()
            reason = None if is_late else str(error)
            missing = self._who_is_missing(call) if peer is None else [peer]
            raise RanksMissing(missing, reason) from error

    def _who_is_missing(self, call: int) -> list[int]:
        """Ranks that leave no note that they reached this call. Those that waited fail about now too."""
        if self._store is None:
            return []
        keys = [f"{self._name}/{self._ranks}/{call}/{rank}" for rank in range(len(self._ranks))]
        self._store.set(keys[self._rank], "here")
        time.sleep(min(GRACE_S, self._timeout_s))
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
