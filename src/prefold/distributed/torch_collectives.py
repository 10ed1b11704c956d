"""Collectives over torch.distributed: gloo between CPU ranks, NCCL between CUDA ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from prefold.distributed.errors import CollectiveError, RanksMissing

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]

GRACE_S = 1.0
"""After a failure, how long ranks wait for each other's note that they were there."""


class TorchGather:
    """An all-gather in flight into a buffer of its own."""

    def __init__(self, finish: Callable[[], None], out: torch.Tensor, give_back: Callable[[], None]) -> None:
        self._finish = finish
        self._out = out
        self._give_back = give_back

    def wait(self) -> list[torch.Tensor]:
        self._finish()
        return list(self._out.unbind(0))

    def release(self) -> None:
        self._give_back()


class TorchCollectives:
    """See `group.Collectives`. Sums run in float32, in the order that the library chooses.

    With NCCL, calls return when the work is queued on the current stream, and its watchdog, not this
    class, ends ranks that hang. With gloo a time-out or a lost peer raises here.

    Args:
        ranks: world ranks of the group.
        rank: in the group.
        pg: process group over `ranks`, made with the same time-out.
        store: the rendezvous store, to find out who is missing after a failure.
    """

    def __init__(
        self,
        ranks: list[int],
        rank: int,
        pg: dist.ProcessGroup,
        timeout_s: float,
        store: Store | None,
    ) -> None:
        self._ranks = ranks
        self._rank = rank
        self._pg = pg
        self._timeout_s = timeout_s
        self._store = store
        self._calls = 0
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._free_buffers: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        total = self._in_float32(x)
        self._finish(dist.all_reduce(total, group=self._pg, async_op=True))
        if total is not x:
            x.copy_(total)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._finish(dist.all_gather_into_tensor(out.view(-1), x, group=self._pg, async_op=True))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        terms = self._in_float32(x)
        if x.is_cuda:
            total = self._buffer("reduce_scatter", out.numel(), terms)
            work = dist.reduce_scatter_tensor(total, terms.view(-1), group=self._pg, async_op=True)
            self._finish(work)
            out.copy_(total)
            return
        # gloo's own reduce-scatter is slower than its all-reduce.
        total = terms if terms is not x else self._buffer("sum", x.numel(), x).view_as(x).copy_(x)
        self._finish(dist.all_reduce(total, group=self._pg, async_op=True))
        out.copy_(total[self._rank])

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        self._finish(dist.broadcast(x, src=self._ranks[src], group=self._pg, async_op=True))

    def barrier(self) -> None:
        self._finish(dist.barrier(group=self._pg, async_op=True))

    def start_all_gather(self, x: torch.Tensor) -> TorchGather:
        numel = len(self._ranks) * x.numel() * x.element_size()
        buffer = self._free_buffers.pop() if self._free_buffers else None
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=torch.uint8, device=x.device)
        out = buffer[:numel].view(x.dtype)
        work = dist.all_gather_into_tensor(out, x, group=self._pg, async_op=True)
        return TorchGather(
            lambda: self._finish(work),
            out.view(len(self._ranks), -1),
            lambda: self._free_buffers.append(buffer),
        )

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

    def _finish(self, work: dist.Work | None) -> None:
        """Wait for `work`; RanksMissing after the time-out, CollectiveError if the library gives up."""
        assert work is not None
        self._calls += 1
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = self._who_is_missing()
            if time.monotonic() - start >= self._timeout_s:
                raise RanksMissing(missing) from error
            raise CollectiveError(f"{error} (missing ranks of the group: {missing})") from error

    def _who_is_missing(self) -> list[int]:
        """Ranks that leave no note that they reached this call. Those that waited fail about now too."""
        if self._store is None:
            return []
        keys = [f"{self._ranks}/{self._calls}/{rank}" for rank in range(len(self._ranks))]
        self._store.set(keys[self._rank], "here")
        time.sleep(min(GRACE_S, self._timeout_s))
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
