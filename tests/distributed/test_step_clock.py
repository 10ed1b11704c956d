"""What a rank measures of a step: seconds per layer and collective, ways of attending; and the trace."""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefold import SamplingParams
from prefold.step import StepStats
from prefold.testing.thread_executor import ThreadLLM
from prefold.tracing import merge, parts_of

OPTIONS = {
    "block_size": 2,
    "num_blocks": 400,
    "max_model_len": 400,
    "max_num_batched_tokens": 24,
    "min_split_tokens": 0,
}
LAYOUTS = {
    "pcp2-tp2": {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2},
    "pp2-pcp2": {"prefill_context_parallel_size": 2, "pipeline_parallel_size": 2},
    "pcp2-dcp2-ep": {
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "enable_expert_parallel": True,
    },
    "one": {},
}


def run(folder: Path, lengths: list[int], **options: Any) -> tuple[ThreadLLM, list[StepStats]]:
    """An engine after it has served prompts of these lengths, and the stats of its steps."""
    llm = ThreadLLM(str(folder), **OPTIONS | options)
    stats: list[StepStats] = []
    receive = llm.executor.receive

    def watched():
        replica, output = receive()
        stats.append(output.stats)
        return replica, output

    llm.executor.receive = watched
    rng = random.Random(0)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in lengths]
    llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    return llm, stats


@dataclass
class Traced:
    layout: dict
    world_size: int
    stats: list[StepStats]
    trace: str


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def traced(
    request: pytest.FixtureRequest,
    checkpoint_of: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Traced:
    """A prompt in chunks and a short one, decoded together, with a trace."""
    trace = str(tmp_path_factory.mktemp("trace") / "trace.json")
    llm, stats = run(checkpoint_of(2), [60, 7], trace=trace, **request.param)
    llm.executor.synchronize()
    return Traced(request.param, llm.engine.config.parallel.world_size, stats, trace)


def test_time_is_measured_per_layer_and_collective(traced: Traced):
    assert len(traced.stats) > 8
    for step in traced.stats:
        assert len(step.layer_s) == 2 // traced.layout.get("pipeline_parallel_size", 1)
        assert all(seconds > 0 for seconds in step.layer_s)
        assert sum(step.layer_s) < step.forward_s
        assert all(seconds > 0 for seconds in step.collective_s.values())
        # Received is what another rank has counted.
        assert step.calls.keys() <= step.collective_s.keys() <= {*step.calls, "pp.recv"}
        assert sum(step.collective_s.values()) < step.forward_s
    assert any(step.collective_s for step in traced.stats) == bool(traced.layout)


@pytest.mark.parametrize(
    ("layout", "forced", "prefill", "decode"),
    [
        ({"prefill_context_parallel_size": 2}, "local", "local", "local"),
        ({"prefill_context_parallel_size": 2}, "sliced", "sliced", "sliced"),
        ({"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}, "query", "query", "shared"),
        ({"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}, "kv", "kv", "shared"),
        ({}, "auto", "local", "local"),
    ],
)
def test_ways_are_counted(
    layout: dict, forced: str, prefill: str, decode: str, checkpoint_of: Callable[[int], Path]
):
    """A prompt in several chunks, of which the first has no context, then a decode of two requests."""
    size = layout.get("prefill_context_parallel_size", 1)
    _, stats = run(checkpoint_of(2), [72 * size, 7], context_attention=forced, **layout)
    ways = [step.ways for step in stats]
    assert ways[0] == {}
    assert ways[1:3] == [{prefill: 1}, {prefill: 1}]
    assert ways[4:10] == [{decode: 2}] * 6


def test_a_trace_has_every_rank_and_its_spans_nest(traced: Traced):
    folder, trace, world, layout = Path(traced.trace).parent, traced.trace, traced.world_size, traced.layout
    names = [f"trace.json.rank{rank}.part" for rank in range(world)]
    assert set(names) <= {path.name for path in parts_of(trace)}
    with (folder / names[-1]).open("ab") as part:
        part.write(b'{"name":"cut off by a cra')
    num_spans = merge(trace)
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert not parts_of(trace)
    assert num_spans == sum(event["ph"] == "X" for event in events)
    by_rank = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] < world:
            by_rank[event["pid"]].append(event)
    assert sorted(by_rank) == list(range(world))
    stages = layout.get("pipeline_parallel_size", 1)
    for rank, spans in by_rank.items():
        steps = [span for span in spans if span["name"].startswith("step ")]
        assert len(steps) == len(traced.stats)
        stage = rank * stages // world
        layers = [span["name"] for span in spans if span["name"].startswith("layer ")]
        expected = [f"layer {layer}" for layer in range(2) if layer * stages // 2 == stage]
        assert layers == expected * len(steps)
        assert sum(span["name"].startswith("attention") for span in spans) == len(layers)
        assert any(".all_" in span["name"] for span in spans) == bool(layout)
        check_nesting(spans)


def check_nesting(spans: list[dict]) -> None:
    """Two spans of a row are apart, or one holds the other."""
    open_until: list[tuple[float, str]] = []
    slack = 0.01  # microseconds: times are rounded
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        end = span["ts"] + span["dur"]
        while open_until and open_until[-1][0] <= span["ts"] + slack:
            open_until.pop()
        if open_until:
            assert end <= open_until[-1][0] + slack, (span, open_until)
        else:
            assert span["name"].startswith("step "), span
        open_until.append((end, span["name"]))


def test_without_a_trace_nothing_is_recorded(checkpoint_of: Callable[[int], Path]):
    llm, _ = run(checkpoint_of(2), [20], prefill_context_parallel_size=2)
    assert all(group.spans is None for groups in llm.executor.groups for group in groups.values())
