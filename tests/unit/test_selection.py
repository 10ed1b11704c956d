"""Which keys an indexer selects: against sorting by (score, -position), ties and tiles of all kinds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.attention.backend import IndexQueries
from prefold.attention.plan import RequestWork
from prefold.attention.row_format import PlainFormat
from prefold.attention.selection import KeySelector, positions_of, ranked
from prefold.attention.sparse import sparse_runs
from prefold.attention.walk import Run, rows_of
from prefold.workspace import Workspace

torch.set_num_threads(1)

HEADS, DIM = 3, 4


def brute_force(index: IndexQueries, keys: torch.Tensor, run: Run, topk: int) -> list[set[int]]:
    """Of each query's keys, the `topk` with the highest score, of equal ones those that come first."""
    found = []
    for i, position in enumerate(range(run.start, run.end)):
        token = run.offset + i
        by_head = (index.q[token] @ keys[: position + 1].T).relu()
        scores = (index.weights[token] @ by_head).tolist()
        found.append(set(sorted(range(position + 1), key=lambda key: (-scores[key], key))[:topk]))
    return found


@settings(max_examples=150, deadline=None)
@given(
    topk=st.integers(1, 9),
    tile=st.integers(1, 40),
    more=st.integers(0, 30),
    count=st.integers(1, 150),
    offset=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_the_best_keys_are_selected(
    topk: int, tile: int, more: int, count: int, offset: int, seed: int
) -> None:
    """Small whole numbers: sums are exact, and scores of 0 and of equal value are common."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    run = Run(topk + more, topk + more + count, offset)
    keys = integers(run.end, DIM)
    index = IndexQueries(integers(offset + count + 1, HEADS, DIM), integers(offset + count + 1, HEADS))
    out = torch.full((count, topk), -1, dtype=torch.int32)
    source = rows_of(keys, 0, PlainFormat(keys.shape[1], keys.dtype))
    KeySelector(topk, tile, Workspace(poison=True)).select(index, run, source, out)
    assert [set(row) for row in out.tolist()] == brute_force(index, keys, run, topk)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.integers(0, 2**31))
def test_ranks_have_the_order_of_scores_and_of_positions(scores: list[float], first: int) -> None:
    ranks = ranked(torch.tensor([scores]), first)
    expected = sorted(range(len(scores)), key=lambda key: (-scores[key], key))
    assert ranks[0].argsort(descending=True).tolist() == expected
    assert positions_of(ranks)[0].tolist() == list(range(first, first + len(scores)))
    assert len(set(ranks[0].tolist())) == len(scores)


@pytest.mark.parametrize("topk", range(1, 12))
def test_queries_with_a_choice(topk: int) -> None:
    """Those of two runs at positions from topk on, numbered one after the other."""
    runs = (Run(2, 5, 1), Run(8, 11, 4))
    work = RequestWork(runs, torch.tensor([7]), (), (), (), 0, absorbed=False, travels=False)
    found = sparse_runs([work, work], topk)
    positions = [p for part in found for p in range(part.run.start, part.run.end)]
    assert positions == 2 * [p for p in (2, 3, 4, 8, 9, 10) if p >= topk]
    tokens = [
        t for part in found for t in range(part.run.offset, part.run.offset + part.run.end - part.run.start)
    ]
    assert tokens == 2 * [t for t, p in zip(range(1, 7), (2, 3, 4, 8, 9, 10)) if p >= topk]
    rows = [row for part in found for row in range(part.rows.start, part.rows.stop)]
    assert rows == list(range(len(positions)))
