"""Binding a rank to its cores. Imports no torch: it must run before torch starts threads."""

from __future__ import annotations

import os


def pin_to_cores(rank: int, world_size: int, threads_per_rank: int) -> bool:
    """Bind this process to its own cores, before any thread pool starts and inherits the binding.

    Cores are the ones this process may use, dealt out in order of rank. With more ranks x threads
    than cores nothing is bound (and False returned): the kernel's scheduler does better than two
    ranks on one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if world_size * threads_per_rank > len(cores):
        return False
    os.sched_setaffinity(0, cores[rank * threads_per_rank : (rank + 1) * threads_per_rank])
    return True
