"""Native attention to rows of the cache against float64, on every instruction set that this machine has."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from prefold.attention.row_format import PlainFormat
from prefold.attention.selected import attend_selected
from prefold.kernels import fp8, library, rows
from prefold.kernels.fp8 import FP8Rows
from prefold.kernels.rows import BlockRows, RowHeads
from prefold.workspace import Workspace

torch.set_num_threads(1)

COUNTS = (*range(19), 31, 32, 33, 47, 48, 49, 63, 64, 65, 70)
HEADS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
DIMS = (
    (576, 512),
    (32, 32),
    (40, 24),
    (64, 64),
    (80, 70),
    (96, 96),
    (128, 1),
    (192, 128),
    (256, 256),
    (7, 5),
)


@pytest.fixture(params=library.INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    available = library.instruction_sets()
    assert available, "the native library was not built: see setup.py"
    if request.param not in available:
        pytest.skip(f"{request.param}: not on this processor")
    return request.param


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [heads, dim], k [heads, n, dim], v [heads, n, v_dim] -> out [heads, v_dim], lse [heads], float64."""
    scores = (k.double() @ q.double().unsqueeze(-1))[..., 0] * scale
    lse = scores.logsumexp(-1) if k.shape[1] else torch.full((len(q),), -torch.inf, dtype=torch.float64)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
    return (weights[:, None] @ v.double())[:, 0], lse


