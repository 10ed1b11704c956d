"""The choice of how queries reach their context: what it picks, and that it is a function of the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.attention.context_ways import AUTO, KV, LOCAL, QUERY, SLICED, WAYS, ContextWays
from prefold.config import DSAConfig, MLAConfig
from prefold.distributed.pcp_layout import partition
from prefold.limits import MOST_QUERIES, TRAVEL_TOKENS

MLA = MLAConfig(None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
LAYOUTS = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4), (1, 2), (2, 4), (1, 8)]


def ways(pcp: int, dcp: int = 1, forced: str = AUTO, num_heads: int = 16) -> ContextWays:
    return ContextWays(
        MLA,
        num_heads,
        MLA.token_dim,
        2 * MLA.token_dim,
        pcp,
        dcp,
        tile_tokens=1024,
        q_itemsize=4,
        forced=forced,
    )


def chosen(layout: ContextWays, requests: list[tuple[int, int]], is_prefill: bool = True) -> list[str]:
    """Of (num_computed, num_scheduled), as the partition spreads them."""
    num_computed, num_scheduled = np.array(requests, np.int64).T
    prefill = np.full(len(requests), is_prefill)
    parts = partition(num_computed, num_scheduled, prefill, layout.pcp_size, min_split_tokens=32)
    num_queries = np.zeros((len(requests), layout.pcp_size), np.int64)
    np.add.at(num_queries, (parts.row_request, parts.row_rank), parts.row_num_tokens)
    return layout.choose(num_queries, num_computed).tolist()


@pytest.mark.parametrize("tail", [1, 2, 31, 72, 96])
def test_a_short_tail_after_a_long_prefix_is_sliced(tail: int):
    for pcp in (2, 4, 8):
        assert chosen(ways(pcp), [(32 * 1024, tail)]) == [SLICED]


def test_few_queries_of_each_rank_stay():
    """They are attended to rows as they are stored: nothing is saved by reading each row on one rank only."""
    assert chosen(ways(8), [(32 * 1024, 8 * MOST_QUERIES)]) == [LOCAL]
    assert chosen(ways(8), [(32 * 1024, 8 * MOST_QUERIES + 8)]) == [SLICED]


def test_a_long_chunk_over_a_short_context_stays():
    for pcp in (2, 4):
        for num_computed in (1, 64, 256):
            assert chosen(ways(pcp), [(num_computed, 4096)]) == [LOCAL]


@pytest.mark.parametrize(("pcp", "dcp"), [(2, 2), (4, 2), (4, 4), (1, 2), (2, 4)])
def test_sparse_attention_sends_the_queries_of_short_tails(pcp: int, dcp: int):
    """Of long chunks the ranks of PCP split the work already, those of TP do not."""
    dsa = DSAConfig(2048, 32, 128, full_layers=(True, False), rope_interleaved=True)
    sparse = replace(ways(pcp, dcp), attention=replace(MLA, q_lora_rank=512, dsa=dsa))
    for tail in (1, 16, 64):
        assert chosen(sparse, [(100_000, tail)]) == [QUERY]
    assert chosen(sparse, [(100_000, 8192)]) == [KV if pcp >= dcp else QUERY]
    assert chosen(sparse, [(64, 4096)]) == [KV]
    assert replace(sparse, dcp_size=1).legal == (LOCAL,)
    assert chosen(replace(sparse, dcp_size=1, pcp_size=4), [(100_000, 1)]) == [LOCAL]


def test_one_rank_keeps_everything():
    requests = [(32 * 1024, 1), (32 * 1024, 64), (32 * 1024, 4096)]
    assert chosen(ways(1), requests) == [LOCAL] * 3


@pytest.mark.parametrize(("pcp", "dcp"), [(2, 2), (4, 2), (4, 4), (1, 2), (2, 4)])
def test_keys_travel_for_long_chunks_and_queries_for_short_tails(pcp: int, dcp: int):
    layout = ways(pcp, dcp)
    assert chosen(layout, [(32 * 1024, 1)]) == [QUERY]
    assert chosen(layout, [(32 * 1024, 64)]) == [QUERY]
    assert chosen(layout, [(16 * 1024, 16 * 1024)]) == [KV]
    assert chosen(layout, [(256, 4096)]) == [KV]


def test_decode_rows_that_occupy_all_ranks_stay():
    """As many as there are ranks gain nothing by sharing; one alone does, if its context is long."""
    assert chosen(ways(2), [(32768, 1)] * 16, is_prefill=False) == [LOCAL] * 16
    assert chosen(ways(2), [(32768, 1)], is_prefill=False) == [SLICED]
    assert chosen(ways(2), [(100, 1)], is_prefill=False) == [LOCAL]
    assert chosen(ways(2), [(32768, 1), (100, 1)], is_prefill=False) == [SLICED, LOCAL]
    assert chosen(ways(4), [(32768, 1)] * 2, is_prefill=False) == [SLICED] * 2


@pytest.mark.parametrize(("pcp", "dcp"), LAYOUTS)
def test_a_forced_way_is_taken_where_it_is_possible(pcp: int, dcp: int):
    requests = [(32 * 1024, 1), (100, 3000), (5, 1)]
    for forced in WAYS:
        layout = ways(pcp, dcp, forced)
        by_cost = chosen(replace(layout, forced=AUTO), requests)
        assert set(by_cost) <= set(layout.legal)
        assert chosen(layout, requests) == ([forced] * 3 if forced in layout.legal else by_cost)
    expected = (KV, QUERY) if dcp > 1 else (LOCAL, SLICED) if pcp > 1 else (LOCAL,)
    assert ways(pcp, dcp).legal == expected


def test_a_way_that_is_none_is_refused():
    with pytest.raises(ValueError, match="context_attention='sharded' is none of"):
        ways(2, forced="sharded")


def test_no_requests():
    assert ways(2, 2).choose(np.zeros((0, 2), np.int64), np.zeros(0, np.int64)).tolist() == []


def test_more_queries_than_travel_at_once_read_keys_again():
    """So beyond some length of a chunk its queries stay, however long the context."""
    lengths = [2**i for i in range(16)]
    for layout in (ways(2, 2), ways(4, 4)):
        picked = [chosen(layout, [(32 * 1024, length)])[0] for length in lengths]
        turn = picked.index(KV)
        assert picked == [QUERY] * turn + [KV] * (len(lengths) - turn)
        assert lengths[turn] <= 4 * TRAVEL_TOKENS


@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 5000)), min_size=1, max_size=10),
    st.sampled_from(LAYOUTS),
)
@settings(max_examples=100)
def test_any_batch_gets_legal_ways(requests: list[tuple[int, int]], sizes: tuple[int, int]):
    """And the same when asked again: there is no state."""
    layout = ways(*sizes)
    first = chosen(layout, requests)
    assert set(first) <= set(layout.legal)
    assert chosen(layout, requests) == first


@given(
    st.lists(st.tuples(st.integers(1, 1_000_000), st.integers(1, 5000)), min_size=1, max_size=10),
    st.sampled_from([sizes for sizes in LAYOUTS if max(sizes) > 1]),
    st.booleans(),
)
@settings(max_examples=100)
def test_no_trip_costs_less_than_the_least(
    requests: list[tuple[int, int]], sizes: tuple[int, int], is_sparse: bool
):
    """Requests whose cost in place is below that are not weighed."""
    layout = ways(*sizes)
    if is_sparse and layout.dcp_size > 1:
        dsa = DSAConfig(2048, 32, 128, full_layers=(True, False), rope_interleaved=True)
        layout = replace(layout, attention=replace(MLA, q_lora_rank=512, dsa=dsa))
    keys, own = np.array(requests, np.int64).T
    trip = layout._travel if layout.dsa is None else layout._visit
    for of_unit in (own, own * layout.unit):
        assert trip(own, of_unit, keys).min() >= layout._least_trip
