"""FLOP counts against counts made by hand from a model small enough to do so."""

from dataclasses import replace

import pytest

from prefold.config import DSAConfig, MLAConfig, MoEConfig
from prefold.flops import prefill_flops
from prefold.testing.model_config import mla_model_config

MOE = MoEConfig(8, 2, 6, 1, 1, 1, "sigmoid", "noaux_tc", True, 1.0)
MODEL = mla_model_config(
    hidden_size=10,
    intermediate_size=20,
    num_layers=1,
    mla=MLAConfig(q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4),
    moe=MOE,
    moe_layers=(False,),
    max_position_embeddings=128,
)


def test_one_dense_layer_by_hand():
    # q 10x10, kv_a 10x7, kv_b 5x14, o 8x10, MLP 3 of 10x20
    per_token = 100 + 70 + 70 + 80 + 600
    flops = prefill_flops(MODEL, num_tokens=3)
    assert flops.matmul == 2 * 3 * per_token + 2 * 10 * 100
    # 1 + 2 + 3 pairs, two heads, keys of 5 and values of 4
    assert flops.attention == 2 * 6 * 2 * (5 + 4)
    assert flops.total == flops.matmul + flops.attention


def test_q_lora_and_experts_by_hand():
    mla = replace(MODEL.mla, q_lora_rank=4)
    model = replace(MODEL, mla=mla, num_layers=2, moe_layers=(False, True))
    attention = 10 * 4 + 4 * 10 + 70 + 70 + 80
    # three of 10x6 for each of 2 + 1 experts, and the router's 10x8
    expert_layer = 3 * 60 * 3 + 80
    flops = prefill_flops(model, num_tokens=7)
    assert flops.matmul == 2 * 7 * (2 * attention + 600 + expert_layer) + 2000
    assert flops.attention == 2 * 2 * 2 * 9 * 28


@pytest.mark.parametrize("cut", [1, 2, 5, 9])
def test_chunks_add_up_to_the_whole(cut: int):
    """But for the head, which each chunk's last token would meet."""
    first, second = prefill_flops(MODEL, cut), prefill_flops(MODEL, 10 - cut, num_computed=cut)
    whole = prefill_flops(MODEL, 10)
    assert first.attention + second.attention == whole.attention
    assert first.matmul + second.matmul - 2 * 10 * 100 == whole.matmul


def test_the_speed_model_at_4k_is_what_was_counted_before():
    """Attention of the model that speed is measured with, at 4,096 tokens: 0.69e12."""
    mla = MLAConfig(512, 512, 128, 64, 128)
    model = replace(MODEL, mla=mla, num_layers=8, num_heads=16, hidden_size=1024, moe_layers=(False,) * 8)
    assert prefill_flops(model, 4096).attention == pytest.approx(0.687e12, rel=1e-3)


def test_sparse_attention_by_hand():
    """Two layers, the first with an indexer of 2 heads of 4; 5 tokens, of which 3 keys at most are seen."""
    dsa = DSAConfig(index_topk=3, num_heads=2, head_dim=4, full_layers=(True, False), rope_interleaved=True)
    model = replace(
        MODEL, mla=replace(MODEL.mla, q_lora_rank=4, dsa=dsa), num_layers=2, moe_layers=(False,) * 2
    )
    flops = prefill_flops(model, 5)
    attention = 10 * 4 + 4 * 10 + 70 + 70 + 80
    indexer = 4 * 8 + 10 * 4 + 10 * 2
    assert flops.matmul == 2 * 5 * (2 * (attention + 600) + indexer) + 2000
    # 1 + 2 + 3 + 4 pairs with keys of 5 and values of 4; then 3 with rows of 7 and values of 5, where 5 of
    # the others would take 45; all 15 are scored.
    assert flops.attention == 2 * (2 * 2 * (10 * 9 + 3 * 12) + 15 * 2 * (4 + 1))
    parts = [prefill_flops(model, n, start).attention for start, n in ((0, 2), (2, 2), (4, 1))]
    assert sum(parts) == flops.attention
