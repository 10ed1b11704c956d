"""What a machine is, and what about it costs speed: read from the system, without measuring. No torch."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from prefold.hardware import available_memory, cpu_flags, fast_bfloat16

LOW_MEMORY = 2 << 30
"""Bytes of free memory that leave little room beside torch."""

MUCH_STOLEN = 0.03
"""Share of the processors' time that a hypervisor kept: from here on figures mean little."""

MUCH_NOISE = 0.3
"""How much slower the median of equal runs may be than the best of them."""

INSTRUCTION_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class Facts:
    """What advice depends on.

    Attributes:
        cores: that this process may use.
        siblings: those of them that are threads of one physical core, for each core with several.
        numa_nodes: those of them on each node.
        cpu_quota: processors that the control group grants; None: all.
        governor: of the first core's frequency, where the system tells.
        huge_pages: setting of transparent huge pages: always, madvise, never, or None where there is none.
        memory: bytes of the machine; memory_available: that can be used; memory_limit: of the control group.
        compute_dtype: what --compute-dtype auto takes for bfloat16 checkpoints.
        has_compiler: a C++ compiler is on the path.
        kernel_problem: why native kernels cannot be used; empty if they can.
        kernel_threads: that a kernel takes where torch takes as many as there are cores; 0: unknown.
        torch_has_cuda, sees_gpu: whether torch was built with CUDA, and finds a GPU.
    """

    cpu: str
    flags: tuple[str, ...]
    cores: tuple[int, ...]
    siblings: tuple[tuple[int, ...], ...] = ()
    numa_nodes: tuple[tuple[int, ...], ...] = ()
    cpu_quota: float | None = None
    governor: str | None = None
    huge_pages: str | None = None
    memory: int = 1 << 40
    memory_available: int = 1 << 40
    memory_limit: int | None = None
    compute_dtype: str = "float32"
    has_compiler: bool = True
    kernel_problem: str = ""
    kernel_threads: int = 0
    torch_has_cuda: bool = False
    sees_gpu: bool = False


class Advice(NamedTuple):
    """What costs speed, and what to do about it. `name` is the heading in docs/performance.md."""

    name: str
    text: str


