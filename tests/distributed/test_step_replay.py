"""Replayed decode steps give bit for bit what computed ones give; ranks are threads.

Buffers are not poisoned here: poisoned ones are never recorded. What computed steps give is compared with the
single rank and with transformers in the other tests of layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefold import SamplingParams
from prefold.kernels.recording import Recording, again
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import generate_over_time, layout_options
from prefold.testing.quantized import quantize_checkpoint
from prefold.testing.thread_executor import ThreadLLM
from prefold.worker import step_replay
from prefold.worker.step_replay import StepReplay
from prefold.workspace import Workspace

torch.set_num_threads(1)

ENGINE: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 600,
    "max_model_len": 400,
    "min_split_tokens": 8,
    "context_workspace_tokens": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("DeepseekV3ForCausalLM", {"dtype": "bfloat16"}),
    "float32": ("DeepseekV3ForCausalLM", {"dtype": "float32"}),
    "dsa": ("DeepseekV32ForCausalLM", {"dtype": "bfloat16"}),
    "gqa": ("Qwen3ForCausalLM", {"dtype": "bfloat16", "attention_bias": True}),
    "moe": ("Qwen3MoeForCausalLM", {"dtype": "bfloat16"}),
    "scaled": ("MiniCPM3ForCausalLM", {"dtype": "bfloat16"}),
}
CASES = [
    *(
        ("mla", layout, {})
        for layout in ("PCP1", "TP2", "PCP2", "PP2", "PCP2 DCP2", "TP2 EP", "TP2 PCP2 DCP2 EP")
    ),
    *(("mla", "PCP1", {"compute_dtype": dtype}) for dtype in ("float32", "bfloat16")),
    *(("mla", layout, {"kv_cache_dtype": "fp8"}) for layout in ("PCP2", "TP2 DCP2")),
    ("float32", "PCP2", {}),
    *(("dsa", layout, {}) for layout in ("PCP1", "PCP2 DCP2")),
    *(("gqa", layout, {}) for layout in ("PCP1", "TP2 PCP2")),
    ("gqa", "PCP1", {"compute_dtype": "bfloat16"}),
    *(("moe", layout, {}) for layout in ("TP2", "PCP2 EP")),
    ("scaled", "PCP2", {}),
    ("fp8", "TP2", {"weight_memory": "quantized"}),
]
Sample = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("replay")
    made = {
        name: make_checkpoint(architecture, root / name, vocab_size=300, num_hidden_layers=2, **overrides)
        for name, (architecture, overrides) in MODELS.items()
    }
    return made | {"fp8": quantize_checkpoint(made["mla"], root / "fp8", "fp8", (20, 24))}


def generate(folder: Path, options: dict[str, Any]) -> list[Sample]:
    """Requests that come and go, so that steps have 1 to 6 tokens, at every place in a block; a long prompt
    among them makes buffers grow."""
    lengths, arrivals = [5, 17, 30, 11, 90, 2, 26, 9, 64], [0, 0, 1, 2, 9, 13, 16, 28, 34]
    prompts = [[(7 * i * i + length) % 300 for i in range(length)] for length in lengths]
    params = [
        SamplingParams(temperature=0.0, max_tokens=14 + 2 * i, ignore_eos=True, logprobs=2)
        for i in range(len(prompts))
    ]
    with ThreadLLM(str(folder), **ENGINE, **options) as llm:
        outputs = generate_over_time(llm, prompts, params, arrivals)
    samples = []
    for output in outputs:
        sample = output.outputs[0]
        assert sample.logprobs is not None
        logprobs = [{token: one.logprob for token, one in entry.items()} for entry in sample.logprobs]
        samples.append((sample.token_ids, logprobs))
    return samples


@pytest.mark.parametrize(("model", "layout", "options"), CASES)
def test_replayed_steps_are_bit_for_bit_the_computed_ones(
    checkpoints: dict[str, Path],
    model: str,
    layout: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[StepReplay] = []
    build = StepReplay.__init__

    def build_and_keep(replay: StepReplay, workspace: Workspace) -> None:
        build(replay, workspace)
        made.append(replay)

    monkeypatch.setattr(StepReplay, "__init__", build_and_keep)
    options = options | layout_options(layout)
    replayed = generate(checkpoints[model], options)
    num_replayed = [replay.num_replayed for replay in made]
    assert replayed == generate(checkpoints[model], options | {"enforce_eager": True})
    assert min(num_replayed) >= 20, num_replayed
    assert [replay.num_replayed for replay in made[len(num_replayed) :]] == [0] * len(num_replayed)


STREAM = torch.zeros(1)


def run(replay: StepReplay, layers: Any, num_tokens: int, kind: object = None) -> torch.Tensor:
    replay.begin_step(kind)
    return replay.run_layers(layers, STREAM.expand(num_tokens, 1))


class Layers:
    """Counts how often it is called; `places`: of what it asks to be called again with, in turn."""

    def __init__(self, places: int = 1) -> None:
        self.num_called = self.num_again = 0
        self._places = [torch.zeros(1) for _ in range(places)]

    def __call__(self) -> torch.Tensor:
        self.num_called += 1
        return again(self._again, self._places[self.num_called % len(self._places)])

    def _again(self, x: torch.Tensor) -> torch.Tensor:
        self.num_again += 1
        return x


def test_two_recordings_must_agree() -> None:
    steady, wandering = Layers(), Layers(places=2)
    replay = StepReplay(Workspace())
    for _ in range(10):
        run(replay, steady, 1, "steady")
        run(replay, wandering, 1, "wandering")
    assert (steady.num_called, steady.num_again) == (2, 10)
    assert (wandering.num_called, wandering.num_again) == (10, 10)
    assert replay.num_replayed == 8


def test_kinds_and_numbers_of_tokens_are_recorded_apart() -> None:
    layers, replay = Layers(), StepReplay(Workspace())
    for _ in range(3):
        for num_tokens in (0, 1, 2, step_replay.MOST_TOKENS, step_replay.MOST_TOKENS + 1):
            for kind in ("one", ("another", 4)):
                run(replay, layers, num_tokens, kind)
    assert replay.num_replayed == 4 * 2
    assert layers.num_called == 2 * 4 * 2 + 3 * 2


def test_buffers_that_move_end_all_recordings() -> None:
    layers, workspace = Layers(), Workspace()
    replay = StepReplay(workspace)
    workspace.get("x", (4,), torch.float32)
    for _ in range(4):
        run(replay, layers, 1)
    workspace.get("x", (3,), torch.float32)
    run(replay, layers, 1)
    assert (layers.num_called, replay.num_replayed) == (2, 3)
    workspace.get("x", (5,), torch.float32)
    for _ in range(4):
        run(replay, layers, 1)
    assert (layers.num_called, replay.num_replayed) == (4, 5)


def test_recordings_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_replay, "MOST_RECORDINGS", 3)
    kept: list[Recording] = []
    layers, replay = Layers(), StepReplay(Workspace())
    for kind in range(20):
        for _ in range(3):
            run(replay, layers, 1, kind)
        run(replay, layers, 1, 0)  # needed all the time
        kept = [known.recording for known in replay._known.values() if known.recording is not None]
        assert len(kept) <= 3
    assert len(kept) == 3
    assert replay.num_replayed == 20 + 20, "each kind's third step, and kind 0's others"
