"""Which layouts are legal: the list, the check and the explanations agree, and say the numbers."""

import doctest
import itertools
import re
from dataclasses import replace

import pytest

from prefold.config import DSAConfig, MLAConfig, ModelConfig, MoEConfig, ParallelConfig
from prefold.distributed import layouts
from prefold.distributed.layouts import (
    check_context_attention,
    check_layout,
    check_world,
    describe_layout,
    explain_illegal,
    fullest_kv_spec,
    kv_head_repetition,
    layout_options,
    legal_dcp_sizes,
    legal_layouts,
    legal_tensor_parallel_sizes,
)
from prefold.testing.model_config import mla_model_config
from prefold.traffic import experts_of

MOE = MoEConfig(10, 2, 6, 2, 1, 1, "sigmoid", "noaux_tc", True, 1.0)
MODEL = mla_model_config(
    num_layers=5,
    num_heads=12,
    mla=MLAConfig(q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4),
    moe=MOE,
    max_position_embeddings=128,
)
"""12 heads, dense MLP 24, experts of 6, shared experts of 12: TP 4 and 12 only with EP."""

DENSE = replace(MODEL, moe=None, moe_layers=(False,) * 5)
NARROW = replace(MODEL, moe=replace(MOE, num_shared_experts=1))
"""Its shared expert of 6 forbids TP 4 under EP too."""
SPARSE = replace(MODEL, moe=replace(MOE, num_shared_experts=0), moe_layers=(True,) * 5, intermediate_size=7)

each_model = pytest.mark.parametrize(
    "model", [MODEL, NARROW, DENSE, SPARSE], ids=["mixed", "narrow", "dense", "all sparse"]
)


def test_worked_examples():
    result = doctest.testmod(layouts)
    assert result.attempted > 0
    assert result.failed == 0


