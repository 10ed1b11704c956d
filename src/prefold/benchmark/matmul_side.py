"""A side that multiplies square matrices: what the machine's cores can do at best."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from prefold.benchmark.side import Handler, serve

SIZE = 2048
"""Rows and columns: large enough to be limited by arithmetic, small enough to be quick."""


def start(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """`setup` holds `threads` and `index`, the place of this process among those side by side."""
    threads, index = setup["threads"], setup["index"]
    cores = sorted(os.sched_getaffinity(0))[index * threads : (index + 1) * threads]
    if len(cores) == threads:
        # Bound like a rank; torch's threads, not started yet, inherit it.
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(2, SIZE, SIZE, generator=generator)
    pairs = {"float32": matrices, "bfloat16": matrices.to(torch.bfloat16)}

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        """FLOP/s of multiplications in `dtype` over at least `seconds`."""
        return {"flops_per_s": _flops_per_s(pairs[request["dtype"]], request["seconds"])}

    return measure, {"ready": True}


def _flops_per_s(pair: torch.Tensor, seconds: float) -> float:
    """pair [2, SIZE, SIZE]."""
    out = torch.mm(pair[0], pair[1])
    count, begin, elapsed = 0, time.monotonic(), 0.0
    while elapsed < seconds:
        torch.mm(pair[0], pair[1], out=out)
        count += 1
        elapsed = time.monotonic() - begin
    return 2 * SIZE**3 * count / elapsed


if __name__ == "__main__":
    sys.exit(serve(start))
