"""Kernels reach rows whose offsets do not fit in 32 bits: rows, heads, batch entries far from each other."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from tempfile import TemporaryFile

import pytest
import torch

from prefold.kernels import dense, fp8, indexer, library, native
from prefold.kernels.quantized import QuantizedMatrix

torch.set_num_threads(1)

FAR = (1 << 31) + 64
"""Elements from one row to the next."""


@pytest.fixture(params=library.INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    if request.param not in library.instruction_sets():
        pytest.skip(f"{request.param}: not on this processor")
    return request.param


def mostly_empty(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, of a file without a name, which takes the space of the pages that are written."""
    with TemporaryFile() as file:
        file.truncate(num_bytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def far_apart(values: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The same values, FAR elements from one to the next along `dim`."""
    others = [size for i, size in enumerate(values.shape) if i != dim]
    strides = [0] * values.ndim
    for i in reversed(range(values.ndim)):
        if i != dim:
            strides[i] = math.prod(others[i - (i > dim) + 1 :])
    strides[dim] = FAR
    length = (values.shape[dim] - 1) * FAR + math.prod(others)
    whole = mostly_empty(length * values.element_size()).view(values.dtype)
    return whole.as_strided(values.shape, strides).copy_(values)


def check(
    compute: Callable[..., object], inputs: list[torch.Tensor], out: torch.Tensor, dims: list[int]
) -> None:
    """compute(*inputs, out) gives the same if the tensors are far apart along `dims`, out's the last."""
    near, far = out.clone(), far_apart(out, dims[-1])
    compute(*inputs, near)
    compute(*[far_apart(x, dim) for x, dim in zip(inputs, dims)], far)
    assert near.float().abs().sum() > 0
    assert torch.equal(near, far)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kernel", ["linear", "combine"])
def test_products_with_bfloat16_matrices(kernel: str, dim: int, instruction_set: str) -> None:
    """Batch entries and rows."""
    x = torch.randn(2, 3, 5)
    w = torch.randn(2, *((7, 5) if kernel == "linear" else (5, 7))).bfloat16()
    function = getattr(native, kernel)
    check(lambda x, w, out: function(x, w, out, instruction_set), [x, w], torch.zeros(2, 3, 7), [dim] * 3)


def test_fp8_rows(instruction_set: str) -> None:
    shape = fp8.FP8Rows(num_heads=2, head_dim=19, rotary_dim=6)
    rows, stored = torch.randn(3, shape.dim), torch.zeros(3, shape.num_bytes, dtype=torch.uint8)
    check(lambda rows, out: fp8.encode(shape, rows, out, instruction_set), [rows], stored, [0, 0])
    fp8.encode(shape, rows, stored)
    out = torch.zeros(3, shape.dim, dtype=torch.bfloat16)
    check(lambda stored, out: fp8.decode(shape, stored, out, instruction_set), [stored], out, [0, 0])


@pytest.mark.parametrize("dim", [0, 1])
def test_selection(dim: int, instruction_set: str) -> None:
    """Queries and keys, or heads of queries."""

    def select(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
        candidates = torch.zeros(2, 3, indexer.capacity(4), dtype=torch.int32)
        limits = torch.tensor([9, 5, 9])
        best = indexer.TopKeys(q, torch.ones(3, 2), limits, 4, candidates, instruction_set)
        best.add(keys, 0)
        out.copy_(torch.stack(best.finish()))

    near = torch.zeros(2, 3, 4, dtype=torch.int32)
    far = near.clone()
    q, keys = torch.randn(3, 2, 6), torch.randn(9, 6).bfloat16()
    select(q, keys, near)
    select(far_apart(q, dim), far_apart(keys), far)
    assert near[1].max() > 0
    assert torch.equal(near, far)


@pytest.mark.parametrize("dim", [0, 1])
def test_dense_attention(dim: int, instruction_set: str) -> None:
    """Heads, and rows: queries, keys, values and the sums."""
    q, k, v = torch.randn(2, 6, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 5)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        references, sums = torch.full((2, 6), dense.UNSEEN_REFERENCE), torch.zeros(2, 6)
        dense.attend_(q, k, v, out, references, sums, slice(0, 3), 2, 0.5, True, None, instruction_set)

    check(attend, [q, k, v], torch.zeros(2, 6, 5), [dim] * 4)


def test_quantized_matrices(instruction_set: str) -> None:
    """The last rows of 2^31 bytes."""
    columns, codes = 32 * 1024, torch.zeros(2, 34 * 1024, dtype=torch.uint8)
    codes.view(2, 1024, 34)[..., 1] = 0x3C  # the upper half of float16's 1
    codes.view(2, 1024, 34)[..., 2:] = torch.randint(0, 255, (2, 1024, 32), dtype=torch.uint8)
    num_rows = FAR // codes.shape[1] + 3
    far = mostly_empty(num_rows * codes.shape[1]).view(num_rows, -1)
    far[-2:] = codes
    expanded = []
    for stored, start in ((codes, 0), (far, num_rows - 2)):
        matrix = QuantizedMatrix("q8_0", (len(stored), columns), torch.float32, stored)
        expanded.append(matrix.expand(slice(start, start + 2), torch.zeros(2, columns), instruction_set))
    assert expanded[0].abs().sum() > 0
    assert torch.equal(*expanded)
