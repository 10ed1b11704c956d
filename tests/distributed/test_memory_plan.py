"""What is planned for a rank's workspace, against what largest steps use on many layouts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from prefold.distributed.mesh import Mesh
from prefold.kernels import library
from prefold.memory.buffers import buffer_bytes
from prefold.memory.step import LargestStep
from prefold.request import SamplingParams
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.thread_executor import ThreadLLM
from prefold.workspace import Workspace

torch.set_num_threads(1)

STEP, SEQS, BLOCK = 256, 32, 16
LIMITS = {
    "max_num_batched_tokens": STEP,
    "max_num_seqs": SEQS,
    "max_model_len": 2 * STEP + 64,
    "num_blocks": 200,
    "block_size": BLOCK,
    "context_workspace_tokens": 64,
    "min_split_tokens": 8,
}
PCP, TP, DCP, PP = (
    f"{name}_parallel_size" for name in ("prefill_context", "tensor", "decode_context", "pipeline")
)
EP = "enable_expert_parallel"
V3, GQA, MOE = "DeepseekV3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
DSA = "GlmMoeDsaForCausalLM"

CASES = {
    "latent": (V3, {}, 1.15),
    "latent, bfloat16 weights": (V3, {"dtype": "bfloat16", "compute_dtype": "float32"}, 1.15),
    "latent, bfloat16": (V3, {"dtype": "bfloat16", "compute_dtype": "bfloat16", TP: 2}, 1.15),
    "shared projections": (
        V3,
        {PCP: 2, "share_projections": "on", "context_attention": "local", "kv_cache_dtype": "fp8"},
        1.15,
    ),
    "queries travel": (V3, {PCP: 2, "context_attention": "sliced"}, 1.15),
    "spread over PCP, experts": (V3, {PCP: 2, DCP: 2, EP: True, "context_attention": "kv"}, 1.15),
    "spread over TP": (V3, {TP: 2, DCP: 2, "context_attention": "query"}, 1.15),
    "stages": (V3, {PP: 2}, 1.15),
    "grouped-query": (GQA, {PCP: 2, "context_attention": "local"}, 1.15),
    "grouped-query, experts": (MOE, {TP: 2, EP: True, "compute_dtype": "bfloat16"}, 1.2),
    "sparse": (DSA, {PCP: 2, DCP: 2}, 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def run_largest_steps(llm: ThreadLLM, pcp: int) -> None:
    """Steps that fill the budget: a prompt whose log-probabilities are wanted, one with cached context, many
    short ones, and those again with a few tokens more."""
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompt = [i * 7 % 300 + 2 for i in range(pcp * STEP)]
    llm.generate([prompt], scored)
    llm.generate([[*prompt[: pcp * STEP // 2], *prompt[: pcp * STEP // 2 + 20]]], greedy)
    length = 2 * BLOCK
    short = [[(i * 31 + j) % 300 + 2 for j in range(length)] for i in range(SEQS)]
    for more, count in ((0, SEQS), (8, SEQS), (16, pcp * STEP // 16)):
        llm.generate([[*tokens, *range(5, 5 + more)] for tokens in short[:count]], greedy)


def used_bytes(workspace: Workspace, planned: dict[str, int]) -> Counter[str]:
    """By planned name. Buffers that are part of several have "*" for a number."""
    used: Counter[str] = Counter()
    for (name, dtype), numel in workspace.used.items():
        family = f"{name.rpartition('.')[0]}.*"
        used[family if family in planned else name] += numel * dtype.itemsize
    return used


@pytest.mark.parametrize("name", CASES)
def test_the_plan_covers_what_largest_steps_use(name: str, folder):
    check(folder, *CASES[name], native=True)


@pytest.mark.parametrize("architecture", [V3, DSA])
def test_without_native_kernels(architecture: str, folder, monkeypatch):
    """Blocks of scores are much of it in a tiny model."""
    monkeypatch.setattr(library, "is_available", lambda: False)
    check(folder, architecture, {"compute_dtype": "bfloat16"}, 6, native=False)


def check(folder: Path, architecture: str, options: dict[str, Any], most: float, native: bool) -> None:
    """No buffer is larger than planned, and all together are planned to be at most `most` times as large."""
    stored = options.get("dtype", "float32")
    checkpoint = folder / f"{architecture}-{stored}"
    if not checkpoint.exists():
        make_checkpoint(architecture, checkpoint, stored)
    llm = ThreadLLM(str(checkpoint), **(LIMITS | options))
    config = llm.engine.config
    run_largest_steps(llm, options.get(PCP, 1))
    fullest: dict[int, Counter[str]] = {}
    for rank, runner in enumerate(llm.executor.runners):
        assert runner is not None
        stage = Mesh.of(config.parallel).coords(rank).pp
        planned = buffer_bytes(LargestStep.of(config, stage, native))
        used = used_bytes(runner.workspace, planned)
        short = {
            name: (size, planned.get(name)) for name, size in used.items() if size > planned.get(name, 0)
        }
        assert not short, "used, planned"
        fullest[stage] = max(fullest.get(stage, Counter()), used, key=Counter.total)
    for stage, used in fullest.items():
        planned = buffer_bytes(LargestStep.of(config, stage, native))
        assert sum(planned.values()) <= most * used.total()
    llm.executor.shutdown()
