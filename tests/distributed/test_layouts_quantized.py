"""Weights that stay quantised give the tokens and log-probabilities of expanded ones, on ranks as threads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from prefold import SamplingParams
from prefold.checkpoint_files import check_checkpoint_files
from prefold.config import EngineConfig
from prefold.distributed.layouts import describe_layout
from prefold.engine import weight_memory as weight_memory_module
from prefold.engine.args import EngineArgs
from prefold.engine.weight_memory import with_weight_memory
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import layout_options
from prefold.testing.gguf_checkpoint import write_gguf
from prefold.testing.quantized import quantize_checkpoint
from prefold.testing.thread_executor import ThreadLLM

LAYOUTS = ("TP1", "TP2", "PCP2", "TP2 EP", "PP2")
FORMATS = ("fp8", "modelopt-nvfp4")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=20)
ENGINE = {
    "block_size": 4,
    "num_blocks": 200,
    "max_model_len": 128,
    "min_split_tokens": 1,
    "max_num_batched_tokens": 32,
    "debug_poison": True,
    "dtype": "bfloat16",
    "compute_dtype": "float32",
    "kv_cache_dtype": "float32",
}
"""Weights are rounded to bfloat16, and nothing else: what is rounded later may differ by as much.
Chunks have up to 32 tokens: some rows meet expanded tiles, others the codes."""

TOLERANCE = 1e-4
TIE = 1e-3
"""Log-probabilities between which a token is not compared further: its rivals are as good."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    plain = make_checkpoint("DeepseekV3ForCausalLM", root / "plain", num_hidden_layers=2)
    return {format: quantize_checkpoint(plain, root / format, format, (20, 24)) for format in FORMATS}


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in (1, 17, 90)]


def generate(folder: Path, layout: str, weight_memory: str):
    options = layout_options(layout) if layout != "TP1" else {}
    with ThreadLLM(str(folder), weight_memory=weight_memory, **ENGINE, **options) as llm:
        assert llm.engine.config.runtime.weight_memory == weight_memory
        return [output.outputs[0] for output in llm.generate(prompts(), GREEDY)]


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_and_log_probabilities_are_those_of_expanded_weights(folders: dict[str, Path], format: str):
    expanded = generate(folders[format], "TP1", "expanded")
    for layout in LAYOUTS:
        compared = 0
        for got, want in zip(generate(folders[format], layout, "quantized"), expanded, strict=True):
            for step, (ours, theirs) in enumerate(zip(got.logprobs, want.logprobs, strict=True)):
                best = sorted((entry.logprob for entry in theirs.values()), reverse=True)
                if best[0] - best[1] < TIE:
                    break
                assert got.token_ids[step] == want.token_ids[step], (layout, step)
                common = ours.keys() & theirs.keys()
                assert len(common) >= 15
                errors = [abs(ours[token].logprob - theirs[token].logprob) for token in common]
                assert max(errors) < TOLERANCE, (layout, step)
                compared += 1
        assert compared >= 24, layout


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_a_gguf_file(tmp_path: Path, kind: GGMLQuantizationType):
    """Its rows of q_proj and k_proj are in another order; TP 4 cuts blocks of 32, and these are expanded."""
    file = write_gguf(
        make_checkpoint("LlamaForCausalLM", tmp_path / "hf"), tmp_path / "m.gguf", "llama", kind
    )
    want = generate(file, "TP1", "expanded")
    for layout in ("TP1", "TP2", "TP4"):
        for got, expanded in zip(generate(file, layout, "quantized"), want, strict=True):
            assert got.token_ids == expanded.token_ids, layout
            for ours, theirs in zip(got.logprobs, expanded.logprobs, strict=True):
                common = ours.keys() & theirs.keys()
                assert len(common) >= 15
                assert max(abs(ours[t].logprob - theirs[t].logprob) for t in common) < TOLERANCE


def test_a_checkpoint_without_quantised_tensors(folders: dict[str, Path]):
    plain = folders["fp8"].parent / "plain"
    with pytest.raises(
        ValueError, match=r"weight_memory='quantized': .*plain holds no quantised tensors, only \d+ in F32"
    ):
        ThreadLLM(str(plain), weight_memory="quantized", **ENGINE)
    with ThreadLLM(str(plain), **ENGINE) as llm:
        assert llm.engine.config.runtime.weight_memory == "expanded"


