"""Kernels give the same bits with any number of threads, and take torch's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from prefold.kernels import fp8, fused, indexer, library, native
from prefold.kernels.quantized import QuantizedMatrix
from prefold.kernels.rows import BlockRows, attend

THREADS = (1, 2, 3)


@pytest.fixture(autouse=True)
def threads_of_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_all_threads(compute: Callable[[str], torch.Tensor]) -> None:
    """`compute(instruction set)` has the same bits with 1, 2 and 3 threads."""
    results = []
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        assert library.num_threads() == num_threads
        results.append([compute(name).clone() for name in library.instruction_sets()])
    for result in results[1:]:
        for first, other in zip(results[0], result):
            assert torch.equal(first.view(torch.uint8), other.view(torch.uint8))


def test_the_library_has_torchs_openmp() -> None:
    """With one of its own it would not hear of torch.set_num_threads, and its pool would compete."""
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libgomp.so" in line
    }
    assert len(mapped) == 1, mapped
    assert Path(torch.__file__).parent in Path(mapped.pop()).parents
    assert library._has_torchs_openmp(library._LIBRARY)


def test_a_library_with_another_openmp_is_serial() -> None:
    assert not library._has_torchs_openmp(ctypes.CDLL("libc.so.6"))  # which has none
    serial = ctypes.c_int.in_dll(library._LIBRARY, "prefold_is_serial")
    torch.set_num_threads(3)
    assert library.num_threads() == 3
    serial.value = 1
    try:
        assert library.num_threads() == 1
    finally:
        serial.value = 0


def test_each_calling_thread_has_its_own_number() -> None:
    torch.set_num_threads(3)
    seen = []

    def other() -> None:
        torch.set_num_threads(2)
        seen.append(library.num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [2]
    assert library.num_threads() == 3


@pytest.mark.parametrize("kernel", ["linear", "combine"])
def test_products_with_bfloat16_matrices(kernel: str) -> None:
    """Pieces that end within a matrix, and at its end; some matrices have less than a thread is worth."""
    torch.manual_seed(0)
    for batch, rows, depth, columns in ((1, 1, 577, 410), (1, 5, 300, 391), (7, 2, 129, 257), (50, 1, 60, 9)):
        x = torch.randn(batch, rows, depth)
        w = torch.randn(batch, *((columns, depth) if kernel == "linear" else (depth, columns))).bfloat16()
        out = torch.empty(batch, rows, columns)
        check_all_threads(
            lambda name, x=x, w=w, out=out: getattr(native, kernel)(x, w, out.fill_(torch.nan), name)
        )
        assert out.isfinite().all()


def test_fp8_rows() -> None:
    shape = fp8.FP8Rows(num_heads=5, head_dim=37, rotary_dim=10)
    rows = torch.randn(601, shape.dim, generator=torch.Generator().manual_seed(0))

    def there_and_back(name: str) -> torch.Tensor:
        stored = torch.zeros(len(rows), shape.num_bytes, dtype=torch.uint8)
        fp8.encode(shape, rows, stored, name)
        result = torch.zeros(len(rows), shape.dim, dtype=torch.bfloat16)
        fp8.decode(shape, stored, result, name)
        return torch.cat((stored, result.view(torch.uint8)), dim=1)

    check_all_threads(there_and_back)


def test_matrices_that_stay_quantised() -> None:
    """The number of rows is no multiple of what a thread takes at a time."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (301, 8, 34), generator=generator, dtype=torch.uint8)
    codes[:, :, :2] = torch.rand(301, 8, 1, generator=generator).half().view(torch.uint8)
    matrix = QuantizedMatrix("q8_0", (301, 256), torch.bfloat16, codes.flatten(1))
    values, out = torch.empty(299, 256), torch.empty(2, 301)
    check_all_threads(lambda name: matrix.expand(slice(1, 300), values.fill_(torch.nan), name))
    assert values.isfinite().all()
    for x in torch.randn(1, 256, generator=generator), torch.randn(2, 256, generator=generator):
        check_all_threads(lambda name, x=x: matrix.linear(x, out[: len(x)].fill_(torch.nan), name))
    assert out.isfinite().all()


@pytest.mark.parametrize("num_queries", [1, 3, 17, 40])
def test_selection(num_queries: int) -> None:
    """Few queries, whose keys are split over threads, and more, which are split themselves. Equal scores are
    common: whole numbers."""
    torch.manual_seed(num_queries)
    q, weights = torch.randint(-2, 3, (num_queries, 9, 20)).float(), torch.rand(num_queries, 9)
    keys = torch.randint(-2, 3, (3000, 20)).bfloat16()
    limits = torch.randint(2000, 3001, (num_queries,))

    def select(name: str) -> torch.Tensor:
        candidates = torch.zeros(2, num_queries, indexer.capacity(70), dtype=torch.int32)
        best = indexer.TopKeys(q, weights, limits, 70, candidates, name)
        best.add(keys[:2511], 0)
        best.add(keys[2511:], 2511)
        return torch.stack(best.finish())

    check_all_threads(select)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_between_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, heads, dim = 301, 5, 96
    x, residual = torch.randn(rows, heads * dim).to(dtype), torch.randn(rows, heads * dim).to(dtype)
    weight, angles = torch.randn(heads * dim).to(dtype), torch.randn(rows, dim)
    out = torch.empty_like(x)

    def norm(name: str) -> torch.Tensor:
        fused.rms_norm(x, weight, 1e-6, out, residual.clone(), name)
        return out

    def turn(name: str) -> torch.Tensor:
        fused.rotate(x.view(rows, heads, dim), angles, out.view(rows, heads, dim), True, name)
        return out

    def route(name: str) -> torch.Tensor:
        weights, ids = torch.empty(rows, 4), torch.empty(rows, 4, dtype=torch.int64)
        fused.route(residual.float(), None, weights, ids, False, (1, 1, False), True, 1.0, name)
        return weights

    for compute in (norm, turn, route, lambda name: fused.gate_(x.clone(), name).contiguous()):
        check_all_threads(compute)


def test_attention_to_rows() -> None:
    """Queries that threads share, and queries that they do not: splits of 512 rows, merged in order."""
    torch.manual_seed(0)
    cache = torch.randn(3000, 64).bfloat16()
    for lengths in ([2900], [600, 1], [5, 2000, 1025, 0, 512], [1] * 9):
        tables = torch.zeros(len(lengths), dtype=torch.int64)
        keys = BlockRows(torch.arange(3000)[None], tables, torch.tensor(lengths), block_size=1)
        q, lse = torch.randn(len(lengths), 5, 64), torch.empty(len(lengths), 5)
        out = torch.empty(len(lengths), 5, 48)

        def compute(name: str, q=q, keys=keys, out=out, lse=lse) -> torch.Tensor:
            attend(q, keys, cache, 0.3, out.fill_(torch.nan), lse, instruction_set=name)
            return torch.cat((out.flatten(), lse.flatten()))

        check_all_threads(compute)
        assert out.isfinite().all()


def test_panels() -> None:
    x, w, out = torch.randn(37, 300), torch.randn(401, 300).bfloat16(), torch.empty(37, 401)
    check_all_threads(lambda name: native.multiply(x, w, out, name))
