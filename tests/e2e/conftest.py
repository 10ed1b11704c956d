"""Tiny checkpoints, engines on them, and greedy cases that transformers has confirmed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.reference import Case, Reference, find_cases

torch.set_num_threads(1)

VOCAB_SIZE = 320
NUM_TOKENS = 16

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2ForCausalLM", {}),
    "v2-no-q-lora": ("DeepseekV2ForCausalLM", {"q_lora_rank": None}),
    "v3": ("DeepseekV3ForCausalLM", {}),
    "v3-no-q-lora": ("DeepseekV3ForCausalLM", {"q_lora_rank": None}),
    "glm": ("Glm4MoeLiteForCausalLM", {}),
    "minicpm3": ("MiniCPM3ForCausalLM", {}),
    # Kimi-K2 and GLM-4.7-Flash as published, but for sizes.
    "kimi-k2": (
        "DeepseekV3ForCausalLM",
        {
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 24,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.827,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 32.0,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "glm-flash": (
        "Glm4MoeLiteForCausalLM",
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "qk_nope_head_dim": 24,
            "v_head_dim": 32,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "v32": ("DeepseekV32ForCausalLM", {}),
    # Layers with an indexer and one without.
    "glm-dsa": ("GlmMoeDsaForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 50}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    # For tests of the engine rather than of the models: one dense layer and one with experts.
    "small": ("DeepseekV3ForCausalLM", {"num_hidden_layers": 2}),
    # What convert-mla writes has keys that are all position.
    "no-nope": ("DeepseekV3ForCausalLM", {"num_hidden_layers": 2, "qk_nope_head_dim": 0}),
    "wide-values": ("DeepseekV3ForCausalLM", {"num_hidden_layers": 2, "v_head_dim": 40}),
}


class TinyModels:
    """Checkpoints by the names of `CHECKPOINTS`, each made when first asked for."""

    names = tuple(CHECKPOINTS)

    def __init__(self, root: Path) -> None:
        self._root = root
        self._references: dict[str, Reference] = {}

    def folder(self, name: str) -> Path:
        folder = self._root / name
        if not folder.exists():
            architecture, overrides = CHECKPOINTS[name]
            make_checkpoint(architecture, folder, **overrides)
        return folder

    def reference(self, name: str) -> Reference:
        if name not in self._references:
            self._references[name] = Reference(self.folder(name))
        return self._references[name]

    def llm(self, name: str = "small", **options: Any) -> LLM:
        """A single rank with free KV and reused buffers poisoned, on token ids."""
        defaults = {
            "block_size": 4,
            "num_blocks": 1000,
            "max_model_len": 700,
            "threads_per_rank": 1,
            "debug_poison": True,
            "skip_tokenizer_init": True,
        }
        return LLM(str(self.folder(name)), **(defaults | options))

    def cases(
        self,
        prompts: Sequence[int | Callable[[random.Random], list[int]]],
        name: str = "small",
        num_tokens: int = NUM_TOKENS,
        seed: int = 0,
    ) -> list[Case]:
        """A case per entry of `prompts`: a length, or a function that draws the prompt."""
        llm = self.llm(name, enable_prefix_caching=False)
        greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

        def generate(drawn: list[list[int]]) -> list[list[int]]:
            return [output.outputs[0].token_ids for output in llm.generate(drawn, greedy)]

        draws = [self.random_prompt(p) if isinstance(p, int) else p for p in prompts]
        return find_cases(self.reference(name), generate, draws, seed)

    @staticmethod
    def random_prompt(length: int) -> Callable[[random.Random], list[int]]:
        return lambda rng: [rng.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("checkpoints"))
