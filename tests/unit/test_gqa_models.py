"""Models with grouped-query attention against transformers on random float32 checkpoints, attention by the
dense oracle."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from prefold.config import GQAConfig, ModelConfig, RuntimeConfig
from prefold.hf_config import GQA_ARCHITECTURES, load_model_config
from prefold.loader import load_weights
from prefold.models.decoder import Decoder
from prefold.models.registry import build_model
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.dense import DenseContext
from prefold.testing.reference import ROUTER_TIE, Reference
from prefold.testing.threads import run_threads, single_rank
from prefold.workspace import Workspace

torch.set_num_threads(1)

LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, SMOLLM3 = GQA_ARCHITECTURES
PROMPT, DECODED = 150, 16

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((architecture, {}) for architecture in GQA_ARCHITECTURES),
    (LLAMA, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    (LLAMA, {"num_key_value_heads": 8, "head_dim": None, "rope_parameters": ROPE_LLAMA3}),
    (LLAMA, {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    (MISTRAL, {"sliding_window": 33}),
    (MISTRAL, {"sliding_window": 1, "num_key_value_heads": 4}),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    (QWEN2, {"rope_parameters": ROPE_YARN, "tie_word_embeddings": True}),
    (QWEN3, {"attention_bias": True, "head_dim": 32}),
    (
        QWEN3,
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    (QWEN3_MOE, {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 40, "attention_bias": True}),
    (SMOLLM3, {"no_rope_layers": [0, 1, 1], "attention_bias": True, "mlp_bias": True}),
    (SMOLLM3, {"use_sliding_window": True, "sliding_window": 25}),
]


def load(folder: Path, group=None, layers: range | None = None) -> tuple[ModelConfig, Decoder]:
    config = load_model_config(folder)
    workspace = Workspace(poison=True)
    group = group or single_rank()
    model = build_model(config, group, workspace, RuntimeConfig(), PROMPT + DECODED, layers)
    load_weights(model, folder)
    return config, model


def greedy(
    stages: list[Decoder], config: ModelConfig, prompt: torch.Tensor, num_tokens: int, bounds=(0, 70)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of a run in chunks, then token by token, through one or several stages."""
    contexts = [DenseContext(config) for _ in stages]
    tokens, logits = prompt, []

    def run(start: int, end: int) -> None:
        hidden = None
        for model, ctx in zip(stages, contexts):
            hidden = model(tokens[start:end], torch.arange(start, end), ctx, hidden)
            hidden = hidden.clone()
        logits.append(stages[-1].compute_logits(hidden).clone())

    for start, end in pairwise([*bounds, len(prompt)]):
        run(start, end)
    for _ in range(num_tokens):
        tokens = torch.cat((tokens, logits[-1][-1:].argmax(-1)))
        run(len(tokens) - 1, len(tokens))
    return tokens, torch.cat(logits)


def prompt_of(config: ModelConfig, length: int = PROMPT, seed: int = 7) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
def test_logits_and_greedy_tokens_equal_transformers(
    architecture: str, overrides: dict[str, Any], tmp_path: Path
):
    folder = make_checkpoint(architecture, tmp_path, **overrides)
    config, model = load(folder)
    theirs = Reference(folder)
    for seed in range(8):
        tokens, logits = greedy([model], config, prompt_of(config, seed=seed), DECODED)
        (judgement,) = theirs.judge([tokens.tolist()])
        if judgement.margin > ROUTER_TIE:
            break
    else:
        raise AssertionError("every prompt brings a router near a tie")
    assert (logits - judgement.logits).abs().max() < 1e-4
    assert judgement.prefers(PROMPT)[0] == tokens[PROMPT:].tolist()
    assert len(set(tokens[PROMPT:].tolist())) > 4, "a checkpoint whose greedy tokens do not vary tests little"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("architecture", GQA_ARCHITECTURES)
def test_tensor_parallel_ranks_equal_one_rank(architecture: str, size: int, tmp_path: Path):
    """2 KV heads: with 4 and 8 ranks neighbours hold the same one."""
    bias = {} if architecture in (MISTRAL, QWEN2) else {"attention_bias": True}
    folder = make_checkpoint(architecture, tmp_path, **bias)
    config, model = load(folder)
    prompt = prompt_of(config, 70)
    tokens, expected = greedy([model], config, prompt, 4, (0, 30))

    def rank_main(group):
        torch.set_num_threads(1)
        _, rank_model = load(folder, group)
        return greedy([rank_model], config, prompt, 4, (0, 30))

    for rank_tokens, logits in run_threads(size, rank_main):
        assert torch.equal(rank_tokens, tokens)
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("architecture", [QWEN3_MOE, SMOLLM3])
def test_stages_equal_the_whole_model_bit_for_bit(architecture: str, tmp_path: Path):
    """Layers that differ keep their kind on whatever stage they are."""
    folder = make_checkpoint(architecture, tmp_path, tie_word_embeddings=True, num_hidden_layers=4)
    config, whole = load(folder)
    prompt = prompt_of(config, 60)
    _, expected = greedy([whole], config, prompt, 3, (0, 30))
    for bounds in ([0, 1, 4], [0, 3, 4], [0, 1, 2, 3, 4]):
        stages = [load(folder, layers=range(start, end))[1] for start, end in pairwise(bounds)]
        assert torch.equal(greedy(stages, config, prompt, 3, (0, 30))[1], expected), bounds


@pytest.mark.parametrize("architecture", GQA_ARCHITECTURES)
def test_no_tokens_are_a_batch_too(architecture: str, tmp_path: Path):
    config, model = load(make_checkpoint(architecture, tmp_path))
    none = torch.empty(0, dtype=torch.int64)
    assert model(none, none, DenseContext(config)).shape == (0, config.hidden_size)


def test_the_variants_have_what_they_are_for(tmp_path: Path):
    """Windows and layers without rotary embedding really are in them."""
    windows, nope = set(), set()
    for i, (architecture, overrides) in enumerate(VARIANTS):
        gqa = load_model_config(make_checkpoint(architecture, tmp_path / str(i), **overrides)).attention
        assert isinstance(gqa, GQAConfig)
        windows |= {(architecture, window) for window in gqa.windows if window is not None}
        nope |= {architecture} if not all(gqa.rope_layers) else set()
    assert {architecture for architecture, _ in windows} == set(GQA_ARCHITECTURES) - {LLAMA}
    assert nope == {SMOLLM3}
