"""Bytes moved per step: what the groups count is what the formulas say, and no more is moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from prefold import LLM, SamplingParams
from prefold.distributed.pcp_layout import Partition, locate_tokens, partition
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.testing.checkpoints import make_checkpoint
from prefold.traffic import step_traffic

LAYOUTS = [(1, 2), (2, 1), (2, 2), (1, 3)]


class Recorder:
    """An executor that remembers steps and their results."""

    def __init__(self, llm: LLM) -> None:
        self._executor = llm.engine._executor
        self.steps: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self._submitted: deque[SchedulerOutput] = deque()

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        self._executor.submit(replica, step)
        self._submitted.append(step)

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        replica, output = self._executor.receive()
        self.steps.append((self._submitted.popleft(), output))
        return replica, output

    def shutdown(self) -> None:
        self._executor.shutdown()


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"tp{layout[0]}_pcp{layout[1]}")
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3"))
    tp, pcp = request.param
    options = {"block_size": 4, "num_blocks": 500, "threads_per_rank": 1, "max_num_batched_tokens": 40}
    with LLM(
        str(folder),
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        skip_tokenizer_init=True,
        min_split_tokens=1,
        **options,
    ) as engine:
        yield engine


def record(llm: LLM, lengths: list[int], max_tokens: int) -> list[tuple[SchedulerOutput, ModelRunnerOutput]]:
    original = llm.engine._executor
    recorder = Recorder(llm)
    llm.engine._executor = recorder
    try:
        prompts = [[7 * i % 100 + length for i in range(length)] for length in lengths]
        llm.engine.scheduler.reset_prefix_cache()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    finally:
        llm.engine._executor = original
    return recorder.steps


def partition_of(
    llm: LLM, step: SchedulerOutput, known: dict[str, tuple[int, int]]
) -> tuple[Partition, np.ndarray]:
    """(partition, wanted hidden rows per rank) from the messages alone; `known`: id -> (prefill, tokens)."""
    computed = {r.request_id: r.num_computed_tokens for r in (*step.new_requests, *step.cached_requests)}
    for new in step.new_requests:
        known[new.request_id] = (new.num_prefill_tokens, len(new.token_ids))
    for cached in step.cached_requests:
        prefill, tokens = known[cached.request_id]
        known[cached.request_id] = (prefill, tokens + len(cached.new_token_ids))
    ids = list(step.num_scheduled_tokens)
    num_computed = np.array([computed[i] for i in ids])
    num_scheduled = np.array([step.num_scheduled_tokens[i] for i in ids])
    is_prefill = num_computed < np.array([known[i][0] for i in ids])
    size = llm.engine.config.parallel.prefill_context_parallel_size
    parts = partition(num_computed, num_scheduled, is_prefill, size=size, min_split_tokens=1)
    ends = np.cumsum(num_scheduled)
    sampled = num_computed + num_scheduled == np.array([known[i][1] for i in ids])
    ranks, _ = locate_tokens(parts, np.concatenate([[0], ends]), ends[sampled] - 1)
    return parts, np.bincount(ranks, minlength=size)


def test_counted_bytes_equal_the_formula(llm: LLM) -> None:
    steps = record(llm, [100, 3, 57, 1, 1], max_tokens=5)
    known: dict[str, tuple[int, int]] = {}
    kinds = set()
    for step, output in steps:
        parts, wanted = partition_of(llm, step, known)
        expected = step_traffic(llm.engine.config, parts, 0, wanted, int(wanted.sum()))
        counted = output.stats.bytes_sent
        assert counted.get("pcp.all_gather", 0) == expected.pcp_all_gather
        assert counted.get("tp.all_reduce", 0) == expected.tp_all_reduce
        assert counted.get("tp.all_gather", 0) == expected.tp_all_gather
        assert set(counted) <= {"pcp.all_gather", "tp.all_reduce", "tp.all_gather"}
        assert output.stats.rank_tokens == parts.num_tokens.tolist()
        assert output.stats.rank_causal_pairs == parts.causal_pairs.tolist()
        kinds.add((bool(parts.num_prefill_tokens.any()), bool(parts.num_decode_tokens.any())))
    assert kinds >= {(True, False), (False, True)}, "the steps do not cover prefill and decode"


def test_a_chunk_that_is_not_the_last_moves_no_hidden_state(llm: LLM) -> None:
    config = llm.engine.config
    step, output = record(llm, [200], max_tokens=1)[0]
    if config.parallel.prefill_context_parallel_size == 1:
        assert "pcp.all_gather" not in output.stats.calls, "one PCP rank sends nothing"
        return
    parts, _ = partition_of(llm, step, {})
    token_bytes = config.model.num_layers * config.model.mla.token_dim * 4
    assert sum(step.num_scheduled_tokens.values()) < 200
    assert output.stats.bytes_sent["pcp.all_gather"] == parts.num_prefill_tokens.max() * token_bytes
    assert output.stats.calls["pcp.all_gather"] == config.model.num_layers


def test_a_decode_step_does_one_pcp_collective(llm: LLM) -> None:
    steps = record(llm, [9, 5, 12], max_tokens=6)
    decode = [output for step, output in steps if set(step.num_scheduled_tokens.values()) == {1}]
    assert len(decode) >= 5
    for output in decode:
        expected = 0 if llm.engine.config.parallel.prefill_context_parallel_size == 1 else 1
        assert output.stats.calls.get("pcp.all_gather", 0) == expected
