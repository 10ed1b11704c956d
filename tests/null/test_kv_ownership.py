"""Who holds which token: the formula against dealing tokens out one by one."""

import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefold import kv_ownership, kv_spec
from prefold.kv_ownership import KVOwnership

SMALL = [
    KVOwnership(block_size, dcp_size, interleave)
    for block_size, dcp_size in itertools.product(range(1, 9), range(1, 7))
    for interleave in range(1, block_size + 1)
    if block_size % interleave == 0
]


def deal(ownership: KVOwnership, num_tokens: int) -> list[tuple[int, int, int]]:
    """(rank, virtual block, offset) per position: runs of tokens go round the ranks; when the open blocks of
    all of them are full, each opens another."""
    dealt: list[tuple[int, int, int]] = []
    block, rank, run = 0, 0, 0
    filled = [0] * ownership.dcp_size
    for _ in range(num_tokens):
        if run == ownership.interleave:
            rank, run = (rank + 1) % ownership.dcp_size, 0
        if all(count == ownership.block_size for count in filled):
            block, filled = block + 1, [0] * ownership.dcp_size
        dealt.append((rank, block, filled[rank]))
        filled[rank] += 1
        run += 1
    return dealt


@pytest.mark.parametrize("module", [kv_ownership, kv_spec])
def test_worked_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("ownership", SMALL, ids=str)
def test_slots_are_those_of_dealing_tokens_out(ownership: KVOwnership):
    block_size, virtual = ownership.block_size, ownership.virtual_block_size
    num_tokens = 3 * virtual + 1
    dealt = deal(ownership, num_tokens)
    positions = np.arange(num_tokens)
    block_table = np.array([7, 2, 9, 4])
    slots = np.stack(
        [
            ownership.slots(positions, block_table[positions // virtual], rank)
            for rank in range(ownership.dcp_size)
        ]
    )
    expected = np.full_like(slots, -1)
    for position, (rank, block, offset) in enumerate(dealt):
        expected[rank, position] = block_table[block] * block_size + offset
    assert slots.tolist() == expected.tolist()
    # The union of the ranks' slots is all tokens, and no two tokens share one.
    assert ((slots >= 0).sum(axis=0) == 1).all()
    for rank_slots in slots:
        held = rank_slots[rank_slots >= 0]
        assert len(np.unique(held)) == len(held)
    # Whole virtual blocks fill every slot of theirs on every rank.
    whole = slots[:, : 3 * virtual]
    for rank_slots in whole:
        every_slot = (block_table[:3, None] * block_size + np.arange(block_size)).ravel()
        assert sorted(rank_slots[rank_slots >= 0]) == sorted(every_slot)


@pytest.mark.parametrize("ownership", SMALL, ids=str)
def test_local_lengths_count_the_dealt_tokens(ownership: KVOwnership):
    num_tokens = 2 * ownership.virtual_block_size + 3
    counts = np.zeros((num_tokens + 1, ownership.dcp_size), int)
    for position, (rank, block, offset) in enumerate(deal(ownership, num_tokens)):
        counts[position + 1] = counts[position]
        counts[position + 1, rank] += 1
        assert ownership.owner(position) == rank
        # A rank's n-th token is at offset n % B of its block n // B.
        assert ownership.local_index(position) == block * ownership.block_size + offset
        assert ownership.local_index(position) == counts[position, rank]
    assert ownership.local_lengths(range(num_tokens + 1)).tolist() == counts.tolist()


def test_local_lengths_by_hand():
    of_four = KVOwnership(block_size=4, dcp_size=4)
    assert of_four.local_lengths([1, 3, 4, 8, 9, 25]).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [2, 2, 2, 2],
        [3, 2, 2, 2],
        [7, 6, 6, 6],
    ]
    wide = KVOwnership(block_size=128, dcp_size=2, interleave=128)
    assert wide.local_lengths([127, 128, 129, 257]).tolist() == [[127, 0], [128, 0], [128, 1], [129, 128]]
    # The interleave may be smaller than a block, and then lies across none.
    assert KVOwnership(128, 2, 64).local_lengths([127, 129, 257]).tolist() == [[64, 63], [65, 64], [129, 128]]


def test_bounds_of_a_row_are_localised_token_by_token():
    """Three tokens that end at 10: rank 1's bound of the last one is not its bound of the first plus 2."""
    lengths = KVOwnership(block_size=4, dcp_size=2).local_lengths([8, 9, 10])
    assert lengths[:, 0].tolist() == [4, 5, 5]
    assert lengths[:, 1].tolist() == [4, 4, 5]


@st.composite
def ownerships(draw: st.DrawFn) -> KVOwnership:
    interleave = draw(st.integers(1, 256))
    return KVOwnership(interleave * draw(st.integers(1, 8)), draw(st.integers(1, 64)), interleave)


@given(ownership=ownerships(), position=st.integers(0, 2**40))
def test_length_and_index_agree(ownership: KVOwnership, position: int):
    """Also beyond 32 bits: a position's index is the number of tokens its owner holds before it."""
    owner = int(ownership.owner(position))
    before, after = ownership.local_lengths([position, position + 1])
    assert ownership.local_index(position) == before[owner]
    step = after - before
    assert step[owner] == 1
    assert step.sum() == 1
    assert before.sum() == position
    assert before.max() - before.min() <= ownership.interleave
    assert (before[:-1] >= before[1:]).all()


@given(ownership=ownerships(), seq_lens=st.lists(st.integers(0, 10**6), max_size=6))
def test_shapes_of_any_kind(ownership: KVOwnership, seq_lens: list[int]):
    lengths = ownership.local_lengths(np.array(seq_lens, np.int32).reshape(-1, 1))
    assert lengths.shape == (len(seq_lens), 1, ownership.dcp_size)
    assert lengths.dtype == np.int64
    assert lengths.sum(axis=-1).ravel().tolist() == seq_lens
    assert ownership.slots(np.zeros((2, 0)), np.zeros((2, 0)), rank=0).shape == (2, 0)


def test_a_slot_beyond_32_bits():
    ownership = KVOwnership(block_size=128, dcp_size=2)
    assert ownership.slots(np.array([1], np.int32), np.array([2**31 - 1], np.int32), rank=1) == [
        (2**31 - 1) * 128
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 2, 3), "cp_kv_cache_interleave_size=3 does not divide block_size=4"),
        ((4, 2, 8), "cp_kv_cache_interleave_size=8 does not divide block_size=4"),
        ((0, 1, 1), "block_size=0"),
        ((4, 0, 1), "dcp_size=0"),
        ((4, 1, 0), "interleave=0"),
    ],
)
def test_sizes_that_cannot_be(sizes: tuple[int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        KVOwnership(*sizes)
