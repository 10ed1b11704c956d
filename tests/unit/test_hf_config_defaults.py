"""What a key means where config.json lacks it: as the transformers classes say."""

import json
from pathlib import Path

import pytest
import transformers

from prefold.hf_config import MLA_ARCHITECTURES, SPARSE_ARCHITECTURES, load_model_config

V2, V3, GLM, MINICPM3 = MLA_ARCHITECTURES

REQUIRED = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5}


@pytest.mark.parametrize("architecture", MLA_ARCHITECTURES + SPARSE_ARCHITECTURES)
def test_absent_keys_mean_what_transformers_takes_them_for(architecture: str, tmp_path: Path):
    raw = {"architectures": [architecture], "num_attention_heads": 8, "dtype": "float32", **REQUIRED}
    if architecture == V2:
        raw["num_experts_per_tok"] = 6  # has no default there
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    theirs = getattr(transformers, architecture).config_class(**raw)
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(config.mla, key) == getattr(theirs, key), key
    for key in ("rms_norm_eps", "tie_word_embeddings", "attention_bias", "max_position_embeddings"):
        assert getattr(config, key) == getattr(theirs, key), key
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    if architecture == MINICPM3:
        assert config.embedding_scale == theirs.scale_emb
        assert config.residual_scale == pytest.approx(theirs.scale_depth / 5**0.5, rel=1e-12)
        assert config.logits_scale == pytest.approx(1 / theirs.logits_scaling, rel=1e-12)
        assert (config.moe, config.rope.interleaved) == (None, False)
        return
    moe = config.moe
    assert moe is not None
    assert moe.num_experts == theirs.n_routed_experts
    assert moe.top_k == theirs.num_experts_per_tok
    assert moe.intermediate_size == theirs.moe_intermediate_size
    assert moe.num_shared_experts == theirs.n_shared_experts
    assert moe.routed_scaling_factor == theirs.routed_scaling_factor
    assert moe.norm_topk_prob == theirs.norm_topk_prob
    assert (moe.n_group, moe.topk_group) == (theirs.n_group or 1, theirs.topk_group or 1)
    assert config.rope.interleaved == getattr(theirs, "rope_interleave", True)
    if architecture in (GLM, *SPARSE_ARCHITECTURES):
        expected = [kind == "sparse" for kind in theirs.mlp_layer_types]
    else:
        expected = [i >= theirs.first_k_dense_replace for i in range(5)]
    assert list(config.moe_layers) == expected
    if architecture == V2:
        assert moe.topk_method == theirs.topk_method
    else:
        assert config.num_nextn_predict_layers == getattr(theirs, "num_mtp_layers", 1)


@pytest.mark.parametrize("architecture", SPARSE_ARCHITECTURES)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 0},
        {"index_topk_freq": 0},
        {"index_topk_pattern": "FSSFF"},
        {"index_topk_pattern": "FSFSF", "index_topk_freq": 4},
        {"indexer_types": ["full", "full", "shared", "full", "shared"], "index_topk_pattern": "FFFFF"},
        {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"]},
        {"index_topk": 64, "index_n_heads": 3, "index_head_dim": 80, "head_dim": 192},
    ],
    ids=str,
)
def test_indexers_are_where_transformers_has_them(architecture: str, keys: dict, tmp_path: Path):
    raw = {"architectures": [architecture], "num_attention_heads": 8, "dtype": "float32", **REQUIRED, **keys}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    theirs = getattr(transformers, architecture).config_class(**raw)
    dsa = config.dsa
    assert dsa is not None
    types = getattr(theirs, "indexer_types", None) or ["full"] * 5
    if architecture == "DeepseekV32ForCausalLM":
        types = ["full"] * 5  # it builds an indexer in every layer, whatever the keys say
    assert [("shared", "full")[full] for full in dsa.full_layers] == types
    assert (dsa.index_topk, dsa.num_heads, dsa.head_dim) == (
        theirs.index_topk,
        theirs.index_n_heads,
        theirs.index_head_dim,
    )
    assert dsa.rope_interleaved == (architecture == "GlmMoeDsaForCausalLM")
    assert config.rope.dim == theirs.head_dim == theirs.qk_rope_head_dim
    assert list(config.moe_layers) == [kind == "sparse" for kind in theirs.mlp_layer_types]
