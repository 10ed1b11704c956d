"""DESIGN section 6, properties 1 to 3, against plain Python that goes token by token."""

import doctest
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from prefold import causal
from prefold.causal import causal_pairs, limited_pairs
from prefold.distributed import pcp_layout
from prefold.distributed.pcp_layout import TokenOrder, partition, row_cost

# No limits on time: the tests may share the machine.
PROPERTY = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
SIZES = range(1, 17)
COMPUTED = st.one_of(st.just(0), st.integers(0, 100), st.integers(0, 2_000_000))
SCHEDULED = st.one_of(st.just(1), st.integers(1, 40), st.integers(1, 400))
REQUEST = st.tuples(COMPUTED, SCHEDULED, st.booleans())


def make(requests, size, min_split_tokens=0, decode_unit=1):
    """(partition, query_start_loc) of [(num_computed, num_scheduled, is_prefill)]."""
    columns = [np.array([request[i] for request in requests], np.int64) for i in range(3)]
    layout = partition(
        columns[0],
        columns[1],
        columns[2].astype(bool),
        size,
        min_split_tokens,
        decode_unit=decode_unit,
    )
    return layout, np.concatenate([[0], np.cumsum(columns[1])])


def rows_of(layout):
    """[(rank, request, start, end, is_prefill)] as plain Python."""
    columns = (
        layout.row_rank,
        layout.row_request,
        layout.row_start,
        layout.row_end,
        layout.row_is_prefill,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def stays_whole(request, size, min_split_tokens=0):
    _, num_scheduled, is_prefill = request
    return not is_prefill or num_scheduled < max(2 * size, min_split_tokens)


def spread(counts):
    return int(max(counts)) - int(min(counts))


def batches(max_requests=12):
    return st.tuples(
        st.lists(REQUEST, max_size=max_requests), st.integers(1, 16), st.sampled_from([0, 1, 20, 64])
    )


def batches_with_units(max_requests=12):
    """(requests, size, min_split_tokens, decode_unit): units of any number of ranks."""
    sizes = st.integers(1, 16).flatmap(
        lambda unit: st.tuples(st.integers(1, 16 // unit).map(lambda units: unit * units), st.just(unit))
    )
    return st.tuples(st.lists(REQUEST, max_size=max_requests), st.sampled_from([0, 1, 20, 64]), sizes).map(
        lambda drawn: (drawn[0], drawn[2][0], drawn[1], drawn[2][1])
    )


@pytest.mark.parametrize("module", [causal, pcp_layout], ids=lambda module: module.__name__)
def test_worked_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@PROPERTY
@given(batches_with_units())
@example(([], 4, 0, 2))
@example(([(0, 1, True)], 16, 0, 1))
def test_every_token_is_computed_by_one_rank_or_by_all_of_a_unit(batch):
    requests, size, min_split_tokens, unit = batch
    layout, _ = make(requests, size, min_split_tokens, unit)
    rows = rows_of(layout)
    seen = {}
    for rank, request, start, end, is_prefill in rows:
        assert start < end
        assert is_prefill == requests[request][2]
        for position in range(start, end):
            seen.setdefault((request, position), []).append(rank)
    expected = {(i, n + k) for i, (n, num_tokens, _) in enumerate(requests) for k in range(num_tokens)}
    assert seen.keys() == expected
    for (request, _), ranks in seen.items():
        num_ranks = 1 if requests[request][2] else unit
        assert ranks == list(range(ranks[0], ranks[0] + num_ranks))
        assert ranks[0] % num_ranks == 0
    for i, request in enumerate(requests):
        if stays_whole(request, size, min_split_tokens):
            assert sum(row[1] == i for row in rows) == (1 if request[2] else unit)


@PROPERTY
@given(batches())
def test_a_unit_of_one_rank_is_no_unit(batch):
    requests, size, min_split_tokens = batch
    with_unit = rows_of(make(requests, size, min_split_tokens, decode_unit=1)[0])
    assert with_unit == rows_of(make(requests, size, min_split_tokens)[0])


@PROPERTY
@given(batches_with_units())
def test_rows_are_ordered_and_counts_are_those_of_the_rows(batch):
    requests, size, min_split_tokens, unit = batch
    layout, _ = make(requests, size, min_split_tokens, unit)
    rows = rows_of(layout)
    assert rows == sorted(rows, key=lambda row: (row[0], not row[4], row[1], row[2]))
    for rank in range(size):
        own = [row for row in rows if row[0] == rank]
        assert own == rows[layout.rows_of(rank)]
        prefill = [end - start for _, _, start, end, is_prefill in own if is_prefill]
        decode = [end - start for _, _, start, end, is_prefill in own if not is_prefill]
        assert layout.num_prefill_tokens[rank] == sum(prefill)
        assert layout.num_decode_tokens[rank] == sum(decode)
        assert layout.causal_pairs[rank] == sum(
            (end * (end + 1) - start * (start + 1)) // 2 for _, _, start, end, _ in own
        )
        # Neighbours are merged: a rank never has two rows that touch.
        assert all(a[1] != b[1] or a[3] < b[2] for a, b in pairwise(own))


def test_causal_pairs_counts_the_keys_of_each_query():
    for start in range(12):
        for end in range(start, 12):
            keys = [p + 1 for p in range(start, end)]
            assert causal_pairs(start, end) == limited_pairs(start, end, None) == sum(keys)
            for limit in range(1, 14):
                assert limited_pairs(start, end, limit) == sum(min(seen, limit) for seen in keys)
    far = causal_pairs(np.array([2**31]), np.array([2**31 + 3]))
    assert far.tolist() == [3 * 2**31 + 6]


@PROPERTY
@given(batches_with_units())
def test_gather_then_restore_is_the_identity(batch):
    requests, size, min_split_tokens, unit = batch
    layout, query_start_loc = make(requests, size, min_split_tokens, unit)
    x = np.arange(query_start_loc[-1]) * 7 + 3
    order = TokenOrder.of(layout, query_start_loc)
    local = [x[order.of_rank(rank)] for rank in range(size)]
    rank, index = order.locate(np.arange(x.size))
    restored = [int(local[r][i]) for r, i in zip(rank, index, strict=True)]
    assert restored == x.tolist()


@PROPERTY
@given(batches_with_units(), st.integers(0, 5))
def test_index_helpers_against_a_walk_over_the_rows(batch, gap):
    requests, size, min_split_tokens, unit = batch
    layout, query_start_loc = make(requests, size, min_split_tokens, unit)
    query_start_loc = query_start_loc + gap * np.arange(len(requests) + 1)
    local = {rank: [] for rank in range(size)}
    kinds = {True: {rank: [] for rank in range(size)}, False: {rank: [] for rank in range(size)}}
    place = {}
    for rank, request, start, end, is_prefill in rows_of(layout):
        for position in range(start, end):
            token = int(query_start_loc[request]) + position - requests[request][0]
            place.setdefault(token, (rank, len(local[rank])))  # the first of a unit
            local[rank].append(token)
            kinds[is_prefill][rank].append(token)
    order = TokenOrder.of(layout, query_start_loc)
    for rank in range(size):
        assert order.of_rank(rank).tolist() == local[rank]
        assert order.prefill(rank).tolist() == kinds[True][rank]
        assert order.decode(rank).tolist() == kinds[False][rank]
    tokens = sorted(place)
    rank, index = order.locate(np.array(tokens, np.int64))
    assert list(zip(rank.tolist(), index.tolist(), strict=True)) == [place[token] for token in tokens]


@PROPERTY
@given(st.lists(REQUEST, max_size=12))
def test_one_rank_is_the_identity(requests):
    layout, query_start_loc = make(requests, 1)
    prefill_first = sorted(range(len(requests)), key=lambda i: not requests[i][2])
    assert rows_of(layout) == [
        (0, i, requests[i][0], requests[i][0] + requests[i][1], requests[i][2]) for i in prefill_first
    ]
    if prefill_first == sorted(prefill_first):
        indices = TokenOrder.of(layout, query_start_loc).of_rank(0)
        assert indices.tolist() == list(range(query_start_loc[-1]))


def chunks_of(rows, size):
    """[(rank, start, end)] of the 2P chunks: the row in the middle holds two."""
    rows = sorted((start, end, rank) for rank, _, start, end, _ in rows)
    assert len(rows) == 2 * size - 1
    start, end, rank = rows[size - 1]
    middle = start + (end - start + 1) // 2
    rows[size - 1 : size] = [(start, middle, rank), (middle, end, rank)]
    return [(rank, start, end) for start, end, rank in rows]


@PROPERTY
@given(st.lists(st.tuples(COMPUTED, st.integers(32, 700)), min_size=1, max_size=12), st.integers(1, 16))
def test_split_requests_are_dual_chunks_with_even_sums(requests, size):
    layout, _ = make([(n, num_tokens, True) for n, num_tokens in requests], size)
    for _, rows in groupby(sorted(rows_of(layout), key=lambda row: row[1]), key=lambda row: row[1]):
        chunks = chunks_of(rows, size)
        assert spread([end - start for _, start, end in chunks]) <= 1
        ranks = [rank for rank, _, _ in chunks]
        assert ranks == ranks[::-1]
        assert sorted(ranks[:size]) == list(range(size))
    assert spread(layout.num_tokens) <= 1
    # A rank exceeds the mean by at most one token of average cost per request.
    excess = int(layout.causal_pairs.max()) * size - int(layout.causal_pairs.sum())
    assert 2 * excess <= sum(2 * n + num_tokens + 1 for n, num_tokens in requests) * size


@PROPERTY
@given(batches(max_requests=40))
def test_whole_rows_balance_to_within_the_largest_of_them(batch):
    requests, size, _ = batch
    whole = [r for r in requests if stays_whole(r, size)]
    layout, _ = make(whole, size)
    if not whole:
        return
    assert spread(np.diff(layout.row_offsets)) <= 1
    cost = row_cost(layout.num_tokens, layout.causal_pairs)
    largest = max(row_cost(length, causal_pairs(n, n + length)) for n, length, _ in whole)
    assert spread(cost) <= largest


@PROPERTY
@given(batches(max_requests=40))
def test_split_requests_do_not_add_to_the_imbalance_of_whole_ones(batch):
    requests, size, min_split_tokens = batch
    layout, _ = make(requests, size, min_split_tokens)
    whole = [r for r in requests if stays_whole(r, size, min_split_tokens)]
    of_whole = make(whole, size, min_split_tokens)[0].num_tokens
    assert spread(layout.num_tokens) <= max(1, spread(of_whole))
    if all(num_tokens == 1 for _, num_tokens, _ in whole):
        assert spread(layout.num_tokens) <= 1


@PROPERTY
@given(batches_with_units(max_requests=40))
def test_units_balance_like_ranks(batch):
    """Decode rows among units, short prefills among ranks, each as evenly as if they were alone; and split
    requests add nothing."""
    requests, size, min_split_tokens, unit = batch
    if unit == 1:
        return  # decode rows and short prefills are dealt together: see above
    layout, _ = make(requests, size, min_split_tokens, unit)
    decode = [r for r in requests if not r[2]]
    for rank in range(size):
        first = rank // unit * unit
        assert layout.num_decode_tokens[rank] == layout.num_decode_tokens[first]
    of_decode = make(decode, size // unit)[0]
    assert layout.num_decode_tokens[::unit].tolist() == of_decode.num_tokens.tolist()
    whole = [r for r in requests if stays_whole(r, size, min_split_tokens)]
    of_whole = make(whole, size, min_split_tokens, unit)[0]
    assert spread(layout.num_tokens) <= max(1, spread(of_whole.num_tokens))
    if all(num_tokens == 1 for _, num_tokens, _ in whole):
        assert spread(of_whole.num_decode_tokens) <= 1
        assert spread(of_whole.num_prefill_tokens) <= 1
        assert spread(layout.num_tokens) <= 2


@pytest.mark.parametrize("size", SIZES)
def test_causal_work_of_one_prompt(size):
    """max/mean <= 1 + P/L for every L, so 1.01 from 100 P on and 1.05 from 20 P on.

    1.01 at 64 P is out of reach if token sums may differ by 1 only: at L = 65 P each rank has 65 tokens, 32
    and 33 in its two chunks, and the best such cut (found by trying all for P up to 6) has
    max/mean = 1 + (P-1)/(65 P + 1). Where 2P divides L the work is equal.
    """
    for num_tokens in [*range(2 * size, 24 * size + 1), *range(63 * size, 67 * size + 1)]:
        layout, _ = make([(0, num_tokens, True)], size)
        pairs = layout.causal_pairs
        total = num_tokens * (num_tokens + 1) // 2
        assert pairs.sum() == total
        assert pairs.max() * size * num_tokens <= total * (num_tokens + size)
        if num_tokens % (2 * size) == 0:
            assert spread(pairs) == 0
    for times, limit in ((8, 1.125), (20, 1.05), (64, 1.0157), (100, 1.01)):
        for num_tokens in range(times * size, (times + 4) * size):
            pairs = make([(0, num_tokens, True)], size)[0].causal_pairs
            assert pairs.max() / pairs.mean() <= limit, num_tokens


@pytest.mark.parametrize("size", SIZES)
def test_equal_prompts_take_turns(size):
    """One prompt of 65 P tokens leaves the ranks uneven by up to 1.5 %; P of them even out."""
    layout, _ = make([(0, 65 * size, True)] * size, size)
    assert spread(layout.causal_pairs) == 0
    assert spread(layout.num_tokens) == 0


def test_ten_tokens_over_four_ranks():
    layout, _ = make([(0, 10, True)], 4)
    assert sorted(layout.num_tokens.tolist()) == [2, 2, 3, 3]
    layout, _ = make([(0, 10, True)] * 2, 4)
    assert layout.num_tokens.tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_one_token_rows_spread_evenly(is_prefill):
    layout, _ = make([(100 + i, 1, is_prefill) for i in range(64)], 4)
    assert layout.num_tokens.tolist() == [16] * 4
    kind = layout.num_prefill_tokens if is_prefill else layout.num_decode_tokens
    assert kind.tolist() == [16] * 4
    assert layout.row_is_prefill.tolist() == [is_prefill] * 64
    assert spread(layout.causal_pairs) <= 4


def test_short_prefills_stay_whole():
    layout, _ = make([(0, 7, True), (0, 8, True)], 4)
    assert np.bincount(layout.row_request).tolist() == [1, 7]
    layout, _ = make([(0, 63, True), (0, 64, True)], 4, min_split_tokens=64)
    assert np.bincount(layout.row_request).tolist() == [1, 7]


def test_decode_requests_stay_whole_whatever_their_shape():
    layout, _ = make([(50, 40, False), (0, 40, True)], 4)
    assert np.bincount(layout.row_request).tolist() == [1, 7]
    assert layout.num_decode_tokens.sum() == 40


def test_fewer_requests_than_ranks_leave_ranks_empty():
    layout, query_start_loc = make([(9, 1, False), (4, 1, True)], 8)
    assert sorted(np.diff(layout.row_offsets).tolist()) == [0] * 6 + [1, 1]
    empty = int(np.flatnonzero(layout.num_tokens == 0)[0])
    assert TokenOrder.of(layout, query_start_loc).of_rank(empty).tolist() == []
    assert layout.causal_pairs[empty] == 0


def test_a_request_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"num_scheduled=\[3, 0\]"):
        make([(0, 3, True), (5, 0, False)], 2)
