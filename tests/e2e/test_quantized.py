"""Quantised checkpoints in the engine: logits of transformers on the dequantised weights, greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.quantized import dequantized_checkpoint, quantize_checkpoint, quantized_formats
from prefold.testing.reference import LOGIT_TIE, ROUTER_TIE, Reference

NUM_TOKENS = 8
LENGTHS = (1, 17, 60)
TOLERANCE = 1e-4
BLOCK = (20, 24)
OPTIONS = {
    "block_size": 4,
    "num_blocks": 200,
    "max_model_len": 128,
    "threads_per_rank": 1,
    "skip_tokenizer_init": True,
}
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20, prompt_logprobs=20
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("plain"))


def compare(llm: LLM, reference: Reference, seed: int) -> None:
    """For each length, a prompt whose tokens do not depend on rounding: all log-probabilities and tokens."""
    rng, missing = random.Random(seed), set(LENGTHS)
    for _ in range(10):
        prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in sorted(missing)]
        outputs = llm.generate(prompts, GREEDY)
        judgements = reference.judge([o.prompt_token_ids + o.outputs[0].token_ids for o in outputs])
        for output, judgement in zip(outputs, judgements):
            prompt, sample = output.prompt_token_ids, output.outputs[0]
            tokens, lead = judgement.prefers(len(prompt))
            if judgement.margin < ROUTER_TIE or lead < LOGIT_TIE:
                continue
            assert sample.token_ids == tokens
            assert len(tokens) == NUM_TOKENS
            logprobs = judgement.logits.log_softmax(-1)
            for position, entry in enumerate([*output.prompt_logprobs[1:], *sample.logprobs]):
                ids = list(entry)
                ours = torch.tensor([entry[i].logprob for i in ids])
                assert float((ours - logprobs[position, ids]).abs().max()) < TOLERANCE
            missing.discard(len(prompt))
        if not missing:
            return
    raise AssertionError(f"lengths {missing} found no prompt away from ties")


@pytest.mark.parametrize("format", quantized_formats())
def test_logits_and_tokens_equal_transformers_on_dequantised_weights(
    plain: Path, tmp_path: Path, format: str
):
    folder = quantize_checkpoint(plain, tmp_path / "quantised", format, BLOCK)
    reference = Reference(dequantized_checkpoint(folder, tmp_path / "twin", format, BLOCK))
    with LLM(str(folder), dtype="float32", **OPTIONS) as llm:
        compare(llm, reference, seed=1)


def test_two_processes(plain: Path, tmp_path: Path):
    format = "modelopt-nvfp4"
    folder = quantize_checkpoint(plain, tmp_path / "quantised", format, BLOCK)
    reference = Reference(dequantized_checkpoint(folder, tmp_path / "twin", format, BLOCK))
    with LLM(str(folder), dtype="float32", tensor_parallel_size=2, **OPTIONS) as llm:
        compare(llm, reference, seed=2)


def test_unknown_quantisation_is_refused_at_start(plain: Path, tmp_path: Path):
    folder = quantize_checkpoint(plain, tmp_path / "quantised", "modelopt-nvfp4")
    file = folder / "hf_quant_config.json"
    file.write_text(file.read_text().replace("NVFP4", "W4A8_AWQ"))
    with pytest.raises(
        ValueError, match=r"quant_algo 'W4A8_AWQ'.*supported: fp8.*modelopt.*compressed-tensors"
    ):
        LLM(str(folder), tensor_parallel_size=2, **OPTIONS)
