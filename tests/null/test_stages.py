"""Layers to stages: against trying every split."""

import doctest
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefold.config import DSAConfig, MLAConfig, MoEConfig
from prefold.distributed import stages
from prefold.distributed.stages import TYPICAL_TOKENS, split_costs, split_layers
from prefold.flops import layer_flops
from prefold.testing.model_config import mla_model_config

MODEL = mla_model_config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=256,
    num_layers=7,
    num_heads=4,
    mla=MLAConfig(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    moe=MoEConfig(64, 4, 32, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.0),
)


def test_worked_example():
    result = doctest.testmod(stages)
    assert result.attempted > 0
    assert result.failed == 0


def every_split(num_layers: int, num_stages: int):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield [range(start, end) for start, end in itertools.pairwise([0, *cuts, num_layers])]


@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=9), data=st.data())
def test_no_split_has_a_cheaper_costliest_stage_or_is_more_even(costs: list[int], data: st.DataObject):
    num_stages = data.draw(st.integers(1, len(costs)))

    def badness(split: list[range]) -> tuple[int, int]:
        sums = [sum(costs[stage.start : stage.stop]) for stage in split]
        return max(sums), sum(cost**2 for cost in sums)

    split = split_costs(costs, num_stages)
    assert [layer for stage in split for layer in stage] == list(range(len(costs)))
    assert len(split) == num_stages
    assert all(split)
    assert badness(split) == min(map(badness, every_split(len(costs), num_stages)))


def test_the_costliest_stage_counts_before_evenness():
    """[6, 2, 3] has the smaller squares, [1, 5, 5] the cheaper costliest stage."""
    assert split_costs([1, 5, 2, 3], 3) == [range(1), range(1, 2), range(2, 4)]
    assert split_costs([3, 2, 5, 1], 3) == [range(2), range(2, 3), range(3, 4)]


@pytest.mark.parametrize("pp", range(1, 8))
def test_every_layer_is_in_one_stage(pp: int):
    split = split_layers(MODEL, pp)
    assert len(split) == pp
    assert [layer for stage in split for layer in stage] == list(range(7))
    assert split_layers(MODEL, pp) == split


def test_equal_layers_are_dealt_evenly():
    dense = replace(MODEL, moe=None, moe_layers=(False,) * 7, vocab_size=10)
    assert [len(stage) for stage in split_layers(dense, 7)] == [1] * 7
    assert sorted(len(stage) for stage in split_layers(dense, 3)) == [2, 2, 3]
    assert sorted(len(stage) for stage in split_layers(replace(dense, num_layers=6), 3)) == [2, 2, 2]


def test_a_costly_layer_leaves_its_stage_fewer_others():
    costly_first = replace(MODEL, intermediate_size=16384)
    first, last = split_layers(costly_first, 2)
    assert layer_flops(costly_first, 0, TYPICAL_TOKENS).total > layer_flops(
        costly_first, 1, TYPICAL_TOKENS
    ).total * len(last)
    assert (first, last) == (range(1), range(1, 7))


def test_only_active_experts_count():
    assert MODEL.moe is not None
    many = replace(MODEL, moe=replace(MODEL.moe, num_experts=640))
    more = layer_flops(many, 1, TYPICAL_TOKENS).total - layer_flops(MODEL, 1, TYPICAL_TOKENS).total
    assert more == 2 * TYPICAL_TOKENS * MODEL.hidden_size * (640 - 64)  # the router's


def test_the_head_weighs_as_one_row():
    """A vocabulary of a million is little against 8192 tokens of a layer."""
    dense = replace(MODEL, num_layers=8, moe=None, moe_layers=(False,) * 8, vocab_size=10**6)
    assert [len(stage) for stage in split_layers(dense, 4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("pp", [0, 8, 100])
def test_more_stages_than_layers(pp: int):
    message = f"pipeline_parallel_size={pp} must be between 1 and num_hidden_layers=7"
    with pytest.raises(ValueError, match=message):
        split_layers(MODEL, pp)


def test_deepseek_v3_in_a_moment():
    """61 layers of which 3 are dense, over any number of stages."""
    big = replace(
        MODEL,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=61,
        num_heads=128,
        mla=MLAConfig(1536, 512, 128, 64, 128),
        moe=MoEConfig(256, 8, 2048, 1, 8, 4, "sigmoid", "noaux_tc", True, 2.5),
        moe_layers=(False,) * 3 + (True,) * 58,
        vocab_size=129280,
    )
    for pp in (1, 2, 4, 8, 16, 61):
        lengths = [len(stage) for stage in split_layers(big, pp)]
        assert sum(lengths) == 61
        assert max(lengths) - min(lengths) <= 1


def test_a_stage_begins_with_an_indexer():
    """Layers that share a selection stay with the layer that makes it."""
    full = (True, True, False, False, True, False, True)
    model = replace(
        MODEL,
        mla=replace(MODEL.mla, q_lora_rank=16, dsa=DSAConfig(64, 4, 8, full, rope_interleaved=True)),
    )
    for pp in range(1, 5):
        split = split_layers(model, pp)
        assert [layer for stage in split for layer in stage] == list(range(7))
        assert all(full[stage.start] for stage in split)
    assert split_layers(model, 4) == [range(1), range(1, 4), range(4, 6), range(6, 7)]
    with pytest.raises(ValueError, match="pipeline_parallel_size=5 must be between 1 and 4, the number of"):
        split_layers(model, 5)
