"""Sparse attention with a mask: the same as attention to the selected rows, and who takes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.attention.backend import IndexQueries, LatentRows
from prefold.attention.forms import KVForms
from prefold.attention.masked import MaskedAttention, MaskedQueries
from prefold.attention.native_backend import NativeBackend
from prefold.attention.row_format import PlainFormat
from prefold.attention.selected import attend_selected
from prefold.attention.selection import AllTokens, KeySelector
from prefold.attention.sparse_costs import masked_cost, num_masked, selected_cost
from prefold.attention.sparse_layer import RequestKeys, SparseLayer
from prefold.attention.walk import Run, rows_of
from prefold.config import DSAConfig, MLAConfig
from prefold.kernels import library
from prefold.workspace import Workspace

torch.set_num_threads(1)

TOPK, HEADS, SCALE = 9, 2, 0.3
DSA = DSAConfig(TOPK, num_heads=3, head_dim=4, full_layers=(True,), rope_interleaved=True)
MLA = MLAConfig(None, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=5, dsa=DSA)


@pytest.mark.skipif(not library.is_available(), reason="the native library was not built")
@settings(max_examples=40)
@given(
    gap=st.integers(0, 70),
    lengths=st.tuples(st.integers(1, 9), st.integers(0, 140)),
    start=st.integers(0, 80),
    tile=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_selected_rows(gap: int, lengths: tuple[int, int], start: int, tile: int, seed: int) -> None:
    """Two runs of queries anywhere, tiles of any size; the second layer uses the first one's selection."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    second = start + lengths[0] + gap
    runs = (Run(start, start + lengths[0], 1), Run(second, second + lengths[1], 1 + lengths[0]))
    runs = runs[: 1 + (lengths[1] > 0)]
    end, num_queries = runs[-1].end, sum(lengths)
    workspace = Workspace(poison=True)
    backend, plain = NativeBackend(workspace), PlainFormat(MLA.token_dim, torch.float32)
    selector = KeySelector(TOPK, tile, workspace)
    rows, index_keys = random(end, MLA.token_dim), random(end, DSA.head_dim)
    keys = RequestKeys(
        rows, rows_of(rows, 0, plain), lambda a, b: index_keys[a:b], AllTokens(), torch.empty(0)
    )
    w_uk, w_uv = random(HEADS, 6, 10), random(HEADS, 5, 10)
    forms = KVForms.of(LatentRows(MLA, w_uk, w_uv), torch.float32, backend, workspace)
    index = IndexQueries(random(num_queries + 2, 3, 4), random(num_queries + 2, 3))
    selected = torch.full(MaskedQueries.shape(runs), -1, dtype=torch.int64)
    positions = torch.cat([torch.arange(run.start, run.end) for run in runs])
    slots = torch.empty(num_queries, TOPK, dtype=torch.int32)
    own = IndexQueries(index.q[1:-1], index.weights[1:-1])
    selector.select_slots(
        own, positions + 1, keys.index_keys, torch.arange(-1, end, dtype=torch.int32), slots
    )
    masked = MaskedAttention(selector, backend, tile, SCALE)
    for layer_index in (index, None):
        q, out = random(num_queries + 2, HEADS, 8), torch.full((num_queries + 2, HEADS, 5), torch.nan)
        layer = SparseLayer(q, layer_index, forms, rows, rows, out)
        masked.attend(layer, MaskedQueries(runs, selected), keys)
        latent_q, latent = torch.empty(num_queries, HEADS, 12), torch.empty(num_queries, HEADS, 10)
        forms.absorbed.queries(q[1:-1], latent_q)
        lse, expected = torch.empty(num_queries, HEADS), torch.empty(num_queries, HEADS, 5)
        attend_selected(latent_q, slots, rows, plain, SCALE, latent, lse, workspace)
        forms.absorbed.results(latent, expected)
        torch.testing.assert_close(out[1:-1], expected, rtol=1e-4, atol=1e-5)
        assert out[[0, -1]].isnan().all()


GLM = MLAConfig(None, 512, 192, 64, 256, DSAConfig(2048, 32, 128, (True,), rope_interleaved=True))


@given(
    heads=st.integers(1, 64),
    edges=st.lists(st.integers(0, 20_000), min_size=2, max_size=4, unique=True),
)
def test_masks_go_to_the_first_queries_and_pay(heads: int, edges: list[int]) -> None:
    edges = sorted(edges)
    runs = list(zip(edges[::2], edges[1::2]))
    count = num_masked(GLM, heads, runs)
    positions = [p for start, end in runs for p in range(start, end)]
    assert 0 <= count <= len(positions)

    def saved(count: int) -> float:
        own = positions[:count]
        selected = sum(min(p + 1, 2048) for p in own)
        with_masks = masked_cost(GLM, heads, own[-1] + 1, sum(own) + count)
        return selected_cost(GLM, heads, count, selected) - with_masks

    assert count == 0 or saved(count) > 0
    whole = [sum(end - start for start, end in runs[:n]) for n in range(1, len(runs) + 1)]
    assert all(saved(other) <= (saved(count) if count else 0) for other in whole)
