"""The kernel's instructions of AMX: executed by the processor if it has them, else by a handler of traps."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from prefold.kernels import dense, library

torch.set_num_threads(1)

COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not library.has_pairs() or COMPILER is None,
    reason="needs AVX-512 BF16 and g++",
)


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("trap") / "trap.so"
    source = Path(__file__).parent / "tile_trap.cpp"
    flags = ["-O2", "-mfma", "-ffp-contract=off", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC"]
    headers = f"-I{Path(library.__file__).parent}"
    subprocess.run([str(COMPILER), *flags, headers, "-o", str(path), str(source)], check=True)
    found = ctypes.CDLL(str(path))
    if not found.trap_has_use():
        pytest.skip("the compiler does not know AMX")
    return found


@contextmanager
def trapped(trap: ctypes.CDLL, expects_products: int) -> Iterator[None]:
    """Executes AMX's instructions within, and checks them."""
    found = (ctypes.c_int64 * 4)()
    trap.trap_begin()
    try:
        yield
    finally:
        trap.trap_end(found)
    products, others, mistakes, is_configured = found
    assert mistakes == 0
    assert not is_configured
    if not products:
        assert "amx_bf16" in Path("/proc/cpuinfo").read_text(), "the kernel has no instructions of AMX"
        return
    assert products == expects_products
    assert others > products / 2


def attend(instruction_set: str, dim: int, v_dim: int, length: int, before: int) -> list[torch.Tensor]:
    """out, references and sums of two heads of `length` tokens of 3 rows each, after `before` other keys."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (
        torch.randn(2, *shape, generator=generator).to(torch.bfloat16)
        for shape in ((3 * length, dim), (before + length, dim), (before + length, v_dim))
    )
    k[:, ::5] *= 1e-39  # denormal
    out = torch.zeros(2, 3 * length, v_dim)
    references, sums = torch.full((2, 3 * length), dense.UNSEEN_REFERENCE), torch.zeros(2, 3 * length)
    for keys, causal in ((slice(0, before), False), (slice(before, before + length), True)):
        dense.attend_(
            *(q, k[:, keys], v[:, keys], out, references, sums, slice(0, length), 3, 0.2, causal),
            instruction_set=instruction_set,
        )
    return [out, references, sums]


def tile_products(dim: int, v_dim: int, length: int, before: int) -> int:
    """Of 16 x 16 x 32: for rows by 32, and keys by 32 that some of them see."""
    total = 0
    for start in range(0, 3 * length, 32):
        rows = -(-min(3 * length - start, 32) // 16)
        for end in (before, min((start + 31) // 3 + 1, length)):
            panels = -(-end // 32)
            total += panels * rows * (2 * -(-dim // 32) + -(-v_dim // 16))
    return 2 * total


@pytest.mark.parametrize(
    ("dim", "v_dim", "length", "before"),
    [(32, 32, 1, 1), (64, 48, 40, 9), (41, 37, 23, 70), (192, 128, 11, 40), (96, 16, 70, 1)],
)
def test_what_runs_is_what_is_tested(
    trap: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, dim: int, v_dim: int, length: int, before: int
):
    """To the bit as the emulated tiles, with as many products as the shapes make."""
    monkeypatch.setattr(library, "has_tiles", lambda: True)
    shape = (dim, v_dim, length, before)
    with trapped(trap, tile_products(*shape)):
        results = attend(dense.TILES, *shape)
    for one, other in zip(results, attend(dense.EMULATED_TILES, *shape)):
        assert torch.equal(one, other)
