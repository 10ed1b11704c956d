"""The native kernels against float64, on every instruction set that this machine has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefold.kernels import library, native

ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 47)
COLUMNS = (0, 1, 3, 4, 5, 8, 31, 33, 127, 128, 129)
DEPTHS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 576)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def require_library() -> tuple[str, ...]:
    """Fails, and does not skip: whoever runs these tests has a compiler, and a build that broke must show."""
    assert library.instruction_sets(), "the native library was not built: see setup.py"
    return library.instruction_sets()


def test_the_library_is_built_and_knows_this_processor() -> None:
    sets = require_library()
    flags = Path("/proc/cpuinfo").read_text()
    assert sets[0] == "portable"
    assert ("avx512" in sets) == all(
        f" {f}" in flags for f in ("avx512f", "avx512bw", "avx512vl", "avx512dq")
    )
    assert ("avx2" in sets) == (" avx2" in flags and " fma" in flags)


def padded(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values whose rows lie apart, with NaN between them."""
    whole = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=dtype)
    values = whole[..., : shape[-1]]
    return values.copy_(torch.randn(shape))


def check(x: torch.Tensor, w: torch.Tensor, kernel: str) -> None:
    exact = w.double() if kernel == "combine" else w.double().transpose(-1, -2)
    reference, magnitude = x.double() @ exact, x.double().abs() @ exact.abs()
    for instruction_set in require_library():
        out = torch.full((*reference.shape[:-1], reference.shape[-1] + 3), torch.nan)
        view = out[..., : reference.shape[-1]]
        getattr(native, kernel)(x, w, view, instruction_set)
        assert torch.isnan(out[..., reference.shape[-1] :]).all(), "wrote beside the result"
        # Sums of up to 576 float32 terms: 40 roundings' worth of their magnitude.
        error = (view.double() - reference).abs()
        assert bool((error <= 40 * 2**-24 * magnitude).all()), (kernel, instruction_set, x.shape, w.shape)


@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int) -> None:
    torch.manual_seed(rows)
    for columns, depth in itertools.product(COLUMNS, DEPTHS):
        x, w = padded(rows, depth, dtype=torch.float32), padded(columns, depth, dtype=torch.bfloat16)
        check(x, w, "linear")


@pytest.mark.parametrize("rows", [0, 3, 23, 24, 25, 28, 29, 32, 47])
def test_multiply(rows: int) -> None:
    """On both sides of where panels begin, with blocks of 192 elements and panels of 16 and 48 columns."""
    torch.manual_seed(rows)
    for columns, depth in itertools.product((0, 1, 15, 16, 47, 48, 49, 100), (0, 1, 15, 191, 192, 193, 576)):
        x, w = padded(rows, depth, dtype=torch.float32), padded(columns, depth, dtype=torch.bfloat16)
        check(x, w, "multiply")


@pytest.mark.parametrize("rows", ROWS)
def test_combine(rows: int) -> None:
    torch.manual_seed(rows)
    for columns, depth in itertools.product(COLUMNS, DEPTHS):
        x, w = padded(rows, depth, dtype=torch.float32), padded(depth, columns, dtype=torch.bfloat16)
        check(x, w, "combine")


def test_batches_with_any_strides() -> None:
    """Heads are the batch, and lie between the elements of a token."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 70).transpose(0, 1)  # [heads, tokens, depth]
    w = torch.randn(3, 33, 70).bfloat16()
    check(x, w, "linear")
    w = torch.randn(3, 70, 130).bfloat16()
    check(x, w, "combine")


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9, 577), torch.randn(35, 577).bfloat16()
    for instruction_set in require_library():
        together = native.linear(x, w, torch.empty(9, 35), instruction_set)
        for i in range(9):
            alone = native.linear(x[i : i + 1], w, torch.empty(1, 35), instruction_set)
            assert torch.equal(alone[0], together[i])


def test_special_values_pass_through() -> None:
    x = torch.ones(1, 40)
    w = torch.zeros(3, 40, dtype=torch.bfloat16)
    w[0, 39], w[1, 0], w[2, 5] = torch.inf, torch.nan, -torch.inf
    for instruction_set in require_library():
        out = native.linear(x, w, torch.empty(1, 3), instruction_set)[0].tolist()
        assert out[0] == torch.inf
        assert out[1] != out[1]
        assert out[2] == -torch.inf


def test_what_the_kernels_are_not_for() -> None:
    x, w, out = torch.ones(1, 8), torch.ones(3, 8, dtype=torch.bfloat16), torch.empty(1, 3)
    assert native.can_multiply(x, w, out)
    assert not native.can_multiply(x.bfloat16(), w, out)
    assert not native.can_multiply(x, w.float(), out)
    assert not native.can_multiply(x, w, out.bfloat16())
