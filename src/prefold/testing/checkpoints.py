"""Random checkpoints in Hugging Face format, written through transformers' own classes.

Weights are scaled so that attention, routing and the order of tokens matter: tokens of a greedy
run vary, experts are used unevenly, and a wrong mask or position shows in the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prefold.hf_config import GQA_ARCHITECTURES, SUPPORTED_ARCHITECTURES

BOS, EOS, UNK = "<s>", "</s>", "<unk>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

_TINY_DECODER: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}

TINY: dict[str, Any] = _TINY_DECODER | {
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
"""Configuration of a tiny checkpoint: legal for TP 1, 2, 4 and 8, values narrower than keys."""

TINY_GQA: dict[str, Any] = _TINY_DECODER | {"num_key_value_heads": 2, "head_dim": 12}
"""The same with grouped-query attention: 4 query heads per KV head, more TP than KV heads from 4 on."""

_GROUPED = {"n_group": 4, "topk_group": 2}

_SPARSE = {
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 20,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

_TINY_OF: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
        **_GROUPED,
    },
    "DeepseekV3ForCausalLM": {
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        **_GROUPED,
    },
    # Many index heads, so that few keys have a score of exactly 0. The indexer's pairs and eps differ.
    "DeepseekV32ForCausalLM": {"first_k_dense_replace": 1, **_SPARSE, "n_group": 2, "topk_group": 1},
    "GlmMoeDsaForCausalLM": {
        "first_k_dense_replace": 1,
        # Every second layer shares the selection of the one before.
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        **_SPARSE,
        "n_group": 1,
        "topk_group": 1,
    },
    "Glm4MoeLiteForCausalLM": {"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1},
    "MiniCPM3ForCausalLM": {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": None},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2, "pad_token_id": None},
}

BENCHMARK: dict[str, Any] = {
    "vocab_size": 30720,
    "hidden_size": 1024,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 131072,
}
"""DeepSeek-V3 form, 170 million parameters, of which 63 in embedding and head."""

GQA_BENCHMARK: dict[str, Any] = {
    "vocab_size": 30720,
    "hidden_size": 1024,
    "intermediate_size": 1920,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
"""Qwen3 form, 100 million parameters, of which 31 in the embedding, which is also the head."""

DSA_BENCHMARK: dict[str, Any] = {
    "vocab_size": 30720,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "max_position_embeddings": 131072,
}
"""GLM-5.2 form: index heads and head dims as published, an indexer in layers 0 and 2 of 4, few and small
experts. From 8,000 tokens on the indexers do most of a prefill's work."""

LONG_PROMPTS: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 131072,
}
"""DeepSeek-V3 form with so few and small heads that one core attends 100,000 tokens to each other in a few
minutes: 6.4 TFLOP."""

SPARSE_LONG_PROMPTS: dict[str, Any] = LONG_PROMPTS | {
    "index_topk": 2048,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "indexer_types": ["full", "shared", "full", "shared"],
}
"""GLM-5.2 form of the same size: 2.6 TFLOP to score 100,000 tokens, 0.5 to attend to the selected."""


def make_checkpoint(
    architecture: str,
    folder: str | Path,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "200KB",
    **config_overrides: Any,
) -> Path:
    """Write a tiny random checkpoint (config, sharded safetensors, tokenizer) and return its folder.

    `config_overrides` are keys of config.json, over `TINY` or `TINY_GQA`. Equal arguments give equal files.
    ValueError for an architecture that is not supported.
    """
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    import transformers
    from transformers.utils import logging

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, architecture)
    tiny = TINY_GQA if architecture in GQA_ARCHITECTURES else TINY
    config = model_class.config_class(**(tiny | _TINY_OF[architecture] | config_overrides))
    # Without storage at first: the classes' own initialisation would take longer than ours.
    with torch.device("meta"):
        model = model_class(config)
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    model.tie_weights()
    _fill(model, seed)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    finally:
        if bars:
            logging.enable_progress_bar()
    _write_tokenizer(folder, config.vocab_size)
    return folder