def violations(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """What is wrong, by the rules as people state them; what a message must name."""
    tp, pcp, dcp = (
        parallel.tensor_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    pp, ep = parallel.pipeline_parallel_size, parallel.enable_expert_parallel
    dense, sparse = not all(model.moe_layers), any(model.moe_layers)
    wrong = []
    if ep and not sparse:
        wrong.append("enable_expert_parallel=True .*n_routed_experts=0")
    if model.num_heads % tp:
        wrong.append(f"num_attention_heads=12 is not divisible by tensor_parallel_size={tp};.*legal.*: 1, ")
    if dense and model.intermediate_size % tp:
        wrong.append(f"^intermediate_size=24 is not divisible by tensor_parallel_size={tp};.*legal.*: 1, ")
    if sparse and not ep and 6 % tp:
        wrong.append(f"moe_intermediate_size=6 is not divisible by tensor_parallel_size={tp};.*legal.*: 1, ")
    shared = 6 * model.moe.num_shared_experts if sparse else 0
    if ep and shared % tp:
        wrong.append(
            f"n_shared_experts={shared} is not divisible by tensor_parallel_size={tp};.*legal.*: 1, "
        )
    if pp > model.num_layers:
        wrong.append(f"pipeline_parallel_size={pp} must be between 1 and num_hidden_layers=5")
    if pcp % dcp and (dcp % pcp or tp % (dcp // pcp)):
        wrong.append(
            f"decode_context_parallel_size={dcp} .*prefill_context_parallel_size={pcp}.*"
            f"tensor_parallel_size={tp}.*legal: 1"
        )
    return wrong


@pytest.mark.parametrize(
    "model", [MODEL, NARROW, DENSE, SPARSE], ids=["mixed", "narrow", "dense", "all sparse"]
)
def test_what_is_listed_is_legal_and_nothing_else(model: ModelConfig):
    """Every tuple up to 16 ranks: in the list and accepted, or refused with its numbers."""
    sizes = range(1, 17)
    listed = {world: {layout.parallel for layout in legal_layouts(model, world)} for world in sizes}
    seen = 0
    for dp, pp, pcp, tp in itertools.product(sizes, repeat=4):
        if dp * pp * pcp * tp > 16:
            continue
        for dcp, ep in itertools.product(range(1, 18), (False, True)):
            parallel = ParallelConfig(tp, pcp, dcp, pp, dp, ep)
            wrong = violations(model, parallel)
            assert (parallel in listed[parallel.world_size]) == (not wrong)
            if not wrong:
                seen += 1
                check_layout(model, parallel, block_size=1)
                continue
            with pytest.raises(ValueError, match="=") as refusal:
                check_layout(model, parallel, block_size=1)
            assert any(re.search(what, str(refusal.value)) for what in wrong), (wrong, str(refusal.value))
    assert seen == sum(map(len, listed.values()))
    assert all(len(set(group)) == len(group) for group in map(list, listed.values()))


def test_expert_parallelism_frees_tp_from_the_width_of_an_expert():
    assert legal_tensor_parallel_sizes(MODEL) == [1, 2, 3, 6]
    assert legal_tensor_parallel_sizes(MODEL, expert_parallel=True) == [1, 2, 3, 4, 6, 12]
    assert legal_tensor_parallel_sizes(DENSE) == [1, 2, 3, 4, 6, 12]
    message = (
        r"moe_intermediate_size=6 .*legal for this model: 1, 2, 3, 6\. With enable_expert_parallel.* 4 is"
    )
    with pytest.raises(ValueError, match=message):
        check_layout(MODEL, ParallelConfig(4), block_size=1)
    check_layout(MODEL, ParallelConfig(4, enable_expert_parallel=True), block_size=1)


def test_dcp_sizes():
    assert legal_dcp_sizes(MODEL, pcp=4, tp=1) == [1, 2, 4]
    assert legal_dcp_sizes(MODEL, pcp=2, tp=6) == [1, 2, 4, 6, 12]
    assert legal_dcp_sizes(MODEL, pcp=1, tp=4) == [1, 2, 4]
    assert kv_head_repetition(MODEL, 4) == 4
    with pytest.raises(ValueError, match=r"context_parallel_size=4 .*_size=1,.*_size=2 .*legal: 1, 2$"):
        check_layout(MODEL, ParallelConfig(2, 1, 4), block_size=1)


def test_kv_heads_that_are_not_repeated_bound_dcp(monkeypatch: pytest.MonkeyPatch):
    """As with grouped queries: 2 KV heads over TP 4 are each on two ranks."""
    monkeypatch.setattr(layouts, "kv_head_repetition", lambda model, tp: tp // 2)
    assert legal_dcp_sizes(MODEL, pcp=2, tp=4) == [1, 2, 4]
    with pytest.raises(ValueError, match=r"2 \(how many ranks of tensor_parallel_size=4 .*legal: 1, 2, 4$"):
        check_layout(DENSE, ParallelConfig(4, 2, 8), block_size=1)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tensor_parallel_size=0), "tensor_parallel_size=0 must be at least 1"),
        (
            ParallelConfig(decode_context_parallel_size=-1),
            "decode_context_parallel_size=-1 must be at least 1",
        ),
        (ParallelConfig(data_parallel_size=0), "data_parallel_size=0 must be at least 1"),
        (ParallelConfig(cp_kv_cache_interleave_size=0), "cp_kv_cache_interleave_size=0 must be at least 1"),
        (
            ParallelConfig(cp_kv_cache_interleave_size=3),
            "cp_kv_cache_interleave_size=3 does not divide block_size=8; legal: 1, 2, 4, 8",
        ),
        (
            ParallelConfig(cp_kv_cache_interleave_size=16),
            "cp_kv_cache_interleave_size=16 does not divide block_size=8",
        ),
        (
            ParallelConfig(2, 3, nnodes=4),
            "world = DP x PP x PCP x TP = 1 x 1 x 3 x 2 = 6 is not divisible by nnodes=4",
        ),
    ],
)
def test_other_sizes(parallel: ParallelConfig, message: str):
    with pytest.raises(ValueError, match=message):
        check_layout(MODEL, parallel, block_size=8)


def test_interleaves_and_nodes_that_divide():
    for interleave in (1, 2, 4, 8):
        check_layout(MODEL, ParallelConfig(cp_kv_cache_interleave_size=interleave), block_size=8)
    for nodes in (1, 2, 3, 6):
        check_layout(MODEL, ParallelConfig(2, 3, nnodes=nodes), block_size=8)


def test_the_world_is_the_product():
    check_world(ParallelConfig(2, 3, 1, 2, 5), 60)
    with pytest.raises(ValueError, match="= 5 x 2 x 3 x 2 = 60, but there are 8 ranks"):
        check_world(ParallelConfig(2, 3, 1, 2, 5), 8)
    with pytest.raises(ValueError, match="world=0"):
        legal_layouts(MODEL, 0)


def test_what_a_rank_holds_by_hand():
    layout = describe_layout(MODEL, ParallelConfig(2, 2, 2, 2, 1, True))
    assert (layout.kv_shards, layout.kv_copies) == (2, 2)
    assert layout.experts_per_rank == (2, 3)  # 10 over PCP 2 x TP 2
    assert (layout.expert_width, layout.heads_per_rank) == (6, 6)
    assert sorted(layout.layers_per_stage) == [2, 3]
    assert layout.kv_bytes_per_token == 3 * 7 * 4 // 2
    without = describe_layout(MODEL, ParallelConfig(2, 2))
    assert (without.experts_per_rank, without.expert_width) == ((10, 10), 3)
    assert (without.kv_shards, without.kv_copies, without.kv_bytes_per_token) == (1, 4, 5 * 7 * 4)
    assert describe_layout(DENSE, ParallelConfig(2)).experts_per_rank == (0, 0)
    # More ranks than experts: some hold none.
    assert describe_layout(MODEL, ParallelConfig(1, 12, enable_expert_parallel=True)).experts_per_rank == (
        0,
        1,
    )
    assert describe_layout(MODEL, ParallelConfig(1, 2, 1, 1, 2, True)).experts_per_rank == (2, 3)


def test_experts_of_a_layout_are_those_that_ranks_get():
    for world in range(1, 17):
        for layout in legal_layouts(MODEL, world):
            parallel = layout.parallel
            spread = (
                parallel.data_parallel_size * parallel.plane_size if parallel.enable_expert_parallel else 1
            )
            held = [len(experts_of(place, 10, spread)) for place in range(spread)]
            assert layout.experts_per_rank == (min(held), max(held))


def test_weights_by_hand():
    one = describe_layout(DENSE, ParallelConfig())
    # kv_a 16x7, kv_b 5x12x7, o 48x16, q 16x60; MLP 3 of 16x24; table and head 100x16
    whole, split = 16 * 7, 5 * 12 * 7 + 48 * 16 + 16 * 60 + 3 * 16 * 24
    assert one.weight_bytes == 4 * (5 * (whole + split) + 2 * 1600)
    assert describe_layout(DENSE, ParallelConfig(2)).weight_bytes == 4 * (5 * (whole + split // 2) + 1600)
    assert describe_layout(DENSE, ParallelConfig(1, 4, 4)).weight_bytes == one.weight_bytes
    tied = describe_layout(replace(DENSE, tie_word_embeddings=True), ParallelConfig())
    assert one.weight_bytes - tied.weight_bytes == 4 * 1600
    # Of 5 sparse layers with 10 experts of 288 weights, EP 4 leaves at most 3 on a rank.
    spread = describe_layout(SPARSE, ParallelConfig(1, 4, enable_expert_parallel=True))
    assert describe_layout(SPARSE, ParallelConfig(1, 4)).weight_bytes - spread.weight_bytes == 4 * 5 * 7 * 288


def test_kv_of_the_fullest_stage():
    spec = fullest_kv_spec(MODEL, ParallelConfig(pipeline_parallel_size=3), block_size=4)
    assert (spec.num_layers, spec.row_bytes, spec.block_size) == (2, 7 * 4, 4)


# Explanations


@pytest.mark.parametrize(
    "model", [MODEL, NARROW, DENSE, SPARSE], ids=["mixed", "narrow", "dense", "all sparse"]
)
def test_what_is_explained_is_illegal(model: ModelConfig):
    for world in range(1, 17):
        legal = {layout.parallel for layout in legal_layouts(model, world)}
        refusals = explain_illegal(model, world)
        assert refusals
        assert len({refusal.parallel for refusal in refusals}) == len(refusals)
        for refusal in refusals:
            assert refusal.parallel not in legal
            assert "=" in refusal.reason


def test_what_people_try_on_eight_ranks():
    even = replace(MODEL, num_heads=16, intermediate_size=32, moe=replace(MOE, intermediate_size=8))
    reasons = {layout_options(r.parallel): r.reason for r in explain_illegal(even, 8)}
    assert set(reasons) == {"-tp 8 -pcp 8", "-ep", "-dcp 8", "-pcp 8 -dcp 3", "-tp 8 -dcp 16", "-pp 8"}
    both = reasons["-tp 8 -pcp 8"]
    assert "1 x 1 x 8 x 8 = 64, but there are 8 ranks" in both
    assert "TP and PCP multiply" in both
    assert "TP 1, PCP 8, EP: -pcp 8 -ep" in both
    check_layout(even, ParallelConfig(1, 8, enable_expert_parallel=True), 1)
    assert "EP adds no ranks" in reasons["-ep"]
    assert "DCP adds no ranks" in reasons["-dcp 8"]
    assert "legal: 1, 2, 4, 8" in reasons["-pcp 8 -dcp 3"]
    assert "8 must be between 1 and num_hidden_layers=5" in reasons["-pp 8"]


def test_what_people_try_elsewhere():
    reasons = {layout_options(r.parallel): r.reason for r in explain_illegal(DENSE, 8)}
    assert "n_routed_experts=0" in reasons["-pcp 8 -ep"]
    assert "All 8 ranks on one prompt is -pcp 8" in reasons["-tp 8 -pcp 8"]
    assert "num_attention_heads=12 is not divisible by tensor_parallel_size=8" in reasons["-tp 8"]
    reasons = {layout_options(r.parallel): r.reason for r in explain_illegal(MODEL, 8)}
    assert "moe_intermediate_size=6 is not divisible" in reasons["-tp 4 -pcp 2"]
    reasons = {layout_options(r.parallel): r.reason for r in explain_illegal(MODEL, 2)}
    assert "legal: 1, 2" in reasons["-tp 2 -dcp 4"]


def test_sparse_attention_has_every_layout():
    dsa = DSAConfig(64, 4, 8, (True, False, True, False, True), rope_interleaved=True)
    model = replace(MODEL, mla=replace(MODEL.mla, q_lora_rank=16, dsa=dsa))
    assert legal_dcp_sizes(model, pcp=4, tp=2) == [1, 2, 4, 8]
    check_layout(model, ParallelConfig(1, 2, 2), block_size=1)
    for dcp, legal in ((1, ("auto", "local")), (2, ("auto", "kv", "query"))):
        parallel = ParallelConfig(1, 2, dcp)
        for way in ("auto", "local", "sliced", "query", "kv"):
            if way in legal:
                check_context_attention(model, parallel, way)
                continue
            message = f"'{way}' is not possible.*index_topk=64.*size={dcp}.*legal: {', '.join(legal)}"
            with pytest.raises(ValueError, match=message):
                check_context_attention(model, parallel, way)
            check_context_attention(MODEL, parallel, way)
    layouts = legal_layouts(model, 4)
    assert {layout.kv_shards for layout in layouts} == {1, 2, 4}
    assert max(len(layout.layers_per_stage) for layout in layouts) == 2
    token_dim = MODEL.mla.token_dim + 8
    assert describe_layout(model, ParallelConfig()).kv_bytes_per_token == 5 * token_dim * 4
