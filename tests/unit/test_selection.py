"""Which keys an indexer selects: against sorting by (score, -position), ties and tiles of all kinds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.attention.backend import IndexQueries
from prefold.attention.plan import RequestWork
from prefold.attention.row_format import PlainFormat
from prefold.attention.selection import NO_KEY, AllTokens, KeySelector, PagedTokens, positions_of, ranked
from prefold.attention.sparse import sparse_requests
from prefold.attention.walk import Run, rows_of
from prefold.kv_ownership import KVOwnership
from prefold.workspace import Workspace

torch.set_num_threads(1)

HEADS, DIM = 3, 4


def brute_force(index: IndexQueries, keys: torch.Tensor, run: Run, topk: int) -> list[set[int]]:
    """Of each query's keys, the `topk` with the highest score, of equal ones those that come first."""
    found = []
    for i, position in enumerate(range(run.start, run.end)):
        token = run.offset + i
        by_head = (index.q[token].float() @ keys[: position + 1].T).relu()
        scores = (index.weights[token] @ by_head).tolist()
        found.append(set(sorted(range(position + 1), key=lambda key: (-scores[key], key))[:topk]))
    return found


@settings(max_examples=150)
@given(
    topk=st.integers(1, 9),
    tile=st.integers(1, 40),
    start=st.integers(0, 30),
    count=st.integers(1, 150),
    shards=st.sampled_from([(2, 1, 1), (3, 2, 1), (2, 2, 2), (4, 3, 2), (2, 4, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_best_keys_are_selected(
    topk: int, tile: int, start: int, count: int, shards: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    """Small whole numbers: sums are exact, and scores of 0 and of equal value are common. Whoever holds the
    keys, also with queries that see fewer than `topk`. The native kernel has no queries in bfloat16."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    run = Run(start, start + count, 0)
    keys = integers(run.end, DIM)
    index = IndexQueries(integers(count, HEADS, DIM).to(dtype), integers(count, HEADS))
    ownership, device = KVOwnership(*shards), torch.device("cpu")
    width = min(topk, int(ownership.local_lengths(run.end).max()))
    found = []
    for rank in range(ownership.dcp_size):
        held = PagedTokens(ownership, rank, device)
        own = keys[held.positions(torch.arange(int(held.counts(torch.tensor([run.end])))))]
        source = rows_of(own, 0, PlainFormat(DIM, own.dtype))
        found.append(torch.zeros(count, width, dtype=torch.int64))
        selector = KeySelector(topk, tile, Workspace(poison=True))
        selector.select(index, torch.arange(start, run.end), source, held, found[-1])
    joint = torch.cat(found, dim=1)
    joint = positions_of(joint.topk(min(topk, joint.shape[1]), dim=1).values)
    chosen = [[position for position in row if position >= 0] for row in joint.tolist()]
    assert [set(row) for row in chosen] == brute_force(index, keys, run, topk)
    assert [len(row) for row in chosen] == [min(topk, position + 1) for position in range(start, run.end)]
    block_ids = torch.randperm(run.end, generator=generator)
    for one in (PagedTokens(KVOwnership(shards[0]), 0, device), AllTokens()):
        table, slots = one.table(run.end, block_ids), torch.zeros(count, topk, dtype=torch.int32)
        source = rows_of(keys, 0, PlainFormat(DIM, keys.dtype))
        selector = KeySelector(topk, tile, Workspace(poison=True))
        selector.select_slots(index, torch.arange(start, run.end) + 1, source, table, slots)
        wanted = [one.slots(torch.tensor(sorted(row)), block_ids).tolist() for row in chosen]
        assert [sorted(slot for slot in row if slot >= 0) for row in slots.tolist()] == list(
            map(sorted, wanted)
        )


@given(
    shards=st.sampled_from([(1, 1, 1), (4, 1, 2), (2, 3, 1), (4, 2, 4), (6, 4, 2)]), length=st.integers(0, 80)
)
def test_held_tokens(shards: tuple[int, int, int], length: int) -> None:
    """Of every rank's tokens: each position once, and the slots of `KVOwnership`."""
    ownership = KVOwnership(*shards)
    positions = np.arange(length)
    block_ids = np.random.default_rng(length).permutation(90)
    found = []
    for rank in range(ownership.dcp_size):
        held = PagedTokens(ownership, rank, torch.device("cpu"))
        own = held.positions(torch.arange(int(held.counts(torch.tensor([length])))))
        assert ownership.owner(own.numpy()).tolist() == [rank] * len(own)
        found += own.tolist()
        asked = torch.from_numpy(np.concatenate(([-1], positions))).to(torch.int32)
        slots = held.slots(asked, torch.from_numpy(block_ids))
        blocks = block_ids[positions // ownership.virtual_block_size]
        assert slots.tolist() == [-1, *ownership.slots(positions, blocks, rank).tolist()]
    assert sorted(found) == positions.tolist()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.integers(0, 2**31))
def test_ranks_have_the_order_of_scores_and_of_positions(scores: list[float], first: int) -> None:
    at = torch.arange(first, first + len(scores))
    ranks = ranked(torch.tensor([scores]), at)
    expected = sorted(range(len(scores)), key=lambda key: (-scores[key], key))
    assert ranks[0].argsort(descending=True).tolist() == expected
    hidden = [-1 if score == -np.inf else position for score, position in zip(scores, at.tolist())]
    assert positions_of(ranks)[0].tolist() == hidden
    assert len({NO_KEY, *ranks[0].tolist()}) == len(scores) + 1
    assert min(ranks[0].tolist()) > NO_KEY


@pytest.mark.parametrize("topk", range(1, 12))
@pytest.mark.parametrize("most_masked", range(8))
def test_queries_with_a_choice(topk: int, most_masked: int) -> None:
    """Those of two runs at positions from topk on; all of them if the request's context is gathered. First
    come those with masks, the others are numbered one after the other."""
    runs = (Run(2, 5, 1), Run(8, 11, 4))
    work = RequestWork(runs, torch.tensor([7]), (), (), (), 0, absorbed=False, travels=False)

    def num_masked(runs: Sequence[Run]) -> int:
        return min(sum(run.end - run.start for run in runs), most_masked)

    requests = sparse_requests([work, work], {1: 2}, topk, num_masked)
    own = [p for p in (2, 3, 4, 8, 9, 10) if p >= topk]
    assert list(requests) == ([0, 1] if own else [1])
    assert [request.num_gathered for request in requests.values()] == ([0, 2] if own else [2])
    for i, request in requests.items():
        chosen = [2, 3, 4, 8, 9, 10] if i else own
        first, others = chosen[:most_masked], chosen[most_masked:]
        runs = [part.run for part in request.runs]
        assert [p for run in request.masked for p in range(run.start, run.end)] == first
        assert [p for run in runs for p in range(run.start, run.end)] == others
        tokens = [run.offset + t for run in (*request.masked, *runs) for t in range(run.end - run.start)]
        assert tokens == [1 + (2, 3, 4, 8, 9, 10).index(p) for p in chosen]
        assert request.end == 11
    parts = [part for request in requests.values() for part in request.runs]
    rows = [row for part in parts for row in range(part.rows.start, part.rows.stop)]
    assert rows == list(range(len(rows)))
    assert all(part.rows.stop - part.rows.start == part.run.end - part.run.start for part in parts)