def make_benchmark_checkpoint(folder: str | Path, dtype: str = "bfloat16", **config_overrides: Any) -> Path:
    """The model that speed is measured with: DeepSeek-V3 form, see `BENCHMARK`."""
    overrides = BENCHMARK | config_overrides
    return make_checkpoint("DeepseekV3ForCausalLM", folder, dtype, max_shard_size="100MB", **overrides)


def make_gqa_benchmark_checkpoint(
    folder: str | Path, dtype: str = "bfloat16", **config_overrides: Any
) -> Path:
    """The same for grouped-query attention: Qwen3 form, see `GQA_BENCHMARK`."""
    overrides = GQA_BENCHMARK | config_overrides
    return make_checkpoint("Qwen3ForCausalLM", folder, dtype, max_shard_size="100MB", **overrides)


def make_dsa_benchmark_checkpoint(
    folder: str | Path, dtype: str = "bfloat16", **config_overrides: Any
) -> Path:
    """The same for sparse attention: GLM-5.2 form, see `DSA_BENCHMARK`."""
    overrides = DSA_BENCHMARK | config_overrides
    return make_checkpoint("GlmMoeDsaForCausalLM", folder, dtype, max_shard_size="100MB", **overrides)


def make_long_prompt_checkpoint(folder: str | Path, dtype: str = "float32", **config_overrides: Any) -> Path:
    """A small model for prompts of 100,000 tokens, with experts: see `LONG_PROMPTS`."""
    overrides = LONG_PROMPTS | config_overrides
    return make_checkpoint("DeepseekV3ForCausalLM", folder, dtype, max_shard_size="100MB", **overrides)


def make_sparse_long_prompt_checkpoint(
    folder: str | Path, dtype: str = "float32", **config_overrides: Any
) -> Path:
    """The same with sparse attention: see `SPARSE_LONG_PROMPTS`."""
    overrides = SPARSE_LONG_PROMPTS | config_overrides
    return make_checkpoint("GlmMoeDsaForCausalLM", folder, dtype, max_shard_size="100MB", **overrides)


@torch.no_grad()
def _fill(model: torch.nn.Module, seed: int) -> None:
    """Random values for every tensor that is saved, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict(keep_vars=True)
    done: set[int] = set()
    for name, tensor in sorted(state.items()):
        if tensor.data_ptr() in done or not tensor.is_floating_point():
            continue
        done.add(tensor.data_ptr())
        if name.endswith("norm.weight"):
            tensor.normal_(1.0, 0.1, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            # Published checkpoints keep it in float32.
            tensor.data = tensor.float().normal_(0.0, 0.2, generator=generator)
        elif tensor.dim() == 1:
            tensor.normal_(0.0, 0.2, generator=generator)
        else:
            # Rows that keep the size of a normed input, and somewhat more, so that softmaxes are sharp.
            tensor.normal_(0.0, 1.6 * tensor.shape[-1] ** -0.5, generator=generator)
        if name.endswith("mlp.gate.weight"):
            # Experts with longer rows win more often: a real router is not even.
            tensor.mul_(torch.linspace(0.5, 1.5, len(tensor))[:, None])


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer with exactly `vocab_size` tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [BOS, EOS, UNK, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = ["th", "in", "er", "an", "re", "on", "at", "en", "ou", "is", "the", "ing", "and", "Ġthe", "Ġand"]
    known = set(tokens)
    merges = []
    for word in pairs:
        left, right = word[:-1], word[-1]
        if left not in known:
            left, right = word[0], word[1:]
        if left in known and right in known and len(tokens) < vocab_size:
            merges.append((left, right))
            tokens.append(word)
            known.add(word)
    tokens += [f"<{i}>" for i in range(len(tokens), vocab_size)]
    vocab = {token: i for i, token in enumerate(tokens[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNK, chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
