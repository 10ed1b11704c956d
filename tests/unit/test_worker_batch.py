"""Request states, the global batch, and the bytes of the exchange."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.kv_ownership import KVOwnership
from prefold.request import SamplingParams
from prefold.step import CachedRequestData, NewRequestData, SchedulerOutput
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.pcp_manager import ExchangeLayout
from prefold.worker.request_states import RequestStates

B = 4
ONE_RANK = KVOwnership(B)


def new(name: str, tokens: list[int], blocks: list[int], computed: int = 0, **fields: int) -> NewRequestData:
    sizes = {"num_prompt_tokens": len(tokens), "num_prefill_tokens": len(tokens)} | fields
    return NewRequestData(
        request_id=name,
        token_ids=tokens,
        num_computed_tokens=computed,
        block_ids=blocks,
        sampling_params=SamplingParams(),
        seed=7,
        **sizes,
    )


def step(
    scheduled: dict[str, int],
    added: list[NewRequestData] | None = None,
    cached: list[CachedRequestData] | None = None,
    finished: list[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(0, added or [], cached or [], scheduled, finished or [])


# ---------------------------------------------------------------- states


def test_rows_never_move():
    states = RequestStates(max_num_seqs=3, max_model_len=20, block_size=B)
    states.apply(step({}, [new(name, [1], [0]) for name in "abc"]))
    rows = dict(states.row_of)
    assert sorted(rows.values()) == [0, 1, 2]
    states.apply(step({}, [new("d", [1], [0])], finished=["b"]))
    assert states.row_of == {"a": rows["a"], "c": rows["c"], "d": rows["b"]}


def test_a_row_that_is_used_again_keeps_nothing_of_the_last_request():
    states = RequestStates(max_num_seqs=1, max_model_len=20, block_size=B)
    states.apply(step({}, [new("a", list(range(18)), [0, 1, 2, 3, 4])]))
    states.apply(step({}, [new("b", [8, 9], [3], computed=1)], finished=["a"]))
    row = states.row_of["b"]
    assert states.block_ids[row].tolist() == [3, -1, -1, -1, -1]
    assert (states.num_tokens[row], states.num_computed_tokens[row], states.num_blocks[row]) == (2, 1, 1)
    info = states.info[row]
    assert info is not None
    assert (info.request_id, info.seed) == ("b", 7)


def test_drop_comes_before_add():
    """A preempted request may come back in the very step that drops it, and an id may change hands."""
    states = RequestStates(max_num_seqs=1, max_model_len=20, block_size=B)
    states.apply(step({}, [new("a", [1, 2], [0])]))
    states.apply(step({}, [new("a", [1, 2, 3], [5], num_prompt_tokens=2)], finished=["a"]))
    row = states.row_of["a"]
    assert states.token_ids[row, :3].tolist() == [1, 2, 3]
    assert (states.num_tokens[row], states.num_prompt_tokens[row], states.num_prefill_tokens[row]) == (
        3,
        2,
        3,
    )
    states.apply(step({}, finished=["a", "never seen"]))
    assert states.row_of == {}


def test_extending():
    states = RequestStates(max_num_seqs=2, max_model_len=20, block_size=B)
    states.apply(step({}, [new("a", [1, 2, 3, 4], [6])]))
    states.apply(step({}, cached=[CachedRequestData("a", [5], [2], 4)]))
    states.apply(step({}, cached=[CachedRequestData("a", [6, 7], [], 5)]))
    row = states.row_of["a"]
    assert states.token_ids[row, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert states.block_ids[row, :3].tolist() == [6, 2, -1]
    assert (states.num_tokens[row], states.num_computed_tokens[row], states.num_blocks[row]) == (7, 5, 2)
    assert states.num_prompt_tokens[row] == 4


def test_a_table_has_room_for_max_model_len():
    for max_model_len in range(1, 3 * B + 1):
        states = RequestStates(1, max_model_len, B)
        blocks = list(range(-(-max_model_len // B)))
        states.apply(step({}, [new("a", [1] * max_model_len, blocks)]))
        assert states.block_ids[0].tolist() == blocks


# ---------------------------------------------------------------- the batch

REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=6
)


@given(requests=REQUESTS, block_size=st.integers(1, 9), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_batch_against_plain_python(requests: list[tuple[int, int, int]], block_size: int, shuffle):
    states = RequestStates(len(requests) + 1, 60, block_size)
    blocks = list(range(100, 600))
    shuffle.shuffle(blocks)
    tables, tokens, added = {}, {}, []
    for i, (computed, scheduled, left) in enumerate(requests):
        name, num_tokens = f"r{i}", computed + scheduled + left
        tables[name] = [blocks.pop() for _ in range(-(-num_tokens // block_size))]
        tokens[name] = [1000 * i + p for p in range(num_tokens)]
        added.append(new(name, tokens[name], tables[name], computed))
    order = list(range(len(requests)))
    shuffle.shuffle(order)
    scheduled = {f"r{i}": requests[i][1] for i in order}
    output = step(scheduled, added)
    states.apply(output)
    batch = GlobalBatch.build(states, output, KVOwnership(block_size), 0)

    expected_tokens, expected_positions, expected_slots, starts = [], [], [], [0]
    for name, count in scheduled.items():
        first = requests[int(name[1:])][0]
        for p in range(first, first + count):
            expected_tokens.append(tokens[name][p])
            expected_positions.append(p)
            expected_slots.append(tables[name][p // block_size] * block_size + p % block_size)
        starts.append(starts[-1] + count)
    assert batch.request_ids == list(scheduled)
    assert batch.token_ids.tolist() == expected_tokens
    assert batch.positions.tolist() == expected_positions
    assert batch.slot_mapping.tolist() == expected_slots
    assert batch.query_start_loc.tolist() == starts
    assert batch.is_prefill.all()
    assert batch.sampled.tolist() == [k for k, i in enumerate(order) if requests[i][2] == 0]
    assert batch.rows.tolist() == [states.row_of[name] for name in scheduled]


def test_class_is_state_and_not_shape():
    states = RequestStates(4, 40, B)
    added = [
        new("first token of a prompt of one", [1], [0]),
        new("last token of a prompt", [1] * 9, [1, 2, 3], computed=8),
        new("decode", [1] * 9, [4, 5, 6], computed=8, num_prompt_tokens=8, num_prefill_tokens=8),
        new("resumed", [1] * 9, [7, 8, 9], computed=8, num_prompt_tokens=5, num_prefill_tokens=9),
    ]
    output = step({data.request_id: 1 for data in added}, added)
    states.apply(output)
    batch = GlobalBatch.build(states, output, ONE_RANK, 0)
    assert batch.is_prefill.tolist() == [True, True, False, True]
    assert batch.sampled.tolist() == [0, 1, 2, 3]


def test_no_requests():
    states = RequestStates(2, 40, B)
    batch = GlobalBatch.build(states, step({}), ONE_RANK, 0)
    assert batch.query_start_loc.tolist() == [0]
    assert batch.token_ids.size == batch.slot_mapping.size == batch.sampled.size == 0


def test_what_must_never_happen_is_noticed():
    states = RequestStates(2, 40, B)
    states.apply(step({}, [new("a", [1] * 6, [3])]))
    with pytest.raises(AssertionError, match="no block"):
        GlobalBatch.build(states, step({"a": 5}), ONE_RANK, 0)
    states.apply(step({}, [new("b", [1] * 3, [4])]))
    with pytest.raises(AssertionError, match="known tokens"):
        GlobalBatch.build(states, step({"b": 4}), ONE_RANK, 0)
    with pytest.raises(AssertionError):
        states.apply(step({}, [new("a", [1], [5])]))


# ---------------------------------------------------------------- the exchange


@given(
    decode_tokens=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    data=st.data(),
    kv_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    hidden_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 7)),
)
@settings(max_examples=80)
def test_exchange_layout(decode_tokens: list[int], data, kv_dtype, hidden_dtype, dims: tuple[int, int, int]):
    size = len(decode_tokens)
    rank_of = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=9)), dtype=np.int64)
    num_layers, token_dim, hidden_size = dims
    cache = torch.empty(num_layers, 2, B, token_dim, dtype=kv_dtype)
    hidden = torch.empty(3, hidden_size, dtype=hidden_dtype)
    layout = ExchangeLayout.of(np.array(decode_tokens), rank_of, cache, hidden)
    rows = [int((rank_of == rank).sum()) for rank in range(size)]
    assert layout.hidden_rows.tolist() == rows
    kv_bytes = max(decode_tokens) * num_layers * token_dim * kv_dtype.itemsize
    row_bytes = max(rows) * hidden_size * hidden_dtype.itemsize
    assert layout.num_bytes >= kv_bytes + row_bytes
    assert layout.num_bytes <= kv_bytes + row_bytes + 64, "no more than the padding between the sections"
    assert (layout.num_bytes == 0) == (kv_bytes + row_bytes == 0)
    for rank in range(size):
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        kv, own = layout.views(buffer, rank)
        assert kv.shape == (num_layers, decode_tokens[rank], token_dim)
        assert own.shape == (rows[rank], hidden_size)
        assert (kv.dtype, own.dtype) == (kv_dtype, hidden_dtype)
        kv.fill_(1.0)
        own.fill_(2.0)
        assert (kv == 1.0).all(), "the sections do not overlap"
        again = layout.views(buffer.clone(), rank)
        assert torch.equal(again[0], kv)
        assert torch.equal(again[1], own)
