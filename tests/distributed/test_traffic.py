"""Bytes moved per step: what the groups count is what the formulas say, and no more is moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from prefold import LLM, SamplingParams
from prefold.attention.plan import StepPlan
from prefold.attention.shared_decode import SharedWork
from prefold.config import EngineConfig
from prefold.distributed.mesh import Coords, Mesh
from prefold.distributed.pcp_layout import Partition, TokenOrder, partition
from prefold.kv_ownership import KVOwnership
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import layout_options
from prefold.testing.thread_executor import ThreadExecutor, ThreadLLM
from prefold.traffic import (
    ShardedTokens,
    dispatch_rows,
    expert_bytes,
    expert_bytes_all_gather_form,
    sparse_traffic,
    step_traffic,
)
from prefold.worker.model_runner import ModelRunner

OPTIONS = {
    "block_size": 4,
    "num_blocks": 500,
    "max_num_batched_tokens": 40,
    "min_split_tokens": 1,
    "context_attention": "local",
}
LAYOUTS = [
    *("TP2", "PCP3", "TP2 PCP2", "PP2", "PP2 PCP2", "PP3 TP2 PCP2", "DP2", "PCP2 EP", "TP2 EP", "DP2 EP"),
    *("TP2 PCP2 EP", "DP2 PCP2 EP", "DP2 TP2 EP", "PP2 TP2 PCP2 EP"),
]
FIRST = Coords(dp=0, pp=0, pcp=0, tp=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3"))


class Recorder:
    """An executor that remembers every replica's steps and their results."""

    def __init__(self, llm: LLM) -> None:
        self._executor = llm.engine.core.executor
        replicas = range(llm.engine.config.parallel.data_parallel_size)
        self.steps: list[list[SchedulerOutput]] = [[] for _ in replicas]
        self.outputs: list[list[ModelRunnerOutput]] = [[] for _ in replicas]

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        self._executor.submit(replica, step)
        self.steps[replica].append(step)

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        replica, output = self._executor.receive()
        self.outputs[replica].append(output)
        return replica, output

    def shutdown(self) -> None:
        self._executor.shutdown()


def record(llm: LLM, lengths: Sequence[int], max_tokens: int) -> Recorder:
    original = llm.engine.core.executor
    recorder = Recorder(llm)
    llm.engine.core.executor = recorder
    try:
        prompts = [[7 * i % 100 + length for i in range(length)] for length in lengths]
        for scheduler in llm.engine.schedulers:
            scheduler.reset_prefix_cache()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    finally:
        llm.engine.core.executor = original
    return recorder


def partitions_of(
    config: EngineConfig, steps: Sequence[SchedulerOutput], decode_unit: int = 1
) -> Iterator[tuple[Partition, np.ndarray]]:
    """(partition, wanted hidden rows per rank) of a replica's steps, from the messages alone."""
    known: dict[str, tuple[int, int]] = {}  # id -> (prefill tokens, tokens)
    for step in steps:
        computed = {r.request_id: r.num_computed_tokens for r in (*step.new_requests, *step.cached_requests)}
        for new in step.new_requests:
            known[new.request_id] = (new.num_prefill_tokens, len(new.token_ids))
        for cached in step.cached_requests:
            prefill, tokens = known[cached.request_id]
            known[cached.request_id] = (prefill, tokens + len(cached.new_token_ids))
        ids = list(step.num_scheduled_tokens)
        num_computed = np.array([computed[i] for i in ids], np.int64)
        num_scheduled = np.array([step.num_scheduled_tokens[i] for i in ids], np.int64)
        is_prefill = num_computed < np.array([known[i][0] for i in ids], np.int64)
        size = config.parallel.prefill_context_parallel_size
        parts = partition(
            num_computed, num_scheduled, is_prefill, size=size, min_split_tokens=1, decode_unit=decode_unit
        )
        ends = np.cumsum(num_scheduled)
        sampled = num_computed + num_scheduled == np.array([known[i][1] for i in ids], np.int64)
        ranks, _ = TokenOrder.of(parts, np.concatenate([[0], ends])).locate(ends[sampled] - 1)
        yield parts, np.bincount(ranks, minlength=size)


# Every layout, every rank


