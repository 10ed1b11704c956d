"""What is concluded from a processor's features."""

from __future__ import annotations

import os

import pytest

from prefold.hardware import cores_of_ranks, fast_bfloat16
from prefold.worker.pinning import pin_to_cores

AVX512 = "avx2 fma avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        (f"GenuineIntel {AVX512} avx512_bf16 amx_tile amx_bf16 amx_int8", "x86_64", True),  # Sapphire Rapids
        (f"GenuineIntel {AVX512} avx512_bf16", "x86_64", False),  # the same, where a hypervisor hides AMX
        (f"GenuineIntel {AVX512} avx512_bf16 amx_tile amx_int8", "x86_64", False),
        (f"GenuineIntel {AVX512}", "x86_64", False),  # Ice Lake
        (f"AuthenticAMD {AVX512} avx512_bf16", "x86_64", True),  # Zen 4
        ("AuthenticAMD avx2 fma", "x86_64", False),
        ("fp asimd bf16 i8mm sve", "aarch64", True),
        ("fp asimd", "aarch64", False),
        ("", "riscv64", False),
    ],
)
def test_where_bfloat16_is_the_faster_dtype(flags: str, machine: str, expected: bool) -> None:
    assert fast_bfloat16(frozenset(flags.split()), machine) is expected


@pytest.mark.parametrize("num_cores", range(9))
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_ranks_have_cores_of_their_own(num_cores: int, threads: int) -> None:
    cores = [3 * core for core in range(num_cores)]
    for num_ranks in range(1, 6):
        of_ranks = cores_of_ranks(cores, num_ranks, threads)
        if num_ranks * threads > num_cores:
            assert of_ranks == []
        else:
            assert [len(own) for own in of_ranks] == [threads] * num_ranks
            assert [core for own in of_ranks for core in own] == cores[: num_ranks * threads]


def test_a_rank_is_bound_to_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 2, 4, 7, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    assert pin_to_cores(1, world_size=2, threads_per_rank=2)
    assert bound == [[5, 7]]
    assert not pin_to_cores(1, world_size=2, threads_per_rank=3)
    assert bound == [[5, 7]]
