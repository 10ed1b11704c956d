"""A ModelConfig without a checkpoint, for what only counts or plans."""

from __future__ import annotations

from typing import Any

from prefold.config import MLAConfig, ModelConfig, RopeConfig


def mla_model_config(
    num_layers: int = 4, max_position_embeddings: int = 8192, mla: MLAConfig | None = None, **fields: Any
) -> ModelConfig:
    """A small DeepSeek-V3. With `moe` all layers but the first have experts.

    Args:
        mla: by default a rank of 8, and 4 dimensions of each other kind.
        fields: ModelConfig's, in place of those chosen here.
    """
    mla = mla or MLAConfig(None, 8, 4, 4, 4)
    has_experts = fields.get("moe") is not None
    chosen: dict[str, Any] = {
        "path": "",
        "architecture": "DeepseekV3ForCausalLM",
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "rms_norm_eps": 1e-6,
        "qk_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope": RopeConfig("default", 1e4, mla.qk_rope_head_dim, max_position_embeddings, True),
        "softmax_scale": 1.0,
        "moe": None,
        "moe_layers": tuple(has_experts and layer > 0 for layer in range(num_layers)),
        "dtype": "float32",
    }
    chosen |= fields
    return ModelConfig(
        num_layers=num_layers, max_position_embeddings=max_position_embeddings, mla=mla, **chosen
    )
