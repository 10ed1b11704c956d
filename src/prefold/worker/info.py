"""What a rank reports of itself. Imports no torch: the engine reads it too."""

from __future__ import annotations

import msgspec


class WorkerInfo(msgspec.Struct):
    """Sent once, when the rank is ready."""

    rank: int
    pid: int
    digest: str
    """Of the configuration it runs: equal on all ranks."""
    cores: list[int]
    weight_bytes: int
    kernels: str
    """What computes; see kernels.dense.describe."""
    kernels_problem: str
    """Why there are no native kernels where there should be, in whole sentences; empty if there are."""
