"""A side that measures what its machine can do, alone or with another rank: see `doctor`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.native_backend import NativeBackend
from prefold.attention.torch_backend import TorchBackend
from prefold.benchmark.side import Handler, serve
from prefold.distributed.group import Group, init_distributed, make_groups
from prefold.distributed.mesh import Mesh
from prefold.kernels import dense, library, native
from prefold.workspace import Workspace

READ_BYTES = 128 << 20
ROW_MATRIX = (4096, 1024)
PRODUCT = 1024
"""Rows and columns of the matrices that are multiplied."""

ATTENTION = (1024, 4, 128)
"""Tokens, heads and dimensions."""

GATHER_BYTES = 4 << 20
"""Of each of two ranks."""

Task = tuple[Callable[[], object], float]
"""What to run, and how many operations or bytes it is."""


def start(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """`setup`: `rank` of two, `rendezvous`, `threads`, `compute_dtype` that an engine takes for bfloat16
    checkpoints, and for how many `seconds` each thing is measured."""
    seconds, rank = setup["seconds"], setup["rank"]
    torch.set_num_threads(setup["threads"])
    torch.manual_seed(0)
    made: dict[str, dict[str, Group]] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["what"] == "collectives":
            torch.set_num_threads(1)
            if not made:
                store = init_distributed(rank, 2, setup["rendezvous"], timeout_s=60.0)
                for transport in ("shm", "gloo"):
                    made[transport] = make_groups(Mesh(tp=2), rank, transport, 60.0, store)
            return {"results": measure_collectives(made, seconds)}
        torch.set_num_threads(request["threads"])
        return {"results": measure(TASKS[request["what"]](), seconds)}

    return answer, {
        "torch": torch.__version__,
        "torch_has_cuda": torch.version.cuda is not None,
        "sees_gpu": torch.cuda.is_available(),
        "instruction_sets": library.instruction_sets(),
        "kernels": dense.describe(getattr(torch, setup["compute_dtype"])),
        "kernel_problem": library.problem(),
        "kernel_threads": library.num_threads(),
    }


def measure(tasks: dict[str, Task], seconds: float) -> dict[str, dict[str, float]]:
    """Of each task, by turns: `rate`, of the best run, and `noise`, by how much the median took longer."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    end = time.perf_counter() + seconds * len(tasks)
    while len(next(iter(times.values()))) < 3 or time.perf_counter() < end:
        for name, (task, _) in tasks.items():
            begin = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - begin)
    found = {name: taken[1:] for name, taken in times.items()}  # the first run warms up
    return {
        name: {"rate": amount / min(found[name]), "noise": median(found[name]) / min(found[name]) - 1}
        for name, (_, amount) in tasks.items()
    }


def matmul_tasks() -> dict[str, Task]:
    tasks: dict[str, Task] = {}
    for dtype in ("float32", "bfloat16"):
        pair = torch.randn(2, PRODUCT, PRODUCT).to(getattr(torch, dtype))
        out = torch.empty_like(pair[0])
        tasks[dtype] = (lambda a=pair[0], b=pair[1], c=out: torch.mm(a, b, out=c), 2.0 * PRODUCT**3)
    return tasks


def attention_tasks() -> dict[str, Task]:
    """Causal attention of a prompt in float32, and in bfloat16 where the kernel has instructions for it;
    useful operations."""
    tokens, heads, dim = ATTENTION
    q, k, v = torch.randn(tokens, heads, dim), *torch.randn(2, heads, tokens, dim)
    x, half = (q, k, v), (q.bfloat16(), k.bfloat16(), v.bfloat16())
    backends: dict[str, tuple[AttentionBackend, tuple[torch.Tensor, ...]]] = {
        "torch": (TorchBackend(Workspace(), torch.device("cpu")), x)
    }
    if library.is_available():
        backends["kernel"] = (NativeBackend(Workspace()), x)
    best = dense.best(torch.bfloat16)
    if best is not None:
        backends[f"kernel, {best}"] = (NativeBackend(Workspace(), torch.bfloat16, best), half)
    amount = 2.0 * heads * 2 * dim * tokens * (tokens + 1) / 2
    return {
        name: (lambda one=one, inputs=inputs: attend(one, *inputs), amount)
        for name, (one, inputs) in backends.items()
    }


def attend(backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q [tokens, heads, dim]; k, v [heads, tokens, dim]."""
    heads, tokens, dim = k.shape
    (state,) = backend.start([Queries(q, heads, dim)], dim**-0.5)
    keys, values = backend.keys(heads, tokens, dim), backend.values(heads, tokens, dim)
    keys[..., :dim].copy_(k)
    backend.attend_(state, slice(0, tokens), keys, values.copy_(v), True)
    backend.finish(state, torch.empty(tokens, heads, dim))


def row_tasks() -> dict[str, Task]:
    """One float32 row by bfloat16 matrices that exceed the caches of a core; bytes of the matrices."""
    matrices = [torch.ones(ROW_MATRIX, dtype=torch.bfloat16) for _ in range(8)]
    x, out = torch.randn(1, ROW_MATRIX[1]), torch.empty(1, ROW_MATRIX[0])
    amount = float(sum(matrix.nbytes for matrix in matrices))

    def by_torch() -> None:
        for matrix in matrices:
            F.linear(x.bfloat16(), matrix)

    def by_kernel() -> None:
        for matrix in matrices:
            native.linear(x, matrix, out)

    tasks: dict[str, Task] = {"torch": (by_torch, amount)}
    if library.is_available():
        tasks["kernel"] = (by_kernel, amount)
    return tasks


def memory_tasks() -> dict[str, Task]:
    """Bytes read: a sum over more than most caches hold; and copied, read and written counted once each."""
    source, target = torch.ones(READ_BYTES // 4), torch.empty(READ_BYTES // 4)
    return {
        "read": (source.sum, float(source.nbytes)),
        "copy": (lambda: target.copy_(source), 2.0 * source.nbytes),
    }


TASKS: dict[str, Callable[[], dict[str, Task]]] = {
    "matmul": matmul_tasks,
    "attention": attention_tasks,
    "decode row": row_tasks,
    "memory": memory_tasks,
}


def measure_collectives(made: dict[str, dict[str, Group]], seconds: float) -> dict[str, dict[str, Any]]:
    """Per transport: bytes that a rank receives per second in an all-gather and sums in an all-reduce, and
    seconds of a barrier, and which transport it `is`."""
    x = torch.zeros(GATHER_BYTES // 4)  # sums of which stay what they are
    out = torch.empty(2, *x.shape)
    found: dict[str, dict[str, Any]] = {}
    for transport, groups in made.items():
        group = groups["tp"]
        found[transport] = {
            "all_gather": GATHER_BYTES / _time_together(group, partial(group.all_gather, x, out), seconds)[0],
            "all_reduce": GATHER_BYTES / _time_together(group, partial(group.all_reduce, x), seconds)[0],
            "barrier_s": _time_together(group, group.barrier, seconds)[1],
            "is": group.transport,
        }
    return found


def _time_together(group: Group, call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """(least, median) seconds of `call`. Both ranks call it equally often, until rank 0 says so."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    goes_on = torch.ones(1)
    while goes_on.item():
        group.barrier()
        for _ in range(5):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        goes_on.fill_(float(time.perf_counter() < end))
        group.broadcast(goes_on, 0)
    return min(times), median(times)


if __name__ == "__main__":
    sys.exit(serve(start))
