"""From a Hugging Face checkpoint's config.json to a `ModelConfig`. Imports no torch.

config.json is read directly: published checkpoints name model types that transformers does not
know (Kimi-K2) and keys that it drops, and the command line should not wait for transformers. What
a key means, and its value where it is absent, follows transformers 5.24.
"""

from prefold.hf_config.load import (
    GQA_ARCHITECTURES,
    MLA_ARCHITECTURES,
    SPARSE_ARCHITECTURES,
    SUPPORTED_ARCHITECTURES,
    load_model_config,
)
from prefold.hf_config.rope import ROPE_TYPES

__all__ = [
    "GQA_ARCHITECTURES",
    "MLA_ARCHITECTURES",
    "ROPE_TYPES",
    "SPARSE_ARCHITECTURES",
    "SUPPORTED_ARCHITECTURES",
    "load_model_config",
]
