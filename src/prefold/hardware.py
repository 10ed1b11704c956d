"""What this machine offers, read without torch: cores, memory, CPU features."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil


def available_cores() -> int:
    """Cores that this process may run on (its affinity, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def cores_of_ranks(cores: Sequence[int], num_ranks: int, threads_per_rank: int) -> list[list[int]]:
    """Cores that each rank of a machine is bound to, dealt out in order of rank.

    With more ranks x threads than cores there are none: the kernel's scheduler does better than two ranks
    on one core.

    >>> cores_of_ranks([0, 1, 2, 5, 6], num_ranks=2, threads_per_rank=2)
    [[0, 1], [2, 5]]
    """
    if num_ranks * threads_per_rank > len(cores):
        return []
    starts = range(0, num_ranks * threads_per_rank, threads_per_rank)
    return [list(cores[start : start + threads_per_rank]) for start in starts]


def available_memory() -> int:
    """Bytes that can be used without swapping: the machine's, or what the control group leaves."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU as Linux names them, and its vendor id; empty where there are none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags: set[str] = set()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features", "vendor_id"):
            flags.update(value.split())
        elif not line.strip() and flags:
            break
    return frozenset(flags)


def fast_bfloat16(flags: frozenset[str] | None = None, machine: str | None = None) -> bool:
    """Whether bfloat16 matrix multiplication is faster than float32's here.

    It is with AMX, with AMD's AVX-512 BF16 (2.2x measured on Zen 4) and with Arm's BF16
    instructions. It is not with Intel's AVX-512 BF16 alone, whose dot product issues at half
    rate: 85 against 157 GFLOP/s were measured on a Xeon without AMX. Decided by features, not by
    a measurement, so that the same machine gives the same tokens every time.
    """
    flags = cpu_flags() if flags is None else flags
    machine = platform.machine() if machine is None else machine
    if machine in ("aarch64", "arm64"):
        return "bf16" in flags
    return "amx_bf16" in flags or ("avx512_bf16" in flags and "GenuineIntel" not in flags)
