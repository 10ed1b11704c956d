"""What is concluded from a processor's features."""

from __future__ import annotations

import pytest

from prefold.hardware import fast_bfloat16

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