class SentIds:
    """Experts of the tokens that each rank sends, by rank and layer call."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self.by_rank: list[list[np.ndarray]] = []
        for runner in executor.runners:
            calls: list[np.ndarray] = []
            self.by_rank.append(calls)
            if (parallel := runner._experts) is not None:
                parallel.dispatch = self._noting(parallel, parallel.dispatch, calls)

    @staticmethod
    def _noting(parallel, dispatch, calls):
        def noting(x, weights, ids):
            calls.append(ids.numpy()[parallel.share.rows])
            return dispatch(x, weights, ids)

        return noting

    def num_bytes(self, config: EngineConfig, rank: int) -> int:
        """What a rank's dispatches and answers have sent to others, summed over layers and steps."""
        group = Mesh.of(config.parallel).group_of("ep", rank)
        model, total = config.model, 0
        for ids in zip(*(self.by_rank[peer] for peer in group), strict=True):
            rows = dispatch_rows(ids, model.moe.num_experts)
            sent = expert_bytes(rows, model.hidden_size, model.moe.top_k, 4)[group.index(rank)]
            most = max(len(own) for own in ids)
            form = expert_bytes_all_gather_form(most, len(group), model.hidden_size, model.moe.top_k, 4)
            assert sent <= form
            total += int(sent)
        return total


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers whose tokens have an index key, and one whose tokens have none."""
    return make_checkpoint("GlmMoeDsaForCausalLM", tmp_path_factory.mktemp("glm-dsa"))


@pytest.mark.parametrize("layout", ["TP2 PCP2", "PP2 PCP2 EP"])
def test_sparse_attention_gathers_index_keys_with_the_rest(sparse_folder: Path, layout: str) -> None:
    """One all-gather per layer: the formula counts bytes, the calls are those of dense attention."""
    check_every_rank(sparse_folder, layout)
    with ThreadLLM(str(sparse_folder), **OPTIONS, **layout_options("PCP2")) as llm:
        recorder = record(llm, [200], max_tokens=1)
        assert recorder.outputs[0][0].stats.calls["pcp.all_gather"] == llm.engine.config.model.num_layers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_sends_what_the_formula_says(folder: Path, layout: str) -> None:
    check_every_rank(folder, layout)


@pytest.mark.parametrize("layout", ["PCP3", "PP2 PCP2"])
def test_rows_in_fp8_travel_as_they_are_stored(folder: Path, sparse_folder: Path, layout: str) -> None:
    """Also index keys, where there are any."""
    for model in (folder, sparse_folder):
        check_every_rank(model, layout, kv_cache_dtype="fp8")
    with ThreadLLM(str(folder), **OPTIONS, **layout_options("PCP2"), kv_cache_dtype="fp8") as llm:
        mla, num_layers = llm.engine.config.model.mla, llm.engine.config.model.num_layers
        assert (mla.kv_lora_rank, mla.qk_rope_head_dim) == (32, 8)
        (output,) = record(llm, [60], max_tokens=1).outputs[0]
        # 2 * 8 + 32 + 1, padded to 64. The last token is on the rank that samples.
        assert output.stats.bytes_sent["pcp.all_gather"] == num_layers * 30 * 64


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *(("PCP2 DCP2", "kv"), ("TP2 DCP2", "query"), ("PCP4 DCP2", "query"), ("PP2 PCP2 DCP2", "query")),
        *(("TP2 PCP2 DCP4", "query"), ("TP2 PCP2 DCP4", "kv")),
    ],
)
def test_sparse_attention_over_shards(sparse_folder: Path, layout: str, way: str) -> None:
    """Prefill with and without context, decode, both in one step; index_topk is above and below the keys."""
    options = {"check_step_plans": "off", "cp_kv_cache_interleave_size": 2, **layout_options(layout)}
    with ThreadLLM(str(sparse_folder), **OPTIONS | {"context_attention": way}, **options) as llm:
        config, executor = llm.engine.config, llm.executor
        plans = [record_plans(runner) for runner in executor.runners]
        recorder = record(llm, [200, 3, 57, 1, 9], max_tokens=3)
        executor.synchronize()
        ownership = executor.runners[0]._ownership
        unit = executor.groups[0]["dcp_pcp"].size
        parts = list(partitions_of(config, recorder.steps[0], unit))
        mesh, kinds = Mesh.of(config.parallel), set()
        for rank, groups in enumerate(executor.groups):
            at, expected = mesh.coords(rank), Counter()
            for (part, wanted), plan in zip(parts, plans[rank], strict=True):
                num_sent = int(plan.sent_decode.max())
                expected.update(step_traffic(config, part, at, wanted, int(wanted.sum()), num_sent))
                tokens, rows = sharded_of(plan, ownership, config.model.dsa.index_topk)
                expected.update(sparse_traffic(config, at, tokens, rows))
                kinds.update(
                    ["visitors" if some.counts else "decode" for some in tokens] + ["rows"] * (rows > 0)
                )
            counted = Counter({key: n for group in groups.values() for key, (_, n) in group.traffic.items()})
            assert +counted == +expected, (rank, at)
        assert kinds == {"decode", {"query": "visitors", "kv": "rows"}[way]}


def record_plans(runner: ModelRunner) -> list[StepPlan]:
    plans: list[StepPlan] = []
    attention, begin_step = runner._attention, runner._attention.begin_step

    def recording(plan: StepPlan) -> None:
        plans.append(plan)
        begin_step(plan)

    attention.begin_step = recording
    return plans


def sharded_of(plan: StepPlan, ownership: KVOwnership, topk: int) -> tuple[list[ShardedTokens], int]:
    """The arguments of `sparse_traffic`."""

    def sharded(counts: tuple[int, ...], works: Sequence[SharedWork]) -> ShardedTokens:
        longest = max(int(work.positions.max()) for work in works) + 1
        num_tokens = sum(len(work.positions) for work in works)
        return ShardedTokens(counts, num_tokens, min(topk, int(ownership.local_lengths(longest).max())))

    tokens = [sharded(piece.counts, piece.works) for piece in plan.visits]
    if plan.shared_decode is not None:
        tokens.append(sharded((), plan.shared_decode.shared_works()))
    return tokens, sum(tile.num_rows for tile in plan.kv_tiles)


def check_every_rank(folder: Path, layout: str, kv_cache_dtype: str = "auto") -> None:
    """Summed over the steps: the ranks of a pipeline or of several replicas are in different ones."""
    options = {"check_step_plans": "off", "kv_cache_dtype": kv_cache_dtype, **layout_options(layout)}
    with ThreadLLM(str(folder), **OPTIONS, **options) as llm:
        config, executor = llm.engine.config, llm.executor
        ids = SentIds(executor)
        recorder = record(llm, [100, 3, 57, 1, 1], max_tokens=5)
        executor.synchronize()
        parts = [list(partitions_of(config, steps)) for steps in recorder.steps]
        mesh = Mesh.of(config.parallel)
        for rank, groups in enumerate(executor.groups):
            at, expected = mesh.coords(rank), Counter()
            for part, wanted in parts[at.dp]:
                expected.update(step_traffic(config, part, at, wanted, int(wanted.sum())))
            expected["ep.all_to_all"] = ids.num_bytes(config, rank)
            counted = Counter({key: n for group in groups.values() for key, (_, n) in group.traffic.items()})
            assert +counted == +expected, (rank, at)
        assert ("EP" in layout) == any(ids.by_rank)


# Processes, step by step


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options = {"threads_per_rank": 1, "skip_tokenizer_init": True, **layout_options("TP2 PCP2")}
    with LLM(str(folder), **OPTIONS, **options) as engine:
        yield engine


def test_counted_bytes_equal_the_formula(llm: LLM) -> None:
    config = llm.engine.config
    recorder = record(llm, [100, 3, 57, 1, 1], max_tokens=5)
    kinds = set()
    steps = zip(partitions_of(config, recorder.steps[0]), recorder.outputs[0], strict=True)
    for (parts, wanted), output in steps:
        assert output.stats.bytes_sent == step_traffic(config, parts, FIRST, wanted, int(wanted.sum()))
        assert output.stats.rank_tokens == parts.num_tokens.tolist()
        assert output.stats.rank_causal_pairs == parts.causal_pairs.tolist()
        kinds.add((bool(parts.num_prefill_tokens.any()), bool(parts.num_decode_tokens.any())))
    assert kinds >= {(True, False), (False, True)}, "the steps do not cover prefill and decode"


def test_a_chunk_that_is_not_the_last_moves_no_hidden_state(llm: LLM) -> None:
    config = llm.engine.config
    recorder = record(llm, [200], max_tokens=1)
    step, output = recorder.steps[0][0], recorder.outputs[0][0]
    parts, _ = next(partitions_of(config, [step]))
    token_bytes = config.model.num_layers * config.model.mla.token_dim * 4
    assert sum(step.num_scheduled_tokens.values()) < 200
    assert output.stats.bytes_sent["pcp.all_gather"] == parts.num_prefill_tokens.max() * token_bytes
    assert output.stats.calls["pcp.all_gather"] == config.model.num_layers


def test_a_decode_step_does_one_pcp_collective(llm: LLM) -> None:
    recorder = record(llm, [9, 5, 12], max_tokens=6)
    decode = [
        output
        for step, output in zip(recorder.steps[0], recorder.outputs[0])
        if set(step.num_scheduled_tokens.values()) == {1}
    ]
    assert len(decode) >= 5
    assert all(output.stats.calls["pcp.all_gather"] == 1 for output in decode)
