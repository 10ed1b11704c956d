"""Keys of the architectures with sparse attention: DeepSeek-V3.2, GLM-5. The others are those of MLA."""

from __future__ import annotations

from typing import Any

from prefold.config import DSAConfig
from prefold.hf_config.reader import Reader

DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    "GlmMoeDsaForCausalLM": {
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
    },
}


def read_dsa(get: Reader, architecture: str) -> DSAConfig:
    """DeepSeek-V3.2 has an indexer in every layer; GLM's configs say in which."""
    num_layers = get.size("num_hidden_layers")
    is_glm = architecture == "GlmMoeDsaForCausalLM"
    dsa = DSAConfig(
        index_topk=get.size("index_topk"),
        num_heads=get.size("index_n_heads"),
        head_dim=get.size("index_head_dim"),
        full_layers=_full_layers(get.raw, num_layers) if is_glm else (True,) * num_layers,
        rope_interleaved=is_glm,
    )
    if get("q_lora_rank") is None:
        raise ValueError(f"{architecture} needs q_lora_rank: the indexer makes its queries from that latent")
    rope_dim = get.size("qk_rope_head_dim", minimum=2)
    if dsa.head_dim < rope_dim:
        raise ValueError(
            f"index_head_dim={dsa.head_dim} is below qk_rope_head_dim={rope_dim}, the part that is rotated"
        )
    return dsa


def _full_layers(raw: dict, num_layers: int) -> tuple[bool, ...]:
    """Which layers have an indexer: as listed, by a pattern of F and S, or every `index_topk_freq`-th one
    after the first `index_skip_topk_offset`.

    >>> _full_layers({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 8)
    (True, True, True, False, False, False, True, False)
    """
    types = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if types is None:
        freq, offset = max(raw.get("index_topk_freq", 1), 1), raw.get("index_skip_topk_offset", 2)
        return tuple(max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers))
    names = {"F": "full", "S": "shared"}
    types = [names.get(kind, kind) for kind in types]
    if len(types) < num_layers or not set(types) <= {"full", "shared"} or types[0] != "full":
        raise ValueError(
            "indexer_types (or index_topk_pattern) must name 'full' or 'shared' for each of "
            f"{num_layers} layers, the first of them 'full': {types}"
        )
    return tuple(kind == "full" for kind in types[:num_layers])