def gather() -> Facts:
    """The facts of this machine and process, but for those that torch has to tell."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    flags = cpu_flags()
    return Facts(
        cpu=_cpu_name(),
        flags=tuple(flag for flag in INSTRUCTION_FLAGS if flag in flags),
        cores=cores,
        siblings=_groups(cores, "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"),
        numa_nodes=_numa_nodes(cores),
        cpu_quota=_cpu_quota(),
        governor=_read(f"/sys/devices/system/cpu/cpu{cores[0]}/cpufreq/scaling_governor"),
        huge_pages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        memory=psutil.virtual_memory().total,
        memory_available=available_memory(),
        memory_limit=_number(_read("/sys/fs/cgroup/memory.max")),
        compute_dtype="bfloat16" if fast_bfloat16(flags) else "float32",
        has_compiler=any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")),
    )


def dtype_reason(facts: Facts) -> str:
    """Why --compute-dtype auto takes what it takes for bfloat16 checkpoints."""
    if facts.compute_dtype == "bfloat16":
        return "this processor multiplies bfloat16 matrices faster than float32 ones"
    if "avx512_bf16" in facts.flags:
        return "its AVX-512 BF16 issues at half rate, and it has no AMX"
    return "it has no instructions for bfloat16 products"


def advise(facts: Facts) -> list[Advice]:
    """What to change about the machine or the installation, most costly first."""
    found = []
    if facts.kernel_problem:
        compiler = "" if facts.has_compiler else " There is no C++ compiler here: install g++ first."
        found.append(Advice("no kernels", facts.kernel_problem + compiler))
    elif 0 < facts.kernel_threads < len(facts.cores):
        found.append(
            Advice(
                "no OpenMP",
                f"native kernels take {facts.kernel_threads} of {len(facts.cores)} threads: build them "
                "with a compiler that has OpenMP, or give ranks one thread each",
            )
        )
    found.extend(_core_advice(facts))
    if facts.governor == "powersave":
        found.append(
            Advice(
                "powersave",
                "the governor of frequencies is powersave: `cpupower frequency-set -g performance`",
            )
        )
    if facts.memory_available < LOW_MEMORY:
        limit = "" if facts.memory_limit is None else f" of {_gib(facts.memory_limit)} in this control group"
        found.append(
            Advice(
                "low memory",
                f"{_gib(facts.memory_available)} are free{limit}: weights that stay quantised "
                "(--weight-memory) and --kv-cache-dtype fp8 take less",
            )
        )
    if facts.torch_has_cuda and not facts.sees_gpu:
        found.append(
            Advice("CUDA", "torch was built with CUDA but sees no GPU: its build for CPUs is 4 GB smaller")
        )
    return found


def _core_advice(facts: Facts) -> list[Advice]:
    found = []
    if facts.siblings:
        firsts = sorted(set(facts.cores) - {core for group in facts.siblings for core in group[1:]})
        found.append(
            Advice(
                "hyper-threads",
                f"{_lists(facts.siblings)} are threads of one core each: two threads or ranks there share "
                f"its arithmetic: start with `taskset -c {','.join(map(str, firsts))}`",
            )
        )
    if len(facts.cores) == 1:
        found.append(Advice("one core", "ranks have to share one core, so several are slower than one"))
    if facts.cpu_quota is not None and facts.cpu_quota < len(facts.cores):
        found.append(
            Advice(
                "CPU quota",
                f"the control group grants the time of {facts.cpu_quota:g} processors, but "
                f"{len(facts.cores)} cores are visible: threads are stopped within a step, and all wait for "
                f"them; let ranks x threads be {max(1, int(facts.cpu_quota))}",
            )
        )
    if len(facts.numa_nodes) > 1:
        found.append(
            Advice(
                "NUMA",
                f"cores are on {len(facts.numa_nodes)} memory nodes: choose ranks so that none spans two "
                f"({_lists(facts.numa_nodes)})",
            )
        )
    return found


def measured_advice(stolen: float | None, noise: float) -> list[Advice]:
    """What the measurement showed. `stolen`: share of processor time; `noise`: median over best, less 1."""
    found = []
    if stolen is not None and stolen >= MUCH_STOLEN:
        found.append(
            Advice(
                "stolen time", f"the hypervisor kept {stolen:.0%} of the processors' time for other machines"
            )
        )
    if noise >= MUCH_NOISE:
        found.append(
            Advice(
                "noise",
                f"of equal runs the median took {noise:.0%} longer than the best: other processes were busy, "
                "and the figures are too low",
            )
        )
    return found


def steal_ticks() -> tuple[int, int] | None:
    """(stolen, all) ticks of all processors since the start, where the system tells."""
    line = (_read("/proc/stat") or "").partition("\n")[0].split()
    ticks = [int(word) for word in line[1:9]]
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else None


def _cpu_name() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _groups(cores: Sequence[int], pattern: str) -> tuple[tuple[int, ...], ...]:
    """Sets of several cores that the file of each names, in order."""
    found = set()
    for core in cores:
        members = tuple(other for other in parse_list(_read(pattern.format(core)) or "") if other in cores)
        if len(members) > 1:
            found.add(members)
    return tuple(sorted(found))


def _numa_nodes(cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    files = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    nodes = (tuple(core for core in parse_list(_read(str(path)) or "") if core in cores) for path in files)
    return tuple(node for node in nodes if node)


def _cpu_quota() -> float | None:
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "").partition(" ")
    if period:
        return None if quota == "max" else int(quota) / int(period)
    old, each = (_number(_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return old / each if old and each and old > 0 else None


def parse_list(text: str) -> tuple[int, ...]:
    """Cores as Linux lists them.

    >>> parse_list("0-2,8")
    (0, 1, 2, 8)
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def _chosen(text: str | None) -> str | None:
    """Of "always [madvise] never", the one in brackets."""
    return next((word[1:-1] for word in (text or "").split() if word.startswith("[")), None)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.lstrip("-").isdigit() else None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _lists(groups: Sequence[Sequence[int]]) -> str:
    shown = [
        " and ".join(map(str, group)) if len(group) < 3 else f"{group[0]}-{group[-1]}" for group in groups[:4]
    ]
    return "; ".join(shown) + (f"; {len(groups) - 4} more" if len(groups) > 4 else "")