def attend(
    q: torch.Tensor,
    keys: torch.Tensor | BlockRows,
    cache: torch.Tensor,
    scale: float,
    v_dim: int,
    instruction_set: str,
    heads: RowHeads | None = None,
    fp8_rows: FP8Rows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's results, from buffers with something behind each row."""
    out = torch.full((*q.shape[:2], v_dim + 3), 7.0)
    lse = torch.full((*q.shape[:2], 2), 7.0)
    rows.attend(q, keys, cache, scale, out[..., :v_dim], lse[..., 0], heads, fp8_rows, instruction_set)
    assert bool((out[..., v_dim:] == 7).all()), "wrote beside the result"
    assert bool((lse[..., 1] == 7).all()), "wrote beside the result"
    return out[..., :v_dim], lse[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_key_for_all_heads(instruction_set: str, dtype: torch.dtype) -> None:
    """All numbers of rows and heads with some dims each; what no query names is NaN."""
    torch.manual_seed(0)
    for case, (count, num_heads) in enumerate(itertools.product(COUNTS, HEADS)):
        dim, v_dim = DIMS[case % len(DIMS)]
        cache = torch.full((2 * count + 3, dim + 5), torch.nan, dtype=dtype)
        slots = torch.full((3, count + 2), -1, dtype=(torch.int32, torch.int64)[case % 2])
        numbers = torch.randperm(2 * count + 3)[:count]
        cache[numbers, :dim] = torch.randn(count, dim).to(dtype)
        slots[0, torch.randperm(count + 2)[:count]] = numbers.to(slots.dtype)
        slots[2, : count // 2] = numbers[: count // 2].to(slots.dtype)
        q = torch.randn(num_heads, 3, dim + 1).transpose(0, 1)[..., :dim]
        out, lse = attend(q, slots, cache, dim**-0.5, v_dim, instruction_set)
        for i in range(3):
            k = cache[slots[i][slots[i] >= 0].long(), :dim].expand(num_heads, -1, -1)
            exact_out, exact_lse = reference(q[i], k, k[..., :v_dim], dim**-0.5)
            torch.testing.assert_close(out[i].double(), exact_out, atol=3e-6, rtol=0)
            torch.testing.assert_close(lse[i].double(), exact_lse, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_of_several_heads(instruction_set: str, dtype: torch.dtype) -> None:
    """Grouped-query attention: `keys | values` of all KV heads in a row."""
    torch.manual_seed(0)
    for case, (kv_heads, group, dim) in enumerate(itertools.product((1, 2, 3), (1, 3, 4, 8), (12, 64, 96))):
        count, v_dim = 5 + case, dim if case % 2 else dim - 3
        layout = RowHeads(kv_heads, dim, kv_heads * dim, v_dim)
        cache = torch.randn(count, kv_heads * (dim + v_dim)).to(dtype)
        q = torch.randn(1, kv_heads * group, dim)
        out, lse = attend(q, torch.arange(count)[None], cache, 0.3, v_dim, instruction_set, layout)
        k = cache[:, : kv_heads * dim].view(count, kv_heads, dim).transpose(0, 1)
        v = cache[:, kv_heads * dim :].view(count, kv_heads, v_dim).transpose(0, 1)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        exact_out, exact_lse = reference(q[0], k, v, 0.3)
        torch.testing.assert_close(out[0].double(), exact_out, atol=3e-6, rtol=0)
        torch.testing.assert_close(lse[0].double(), exact_lse, atol=3e-6, rtol=1e-6)


LENGTHS = (0, *range(1, 71), 511, 512, 513, 1023, 1024, 1025, 1500)
BLOCK_SIZES = (1, 3, 4, 16, 64)

FORMS = (
    # KV heads (0: one key for all heads, whose value is its beginning), heads, dim, v_dim
    (0, 16, 576, 512),
    (0, 3, 20, 16),
    (1, 1, 64, 64),
    (2, 8, 64, 64),
    (4, 8, 32, 32),
    (3, 9, 64, 64),
    (1, 8, 96, 96),
    (2, 2, 40, 40),
    (1, 12, 128, 128),
    # Heads that fill vectors, and pairs of them or not; with one exponent for a key in FP8, and several.
    (2, 32, 40, 40),
    (0, 32, 96, 64),
    (1, 16, 96, 96),
)


def paged_case(form: tuple[int, int, int, int], stored_as: str, lengths: tuple[int, ...], block_size: int):
    """A cache in which only the rows of some requests are not NaN: (cache, their rows as floats, keys, where
    heads are, shape in FP8)."""
    kv_heads, _, dim, v_dim = form
    width = dim if kv_heads == 0 else 2 * kv_heads * dim
    layout = RowHeads() if kv_heads == 0 else RowHeads(kv_heads, dim, kv_heads * dim, dim)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks)
    blocks = torch.full((len(lengths), max(counts) + 1), 10**9, dtype=torch.int64)
    elements = [torch.randn(length, width) for length in lengths]
    fp8_rows = None
    if stored_as == "fp8":
        fp8_rows = FP8Rows(1, v_dim, dim - v_dim) if kv_heads == 0 else FP8Rows(2 * kv_heads, dim, 0)
        cache = torch.full((num_blocks * block_size, fp8_rows.num_bytes + 7), 0xFF, dtype=torch.uint8)
    else:
        cache = torch.full((num_blocks * block_size, width + 5), torch.nan, dtype=getattr(torch, stored_as))
    for i, (own, count) in enumerate(zip(elements, counts)):
        blocks[i, :count], order = order[:count], order[count:]
        slots = (blocks[i, :count, None] * block_size + torch.arange(block_size)).flatten()[: len(own)]
        if fp8_rows is None:
            cache[slots, :width] = own.to(cache.dtype)
            own.copy_(own.to(cache.dtype))
            continue
        stored = cache[slots]
        fp8.encode(fp8_rows, own, stored)
        decoded = torch.empty(len(own), width, dtype=torch.bfloat16)
        fp8.decode(fp8_rows, stored, decoded)
        cache[slots] = stored
        own.copy_(decoded)
    tables = torch.arange(len(lengths))
    keys = BlockRows(blocks, tables, torch.tensor(lengths, dtype=torch.int64), block_size)
    return cache, elements, keys, layout, fp8_rows


def heads_of(elements: torch.Tensor, form: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, width] -> keys and values of all query heads [heads, n, ...]."""
    kv_heads, num_heads, dim, v_dim = form
    if kv_heads == 0:
        k = elements.expand(num_heads, -1, -1)
        return k, k[..., :v_dim]
    both = elements.view(len(elements), 2, kv_heads, dim).permute(1, 2, 0, 3)
    k, v = both.repeat_interleave(num_heads // kv_heads, 1)
    return k, v


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "fp8"])
def test_rows_in_blocks_of_every_length(instruction_set: str, stored_as: str) -> None:
    """Requests of several lengths at once, in blocks that end anywhere, with and without a window."""
    torch.manual_seed(0)
    for case in range(len(FORMS) * len(BLOCK_SIZES)):
        form, block_size = FORMS[case % len(FORMS)], BLOCK_SIZES[case // len(FORMS)]
        lengths = LENGTHS[case % 15 :: 15]
        cache, elements, keys, layout, fp8_rows = paged_case(form, stored_as, lengths, block_size)
        window = (None, None, 1, 7, 600)[case // len(FORMS)]
        keys = replace(keys, window=window)
        q = torch.randn(len(lengths), form[1], form[2])
        scale = form[2] ** -0.5
        out, lse = attend(q, keys, cache, scale, form[3], instruction_set, layout, fp8_rows)
        for i, own in enumerate(elements):
            k, v = heads_of(own[-window:] if window else own, form)
            exact_out, exact_lse = reference(q[i], k, v, scale)
            torch.testing.assert_close(out[i].double(), exact_out, atol=3e-6, rtol=0)
            torch.testing.assert_close(lse[i].double(), exact_lse, atol=3e-6, rtol=1e-6)


def test_queries_may_share_blocks(instruction_set: str) -> None:
    """Several tokens of a request. A query's bits do not depend on who else is there."""
    torch.manual_seed(0)
    form = (2, 8, 64, 64)
    cache, elements, keys, layout, _ = paged_case(form, "bfloat16", (700, 30), 16)
    keys = replace(keys, tables=torch.tensor([0, 1, 0, 0]), lengths=torch.tensor([690, 30, 691, 700]))
    q = torch.randn(4, 8, 64)
    together, _ = attend(q, keys, cache, 0.2, 64, instruction_set, layout)
    for i, (table, length) in enumerate(zip(keys.tables.tolist(), keys.lengths.tolist())):
        own = replace(keys, tables=keys.tables[i : i + 1], lengths=keys.lengths[i : i + 1])
        alone, _ = attend(q[i : i + 1], own, cache, 0.2, 64, instruction_set, layout)
        assert torch.equal(alone[0], together[i])
        exact, _ = reference(q[i], *heads_of(elements[table][:length], form), 0.2)
        torch.testing.assert_close(together[i].double(), exact, atol=3e-6, rtol=0)


def test_scores_of_any_size(instruction_set: str) -> None:
    """Rising, falling, huge, tiny and infinite scores: the reference has to move, or must not."""
    ramp = torch.linspace(-1, 1, 100)
    peak = torch.where(torch.arange(100) == 57, 1.0, 0.0)
    for factor in (1.0, 30.0, 100.0, 1e4, 1e30):
        for values in (ramp, -ramp, peak, -peak, torch.zeros(100), ramp - 3, ramp + 3):
            cache = torch.stack((values * factor, torch.arange(100.0)), dim=1)
            q = torch.tensor([[[1.0, 0.0]] * 5])
            layout = RowHeads(1, 0, 1, 0)
            out, lse = attend(q, torch.arange(100)[None], cache, 1.0, 1, instruction_set, layout)
            k, v = cache.expand(5, -1, -1), cache[:, 1:].expand(5, -1, -1)
            exact_out, exact_lse = reference(q[0], k, v, 1.0)
            # A score's own rounding, times the largest value.
            atol = (
                100
                * 2e-7
                * max(1.0, math.log2(factor) if factor > 1e4 else float(values.abs().max()) * factor)
            )
            torch.testing.assert_close(out[0].double(), exact_out, atol=atol, rtol=0)
            torch.testing.assert_close(lse[0].double(), exact_lse, atol=3e-6, rtol=1e-6)
    hidden = torch.tensor([[-torch.inf, 1.0], [2.0, 5.0], [-torch.inf, 3.0]])
    out, lse = attend(q, torch.arange(3)[None], hidden, 1.0, 1, instruction_set, layout)
    assert out.unique().tolist() == [5.0]
    torch.testing.assert_close(lse.unique(), torch.tensor([2.0]))
    out, lse = attend(q, torch.tensor([[0, 2]]), hidden, 1.0, 1, instruction_set, layout)
    assert out.unique().tolist() == [0.0]
    assert lse.unique().tolist() == [-torch.inf]


def test_a_cache_of_more_than_2_to_the_31_elements(instruction_set: str) -> None:
    """Of which only the rows that are named have pages."""
    cache = torch.empty(2**22, 704, dtype=torch.bfloat16)
    assert cache.numel() > 2**31
    slots = torch.tensor([[2**22 - 1, 0, 2**21 + 1]])
    cache[slots[0], :576] = torch.randn(3, 576).bfloat16()
    q = torch.randn(1, 2, 576)
    out, _ = attend(q, slots, cache, 0.1, 512, instruction_set)
    k = cache[slots[0], :576].expand(2, -1, -1)
    exact, _ = reference(q[0], k, k[..., :512], 0.1)
    torch.testing.assert_close(out[0].double(), exact, atol=3e-6, rtol=0)


def test_not_less_exact_than_torch() -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(3000, 576).bfloat16(), torch.randn(2, 8, 576)
    slots = torch.stack([torch.randperm(3000)[:2048] for _ in range(2)])
    errors = []
    for is_native in (True, False):
        out, lse = torch.empty(2, 8, 512), torch.empty(2, 8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "is_available", lambda is_native=is_native: is_native)
            attend_selected(q, slots, cache, PlainFormat(576, cache.dtype), 576**-0.5, out, lse, Workspace())
        error = 0.0
        for i in range(2):
            k = cache[slots[i], :576].expand(8, -1, -1)
            exact, _ = reference(q[i], k, k[..., :512], 576**-0.5)
            error += float((out[i].double() - exact).abs().mean())
        errors.append(error)
    assert errors[0] <= 1.1 * errors[1], errors


def test_what_the_kernel_is_not_for() -> None:
    q, cache = torch.ones(1, 2, 8), torch.ones(3, 8)
    assert rows.can_attend(q, cache)
    assert rows.can_attend(q, cache.bfloat16())
    assert not rows.can_attend(q, cache.half())
    assert not rows.can_attend(q.double(), cache)
    assert not rows.can_attend(q, cache, FP8Rows(1, 8, 0))
    assert rows.can_attend(q, cache.to(torch.uint8), FP8Rows(1, 8, 0))
