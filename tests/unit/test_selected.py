"""Attention to selected keys: against the softmax written out, whatever is not held."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.attention import selected
from prefold.attention.lse import merge_
from prefold.attention.row_format import PlainFormat
from prefold.attention.selected import attend_selected
from prefold.workspace import Workspace

torch.set_num_threads(1)

HEADS, DIM, RANK, WIDTH = 3, 6, 4, 9


@settings(max_examples=60)
@given(
    n=st.integers(0, 7),
    topk=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_shards_merge_to_the_whole(
    n: int, topk: int, dtype: torch.dtype, index: torch.dtype, seed: int
) -> None:
    """Keys are dealt to three ranks at random, some of which hold none. Rows of others are NaN."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(20, WIDTH, generator=generator).to(dtype)
    q = torch.randn(n, HEADS, DIM, generator=generator)
    slots = torch.rand(n, 20, generator=generator).argsort(dim=1)[:, :topk]
    owner = torch.randint(0, 3, (20,), generator=generator)
    out, lse = torch.zeros(n, HEADS, RANK), torch.full((n, HEADS), -torch.inf)
    for rank in range(3):
        held = torch.where(owner[slots] == rank, slots, -1)
        own = cache.masked_fill((owner != rank).unsqueeze(1), torch.nan)
        packed = torch.full((n, HEADS, RANK + 1), torch.nan)
        part, part_lse = packed[..., :RANK], packed[..., RANK]
        held_keys, plain = own[:, :DIM], PlainFormat(DIM, dtype)
        attend_selected(q, held.to(index), held_keys, plain, 0.3, part, part_lse, Workspace(poison=True))
        empty = (held < 0).all(dim=1)
        assert (part[empty] == 0).all()
        assert (part_lse[empty] == -torch.inf).all()
        merge_(out, lse, part, part_lse)
    keys = cache[slots][..., :DIM].float()
    scores = torch.einsum("nhd,nkd->nhk", q, keys) * 0.3
    torch.testing.assert_close(out, torch.einsum("nhk,nkd->nhd", scores.softmax(-1), keys[..., :RANK]))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_queries_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, q = torch.randn(20, WIDTH, generator=generator), torch.randn(5, HEADS, DIM, generator=generator)
    slots = torch.stack([torch.randperm(20, generator=generator)[:4] for _ in range(5)])
    results, plain = [], PlainFormat(DIM, cache.dtype)
    for elements in (1, 2 * 4 * DIM, 1 << 20):
        monkeypatch.setattr(selected, "GATHER_ELEMENTS", elements)
        out, lse = torch.empty(5, HEADS, RANK), torch.empty(5, HEADS)
        attend_selected(q, slots, cache[:, :DIM], plain, 1.0, out, lse, Workspace(poison=True))
        results.append((out, lse))
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0])
        torch.testing.assert_close(lse, results[0][1])
