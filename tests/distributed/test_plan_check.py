"""Ranks that plan different steps notice before they compute anything, and say which they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefold import SamplingParams
from prefold.distributed.errors import CollectiveError
from prefold.distributed.mesh import Mesh
from prefold.engine.executor import EngineDeadError
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.thread_executor import ThreadLLM
from prefold.testing.threads import run_mesh_threads
from prefold.worker.model_runner import ModelRunner
from prefold.worker.plan_check import check_plan

LAYOUTS = [(1, 2), (2, 1), (2, 2), (1, 4), (3, 2)]


def errors_of(mesh: Mesh, checksums: list[int]) -> list[str | None]:
    """What each rank raises if these are the ranks' checksums."""

    def rank_main(rank, groups):
        try:
            check_plan(groups["tp"], groups["pcp"], 7, checksums[rank])
        except CollectiveError as error:
            return str(error)
        return None

    return run_mesh_threads(mesh, rank_main)


@pytest.mark.parametrize(("tp", "pcp"), LAYOUTS)
def test_every_rank_says_which_one_differs(tp: int, pcp: int):
    mesh = Mesh(tp=tp, pcp=pcp)
    size = mesh.world_size
    assert errors_of(mesh, [0xFFFFFFFF] * size) == [None] * size
    for odd in range(size):
        checksums = [5] * size
        checksums[odd] = 6
        errors = errors_of(mesh, checksums)
        assert len(set(errors)) == 1
        assert str(errors[0]).startswith("step 7: ranks have planned different steps: ")
        if size > 2:
            assert f"steps: {odd} differ from the others" in str(errors[0])
        assert f"rank {odd} 00000006" in str(errors[0])


def test_stages_and_replicas_are_not_compared():
    """They run other steps."""
    mesh = Mesh(dp=2, pp=2, pcp=2)
    assert errors_of(mesh, [1, 1, 2, 2, 3, 3, 4, 4]) == [None] * 8
    errors = errors_of(mesh, [1, 1, 2, 2, 3, 9, 4, 4])
    assert [error is not None for error in errors] == [False] * 4 + [True] * 2 + [False] * 2
    assert "rank 4 00000003, rank 5 00000009" in str(errors[5])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3"), vocab_size=300)


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[ThreadLLM]:
    """TP2 PCP2 with two requests in the middle of decoding."""
    engine = ThreadLLM(
        str(checkpoint),
        tensor_parallel_size=2,
        prefill_context_parallel_size=2,
        block_size=4,
        num_blocks=100,
        max_model_len=100,
        check_step_plans="on",
        collective_timeout_s=20.0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for name, prompt in (("a", [*range(1, 30)]), ("b", [*range(50, 60)])):
        engine.engine.add_request(name, prompt, params, stream=False)
    for _ in range(4):
        engine.engine.step()
    yield engine
    engine.executor.shutdown()


def other_partition(runner: ModelRunner) -> None:
    original = runner._pcp.partition

    def swapped(batch):
        parts = original(batch)
        return replace(parts, row_rank=1 - parts.row_rank)

    runner._pcp.partition = swapped


def change(array: np.ndarray, at: int | tuple[int, int], by: int = 1) -> None:
    array[at] += by


CHANGES: dict[str, Callable[[ModelRunner], None]] = {
    "a block": lambda runner: change(runner.states.block_ids, (runner.states.row_of["a"], 2)),
    "a class": lambda runner: change(runner.states.num_prefill_tokens, runner.states.row_of["b"], 20),
    "tokens known": lambda runner: change(runner.states.num_tokens, runner.states.row_of["a"]),
    "the partition": other_partition,
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_differs_ends_the_engine(llm: ThreadLLM, what: str, rank: int):
    runner = llm.executor.runners[rank]
    assert runner is not None
    CHANGES[what](runner)
    with pytest.raises(
        EngineDeadError, match=rf"step \d+: .* different steps: {rank} differ from the others"
    ):
        llm.engine.step()


def test_the_next_token_counts(llm: ThreadLLM):
    """A rank that hears of another token than the rest."""
    runner = llm.executor.runners[3]
    assert runner is not None
    original = runner.states.apply

    def apply(step):
        step.cached_requests[0].new_token_ids[0] ^= 1
        original(step)

    runner.states.apply = apply
    with pytest.raises(EngineDeadError, match="different steps: 3 differ"):
        llm.engine.step()


def test_ranks_that_agree_go_on(llm: ThreadLLM):
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    llm.engine.scheduler.check_integrity()
