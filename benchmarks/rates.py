"""What benchmarks share: the best of many short runs, kernels and their yardsticks in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def best_seconds(tasks: Mapping[str, Callable[[], object]], seconds: float = 6.0) -> dict[str, float]:
    """The least CPU time of each task. They run in turns, so that a busy machine is busy for all."""
    best = dict.fromkeys(tasks, float("inf"))
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for name, task in tasks.items():
            start = time.thread_time()
            task()
            best[name] = min(best[name], time.thread_time() - start)
        rounds += 1
    return best


def product(dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """torch's matrix multiplication of about 10 ms, and its floating-point operations."""
    m, k, n = 768, 1024, 1024
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    c = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=c), 2.0 * m * k * n


def float32_product() -> tuple[Callable[[], object], float]:
    """See `product`."""
    return product(torch.float32)