def test_auto_keeps_what_would_not_fit(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    def resolved(**options: Any) -> EngineConfig:
        return EngineArgs(str(folders["fp8"]), num_blocks=64, max_model_len=64, **options).resolve()

    def chosen(ranks: int, free: int) -> str:
        monkeypatch.setattr(weight_memory_module, "available_memory", lambda: free)
        args = EngineArgs(
            str(folders["fp8"]), num_blocks=64, max_model_len=64, prefill_context_parallel_size=ranks
        )
        return args.resolve().runtime.weight_memory

    config = EngineArgs(str(folders["fp8"]), num_blocks=64, max_model_len=64).resolve()
    size = describe_layout(config.model, config.parallel).weight_bytes
    assert [chosen(1, 2 * size), chosen(1, 2 * size - 1)] == ["expanded", "quantized"]
    assert [chosen(2, 4 * size), chosen(2, 4 * size - 1)] == ["expanded", "quantized"]
    with pytest.raises(ValueError, match="weight_memory='half' is not one of auto, expanded, quantized"):
        resolved(weight_memory="half")
    with pytest.raises(ValueError, match="weight_memory='quantized' needs device='cpu'"):
        resolved(weight_memory="quantized", device="cuda")


def listed_and_held(folder: Path, layout: str, weight_memory: str) -> tuple[int, int]:
    """What `prefold layouts` says of the fullest rank, and what that rank has loaded."""
    options = layout_options(layout) if layout != "TP1" else {}
    with ThreadLLM(str(folder), weight_memory=weight_memory, **ENGINE, **options) as llm:
        config, held = llm.engine.config, []
        for runner in llm.executor.runners:
            parameters = list(runner._model.parameters())
            # Not listed: norms and biases, and that routers and weights of index heads are float32.
            vectors = sum(p.nbytes for p in parameters if p.dim() == 1)
            float32 = sum(p.nbytes for p in parameters if p.dim() > 1 and p.dtype == torch.float32)
            held.append(runner.weight_bytes - vectors - float32 // 2)
    layouts = [describe_layout(config.model, config.parallel)]
    (listed,) = with_weight_memory(layouts, weight_memory, config.model, check_checkpoint_files(folder))
    assert listed.weights_stay_quantized == (weight_memory == "quantized")
    return listed.weight_bytes, max(held)


@pytest.mark.parametrize("layout", ["TP1", "TP2 EP", "PP2", "PCP2 EP"])
def test_what_is_listed_is_what_a_rank_holds(folders: dict[str, Path], layout: str):
    """Embedding, head and the halves of kv_b_proj are expanded. Where TP cuts FP8 blocks, ranks have more
    scales."""
    for format in FORMATS:
        listed, held = listed_and_held(folders[format], layout, "quantized")
        assert listed <= held <= listed + 200 * (format == "fp8" and "TP" in layout), (format, listed, held)
        expanded, held_expanded = listed_and_held(folders[format], layout, "expanded")
        assert expanded == held_expanded
        assert 0.4 < listed / expanded < 0.9


def test_indexers_and_gguf_blocks_that_are_cut_are_expanded(tmp_path: Path):
    """Q4_0 has blocks of 32 columns; TP 4 leaves 16 of down_proj's."""
    sparse = make_checkpoint("GlmMoeDsaForCausalLM", tmp_path / "sparse", num_hidden_layers=2)
    quantised = quantize_checkpoint(sparse, tmp_path / "nvfp4", "modelopt-nvfp4")
    llama = make_checkpoint("LlamaForCausalLM", tmp_path / "hf")
    file = write_gguf(llama, tmp_path / "m.gguf", "llama", GGMLQuantizationType.Q4_0)
    for folder, layout in ((quantised, "PCP2 EP"), (file, "TP1"), (file, "TP4")):
        listed, held = listed_and_held(folder, layout, "quantized")
        assert listed == held, (folder, layout)
