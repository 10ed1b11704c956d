"""Binding a rank to its cores. Imports no torch: it must run before torch starts threads."""

from __future__ import annotations

import os

from prefold.hardware import cores_of_ranks


def pin_to_cores(rank: int, world_size: int, threads_per_rank: int) -> bool:
    """Bind this process to its own cores, before any thread pool starts and inherits the binding.

    Of the cores that it may use; where these are too few (`hardware.cores_of_ranks`) nothing is bound, and
    False returned.
    """
    of_ranks = cores_of_ranks(sorted(os.sched_getaffinity(0)), world_size, threads_per_rank)
    if of_ranks:
        os.sched_setaffinity(0, of_ranks[rank])
    return bool(of_ranks)
