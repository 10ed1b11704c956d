"""Rows of the KV cache in FP8: bytes against torch's float8, errors against the bound, and the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.attention.row_format import FP8Format, row_formats
from prefold.config import MLAConfig
from prefold.kernels import fp8, library
from prefold.kv_spec import RowPart
from prefold.workspace import Workspace

torch.set_num_threads(1)

SHAPES = [(1, 512, 64), (1, 16, 4), (1, 32, 0), (6, 17, 0), (2, 64, 0), (3, 5, 3), (1, 1, 0)]
LARGEST = 448.0 * 2.0**fp8.MAX_EXPONENT


def all_ways(shape: fp8.FP8Rows, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored, decoded) of rows [n, dim], equal in torch and on all instruction sets, with nothing written
    beside them."""
    width = -(-shape.num_bytes // 16) * 16
    stored = torch.full((len(rows), width), 0xA5, dtype=torch.uint8)
    decoded = torch.empty(len(rows), shape.dim, dtype=torch.bfloat16)
    fp8.encode_with_torch(shape, rows, stored)
    fp8.decode_with_torch(shape, stored, decoded)
    assert (stored[:, shape.num_bytes :] == 0xA5).all()
    assert library.instruction_sets(), "the native library was not built: see setup.py"
    for instruction_set in library.instruction_sets():
        own = torch.full_like(stored, 0xA5)
        apart = torch.full((len(rows), shape.dim + 3), torch.nan)
        apart[:, : shape.dim] = rows
        fp8.encode(shape, apart[:, : shape.dim], own, instruction_set)
        rotary = 2 * shape.rotary_dim
        assert torch.equal(own[:, rotary:], stored[:, rotary:]), instruction_set
        # A bfloat16 NaN has many bit patterns.
        halves = [x[:, :rotary].contiguous().view(torch.bfloat16) for x in (own, stored)]
        torch.testing.assert_close(*halves, rtol=0, atol=0, equal_nan=True)
        out = torch.full((len(rows), shape.dim + 5), 77.0, dtype=torch.bfloat16)
        fp8.decode(shape, own, out[:, : shape.dim], instruction_set)
        torch.testing.assert_close(out[:, : shape.dim], decoded, rtol=0, atol=0, equal_nan=True)
        assert (out[:, shape.dim :] == 77).all()
    return stored, decoded


@settings(max_examples=60)
@given(
    shape=st.sampled_from(SHAPES),
    scale=st.integers(-150, 126),
    spread=st.integers(0, 40),
    seed=st.integers(0, 10_000),
)
def test_the_error_is_within_its_bound(shape: tuple[int, int, int], scale: int, spread: int, seed: int):
    """Half a step of a code: 2^-4 of the element, or where codes are denormal 2^-10 of the scale, which is
    2^-17.8 of the head's largest. Once decoded, rows are encoded without a loss."""
    rows = fp8.FP8Rows(*shape)
    generator = torch.Generator().manual_seed(seed)
    exponents = scale - spread * torch.rand(5, rows.dim, generator=generator, dtype=torch.float64)
    x = (torch.randn(5, rows.dim, generator=generator) * torch.exp2(exponents)).float()
    x[0, : rows.head_dim] = 0.0
    x = x.clamp(-LARGEST, LARGEST)
    _, decoded = all_ways(rows, x)

    heads = x[:, : rows.num_scaled].double().unflatten(1, (rows.num_heads, rows.head_dim))
    got = decoded[:, : rows.num_scaled].double().unflatten(1, (rows.num_heads, rows.head_dim))
    # The smallest power of two with which the largest element fits, but no less than 2^-117.
    step = (heads.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-117).log2().ceil().exp2()
    assert bool(((got - heads).abs() <= torch.maximum(heads.abs() * 2.0**-4, step * 2.0**-10)).all())
    assert (got[0, 0] == 0).all()
    assert torch.equal(decoded[:, rows.num_scaled :], x[:, rows.num_scaled :].bfloat16())
    assert torch.equal(all_ways(rows, decoded.float())[1], decoded)


def test_every_code_is_decoded_as_torch_does():
    """At every scale, NaN included; what the two have in common is exact in bfloat16."""
    shape = fp8.FP8Rows(1, 256, 0)
    stored = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    stored = torch.cat((stored, torch.arange(256, dtype=torch.uint8)[:, None]), dim=1)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for instruction_set in library.instruction_sets():
        out = torch.empty(256, 256, dtype=torch.bfloat16)
        fp8.decode(shape, stored, out, instruction_set)
        assert out[255].isnan().all()
        for exponent in range(10, 247):
            expected = values * 2.0 ** (exponent - 127)
            torch.testing.assert_close(out[exponent].double(), expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_representable_stays():
    shape = fp8.FP8Rows(1, 127, 0)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rows = torch.stack([values * 2.0**e for e in (-100, -7, 0, 7, 100)])
    rows = torch.cat((rows, -rows))
    assert torch.equal(all_ways(shape, rows)[1].float(), rows)


def test_edges():
    shape = fp8.FP8Rows(2, 4, 2)
    tiny, huge = math.ldexp(1.0, -149), torch.finfo(torch.float32).max
    rows = torch.tensor(
        [
            [0.0, -0.0, 0, 0, 1, 2, 3, 4, 0, -0.0],
            [math.nan, 1, 2, 3, 1, 2, 3, 4, 5, math.nan],
            [1, 2, 3, 4, 1, -math.inf, 3, 4, math.inf, 5],
            [tiny, -tiny, 0, 0, huge, -huge, 1, 0, tiny, 7],
        ]
    )
    _, decoded = all_ways(shape, rows)
    assert decoded[0].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 0, 0]
    # A head that is not finite is NaN as a whole; others are not touched.
    assert decoded[1, :4].isnan().all()
    assert decoded[1, 4:9].tolist() == [1, 2, 3, 4, 5]
    assert decoded[1, 9].isnan()
    assert decoded[2, :4].tolist() == [1, 2, 3, 4]
    assert decoded[2, 4:8].isnan().all()
    assert decoded[2, 8] == math.inf
    # Too small for the smallest scale, and too large for the largest.
    assert decoded[3].tolist() == [0, 0, 0, 0, LARGEST, -LARGEST, 0, 0, 0, 7]


@pytest.mark.parametrize("fill", [0xFF, 0x7F])
def test_poison_is_not_a_number(fill: int):
    """Bytes of poisoned memory; 0x7F are NaN codes with a sound scale."""
    form = FP8Format(RowPart(2, 8, 4), Workspace())
    decoded = form.decode(torch.full((3, form.width), fill, dtype=torch.uint8))
    assert decoded[:, :16].isnan().all()
    assert decoded[:, 16:].isnan().all() == (fill == 0xFF)


def test_formats_of_a_row_have_the_bytes_that_are_counted():
    mla = MLAConfig(None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    for dtype, width in (("float32", 576), ("bfloat16", 576), ("fp8_e4m3", 656)):
        (form,) = row_formats(mla, 1, dtype, Workspace())
        assert (form.dim, form.width, form.fp8_rows is None) == (576, width, dtype != "fp8_e4m3")
        out = torch.empty(5, form.width, dtype=form.dtype)
        rows = torch.randn(5, 576).bfloat16()
        form.encode(rows, out)
        error = (form.decode(out).float() - rows.float()).abs()
        assert bool((error <= rows.float().abs() * 2.0**-4 + 2.0**-15).all())
        assert (form.fp8_rows is None) == torch.equal(form.decode(out).float(), rows.float())
