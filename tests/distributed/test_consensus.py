"""One rank's numbers are off in the last bit: tokens and states do not fork.

Replicated ranks need not agree bit for bit. One rank decides the tokens, and the others, which may have
other logits, learn them from the engine.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from prefold import SamplingParams
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.thread_executor import ThreadLLM
from prefold.worker.model_runner import ModelRunner

VOCAB = 300
LAYOUTS = {
    "tp2_pcp2": {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2},
    "tp2_pcp2_dcp4": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 4,
    },
    "pp2_pcp2": {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2},
}


def noisy(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Every number up or down by one unit in the last place."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    up = torch.randint(0, 2, x.shape, generator=generator).bool()
    return torch.nextafter(x, torch.where(up, torch.inf, -torch.inf).to(x.dtype))


def add_noise(runner: ModelRunner, seed: int) -> list[str]:
    """To this rank's logits, and to its hidden states, which become other ranks' logits. Returns a list
    that grows with every use."""
    model, rng, used = runner._model, random.Random(seed), []
    forward, compute_logits = model.forward, model.compute_logits

    def noisy_forward(*args) -> torch.Tensor:
        used.append("hidden")
        return noisy(forward(*args), rng)

    def noisy_logits(hidden: torch.Tensor) -> torch.Tensor:
        used.append("logits")
        return noisy(compute_logits(hidden), rng)

    model.forward, model.compute_logits = noisy_forward, noisy_logits
    return used


def checksum(runner: ModelRunner) -> int:
    """Of all that a rank knows of the requests."""
    states, found = runner.states, 0
    arrays = (
        "token_ids",
        "block_ids",
        "num_blocks",
        "num_tokens",
        "num_prefill_tokens",
        "num_computed_tokens",
    )
    for name in arrays:
        found = zlib.crc32(np.ascontiguousarray(getattr(states, name)), found)
    return zlib.crc32(repr(sorted(states.row_of.items())).encode(), found)


def record_states(llm: ThreadLLM) -> list[list[int]]:
    """Per rank, a checksum of its states at the start of every step from now on."""
    histories: list[list[int]] = []
    for runner in llm.executor.runners:
        assert runner is not None
        history: list[int] = []
        histories.append(history)

        def apply(step, runner=runner, apply=runner.states.apply, history=history) -> None:
            apply(step)
            history.append(checksum(runner))

        runner.states.apply = apply
    return histories


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Long and short, greedy and drawn, in prefill and in decode at the same time."""
    rng = random.Random(0)
    found = []
    for index, length in enumerate((1, 30, 7, 60, 2, 20)):
        params = SamplingParams(
            temperature=0.0 if index % 2 else 0.9,
            seed=index,
            max_tokens=12 + 2 * index,
            ignore_eos=True,
            prompt_logprobs=1 if index == 3 else None,
            logprobs=2 if index == 2 else None,
        )
        found.append(([rng.randrange(VOCAB) for _ in range(length)], params))
    return found


def run(llm: ThreadLLM) -> dict[str, list[int]]:
    """Tokens by request, through a preemption."""
    engine, tokens = llm.engine, {}
    for index, (prompt, params) in enumerate(requests()):
        engine.add_request(str(index), prompt, params, stream=False)
    steps, preempted = 0, False
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        steps += 1
        if steps >= 12 and not preempted:
            engine.scheduler.reset_prefix_cache()
            preempted = engine.scheduler.preempt("3")  # not while a step of it is in flight
    assert steps > 20
    assert preempted
    return tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3"), vocab_size=VOCAB)


def start(checkpoint: Path, layout: dict[str, int]) -> ThreadLLM:
    return ThreadLLM(
        str(checkpoint),
        block_size=4,
        num_blocks=200,
        max_model_len=200,
        max_num_batched_tokens=24,
        min_split_tokens=1,
        context_workspace_tokens=32,
        check_step_plans="on",
        **layout,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_on_any_rank_forks_nothing(checkpoint: Path, layout: str):
    quiet = start(checkpoint, LAYOUTS[layout])
    expected = run(quiet)
    for rank in range(len(quiet.executor.runners)):
        llm = start(checkpoint, LAYOUTS[layout])
        histories = record_states(llm)
        runner = llm.executor.runners[rank]
        assert runner is not None
        used = add_noise(runner, seed=rank)
        assert run(llm) == expected, rank
        assert len(histories[0]) > 20
        assert all(history == histories[0] for history in histories), rank
        assert used.count("hidden") == len(histories[0])
        llm.executor.shutdown()


def test_noise_is_noise():
    x = torch.randn(200)
    other = noisy(x, random.Random(1))
    assert 0 < (other - x).abs().max() < 1e-6
    assert ((other > x) | (other < x)).all()
