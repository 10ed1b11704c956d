"""Which collectives a step makes, in which order and of which shape, is the same on all ranks that
share them, for random batches, and does not depend on the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from prefold import SamplingParams
from prefold.distributed.mesh import AXES, CARVED, Mesh
from prefold.testing.exactness import generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

LAYOUTS = [
    *("PCP4", "TP2 PCP2", "PCP4 DCP2", "TP2 PCP2 DCP4", "TP2 PCP2 EP", "PP2 PCP2 DCP2 EP"),
    *("DP2 TP2", "DP2 PCP2 EP", "DP2 TP2 EP"),
]

Call = tuple[str, str, tuple[int, ...], str]
"""(group, op, shape, dtype)"""

VOCAB = 300


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, checkpoint_of: Callable[[int], Path]) -> Iterator[ThreadLLM]:
    options = {"block_size": 2, "num_blocks": 400, "max_model_len": 200, "context_workspace_tokens": 16}
    with ThreadLLM(
        str(checkpoint_of(2)), min_split_tokens=1, **options, **layout_options(request.param)
    ) as engine:
        yield engine


requests = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 4), st.integers(5, 60)),  # prompt tokens
        st.integers(1, 4),  # tokens to generate
        st.integers(0, 6),  # arrival
        st.integers(0, 40),  # tokens shared with the other prompts
    ),
    min_size=1,
    max_size=6,
)


def record(llm: ThreadLLM, mix: list[tuple[int, int, int, int]], budget: int, seed: int) -> list[list[Call]]:
    """The calls of each rank while it runs the requests."""
    executor, groups = llm.executor, llm.executor.groups
    executor.synchronize()
    traces: list[list[Call]] = [[] for _ in groups]
    for trace, own in zip(traces, groups):
        for group in own.values():
            group.trace = trace
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(40)]
    prompts, params = [], []
    for length, max_tokens, _, shared in mix:
        tail = [rng.randrange(VOCAB) for _ in range(length)]
        prompts.append((common[:shared] + tail)[:length])
        params.append(SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    for scheduler in llm.engine.schedulers:
        scheduler.reset_prefix_cache()
        scheduler.max_num_scheduled_tokens = budget
    generate_over_time(llm, prompts, params, [arrival for _, _, arrival, _ in mix])
    executor.synchronize()
    return traces


def shared_calls(mesh: Mesh, ours: int, theirs: int, trace: list[Call]) -> list[Call]:
    """Those calls of rank `ours` that rank `theirs` joins, too."""
    names = {name for name in (*AXES, *CARVED) if name != "pp" and theirs in mesh.group_of(name, ours)}
    return [call for call in trace if call[0] in names]


def messages(op: str, trace: list[Call]) -> list[tuple]:
    return [call[2:] for call in trace if call[:2] == ("pp", op)]


def check(mesh: Mesh, traces: list[list[Call]]) -> None:
    for a, b in combinations(range(mesh.world_size), 2):
        # Not only group by group: two groups called in different order wait for each other.
        assert shared_calls(mesh, a, b, traces[a]) == shared_calls(mesh, b, a, traces[b]), (a, b)
    for stages in mesh.groups("pp"):
        for earlier, later in pairwise(stages):
            assert messages("send", traces[earlier]) == messages("recv", traces[later])


@settings(
    max_examples=6,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mix=requests, budget=st.sampled_from([5, 20, 200]))
@example(mix=[(1, 1, 0, 0)], budget=200).via("ranks without rows")
@example(mix=[(2, 3, 0, 0)], budget=200).via("two tokens")
@example(mix=[(50, 2, 0, 0), (48, 4, 0, 40), (1, 4, 2, 0)], budget=20).via("chunks beside decode")
def test_ranks_make_the_same_calls(llm: ThreadLLM, mix: list[tuple[int, int, int, int]], budget: int) -> None:
    mesh = Mesh.of(llm.engine.config.parallel)
    traces = record(llm, mix, budget, seed=0)
    assert any(traces), "nothing was recorded"
    check(mesh, traces)
    if mesh.dp > 1:
        return  # which replica gets a request depends on how far the others are
    assert record(llm, mix, budget, seed=1) == traces, "the tokens' values steer a collective"


def test_the_check_notices() -> None:
    """Both a call that differs and one that comes in another order."""
    mesh = Mesh(tp=2, pcp=2)
    calls: list[Call] = [("tp", "all_reduce", (3,), "float32"), ("pcp", "all_gather", (2,), "float32")]
    check(mesh, [calls] * 4)
    other: list[Call] = [calls[0], ("pcp", "all_gather", (1,), "float32")]
    with pytest.raises(AssertionError):
        check(mesh, [calls, calls, calls, other])
    pair = Mesh(pcp=2, dcp=2)
    ordered: list[Call] = [("pcp", "barrier", (), ""), ("dcp", "barrier", (), "")]
    with pytest.raises(AssertionError):
        check(pair, [ordered, ordered[::-1]])
    with pytest.raises(AssertionError):
        check(Mesh(pp=2), [[("pp", "send", (3,), "float32")], []])
