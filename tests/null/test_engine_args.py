"""Options resolved to a configuration: the KV cache's capacity over DCP and PP, defaults, refusals."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from prefold.config import EngineConfig
from prefold.engine import args as args_module
from prefold.engine.args import DEFAULT_KV_CACHE_SHARE, EngineArgs
from prefold.engine.engine import LLMEngine
from prefold.engine.weight_memory import held_weight_bytes
from prefold.memory import plan_memory
from prefold.memory.buffers import buffer_bytes
from prefold.memory.messages import slots_bytes
from prefold.memory.step import LargestStep

GB = 10**9

BYTES_PER_TOKEN = (16 + 4) * 4
"""And layer."""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineArgs:
    """6 layers, 8 heads, 8 experts; weights are not looked for."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 10_000,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(args_module, "check_checkpoint_files", lambda path: {})
    monkeypatch.setattr(args_module, "available_cores", lambda: 64)
    return EngineArgs(str(tmp_path), block_size=4, num_blocks=10)


def capacity(config: EngineConfig) -> int:
    return config.cache.num_blocks * config.virtual_block_size


@pytest.mark.parametrize(("dcp", "pcp", "tp"), [(1, 4, 1), (2, 4, 1), (4, 4, 1), (4, 2, 2), (2, 1, 2)])
def test_equal_memory_holds_dcp_times_the_tokens(base: EngineArgs, dcp: int, pcp: int, tp: int):
    sizes = {
        "prefill_context_parallel_size": pcp,
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
    }
    config = replace(base, **sizes).resolve()
    assert config.cache.num_blocks == 10
    assert config.virtual_block_size == 4 * dcp
    assert capacity(config) == 40 * dcp
    # The last token generated needs no slot.
    assert config.scheduler.max_model_len == 40 * dcp + 1
    by_memory = replace(
        base, num_blocks=None, kv_cache_memory_bytes=6 * BYTES_PER_TOKEN * 4 * 10 + 3, **sizes
    )
    assert by_memory.resolve().cache.num_blocks == 10
    with pytest.raises(ValueError, match=f"max_model_len={40 * dcp + 2}.* allow {40 * dcp + 1}"):
        replace(base, max_model_len=40 * dcp + 2, **sizes).resolve()


def test_the_error_says_how_many_ranks_share(base: EngineArgs):
    options = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    message = "its 10 blocks of 4 tokens on each of 2 DCP ranks allow 81"
    with pytest.raises(ValueError, match=message):
        replace(base, max_model_len=100, **options).resolve()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "stored", "row_bytes"),
    [
        ("auto", "float32", 4 * 20),
        ("bf16", "bfloat16", 2 * 20),
        ("bfloat16", "bfloat16", 2 * 20),
        # 16 codes, their scale and 4 bfloat16, padded.
        ("fp8", "fp8_e4m3", 32),
        ("fp8_e4m3", "fp8_e4m3", 32),
    ],
)
def test_memory_holds_rows_as_they_are_stored(
    base: EngineArgs, kv_cache_dtype: str, stored: str, row_bytes: int, caplog: pytest.LogCaptureFixture
):
    memory = 6 * row_bytes * 4 * 13 + 5  # 13 blocks of 4 tokens in 6 layers
    options = replace(base, num_blocks=None, kv_cache_memory_bytes=memory, kv_cache_dtype=kv_cache_dtype)
    config = options.resolve()
    assert (config.cache.cache_dtype, config.cache.num_blocks) == (stored, 13)
    with caplog.at_level(logging.INFO, "prefold"):
        LLMEngine(config, executor=NoExecutor())
    assert f"weights float32, KV cache {stored}" in caplog.text


@pytest.mark.parametrize(("pp", "layers"), [(1, 6), (2, 3), (3, 2), (4, 2), (6, 1)])
def test_a_stage_holds_its_own_layers_only(base: EngineArgs, pp: int, layers: int):
    memory = layers * BYTES_PER_TOKEN * 4 * 10
    options = replace(base, num_blocks=None, pipeline_parallel_size=pp)
    assert replace(options, kv_cache_memory_bytes=memory).resolve().cache.num_blocks == 10
    assert replace(options, kv_cache_memory_bytes=memory - 1).resolve().cache.num_blocks == 9
    with pytest.raises(ValueError, match=f"4 tokens takes {layers * 320} bytes in the {layers} layers"):
        replace(options, kv_cache_memory_bytes=layers * 320 - 1).resolve()


@pytest.mark.parametrize(("dcp", "blocks"), [(1, 25), (2, 13), (4, 7)])
def test_no_more_blocks_than_requests_can_use(base: EngineArgs, dcp: int, blocks: int):
    options = replace(
        base,
        num_blocks=None,
        kv_cache_memory_bytes=10**8,
        max_num_seqs=3,
        max_model_len=100,
        prefill_context_parallel_size=4,
        decode_context_parallel_size=dcp,
    )
    assert options.resolve().cache.num_blocks == 3 * blocks


@pytest.mark.parametrize(
    ("given", "pp", "expected"), [(None, 1, 8192), (None, 2, 2048), (7, 1, 7), (7, 2, 7), (9000, 3, 9000)]
)
def test_tokens_of_a_step(base: EngineArgs, given: int | None, pp: int, expected: int):
    config = replace(base, max_num_batched_tokens=given, pipeline_parallel_size=pp).resolve()
    assert config.scheduler.max_num_batched_tokens == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"pipeline_parallel_size": 2}, False),
        ({"prefill_context_parallel_size": 2}, True),
        ({"tensor_parallel_size": 2}, True),
        ({"tensor_parallel_size": 2, "transport": "gloo"}, False),
        ({"tensor_parallel_size": 2, "transport": "gloo", "check_step_plans": "on"}, True),
        ({"tensor_parallel_size": 2, "check_step_plans": "off"}, False),
        ({"check_step_plans": "on"}, True),
    ],
)
def test_plans_are_compared_where_that_is_cheap(base: EngineArgs, options: dict, expected: bool):
    assert replace(base, **options).resolve().runtime.check_step_plans is expected


def test_every_axis_reaches_the_configuration(base: EngineArgs):
    config = replace(
        base,
        tensor_parallel_size=2,
        prefill_context_parallel_size=3,
        decode_context_parallel_size=6,
        pipeline_parallel_size=2,
        data_parallel_size=4,
        enable_expert_parallel=True,
        cp_kv_cache_interleave_size=2,
        context_attention="sliced",
        check_step_plans="off",
    ).resolve()
    parallel = config.parallel
    assert (parallel.tensor_parallel_size, parallel.prefill_context_parallel_size) == (2, 3)
    assert (parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size) == (6, 2)
    assert (parallel.pipeline_parallel_size, parallel.data_parallel_size) == (2, 4)
    assert parallel.enable_expert_parallel
    assert parallel.world_size == 48
    assert (config.runtime.context_attention, config.runtime.check_step_plans) == ("sliced", False)
    assert config.digest() != replace(config, parallel=replace(parallel, data_parallel_size=2)).digest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2 .*legal: 1$"),
        ({"decode_context_parallel_size": 0}, "decode_context_parallel_size=0 must be at least 1"),
        ({"pipeline_parallel_size": 7}, "pipeline_parallel_size=7 .*num_hidden_layers=6"),
        ({"data_parallel_size": 0}, "data_parallel_size=0 must be at least 1"),
        ({"cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size=3 does not divide block_size=4"),
        ({"tensor_parallel_size": 3}, "num_attention_heads=8 is not divisible by tensor_parallel_size=3"),
        ({"prefill_context_parallel_size": 5000}, "5000 ranks x 1 threads are too many for 64 cores"),
        ({"threads_per_rank": 5000}, "1 ranks x 5000 threads are too many for 64 cores: at most 64 threads"),
        ({"min_split_tokens": -1}, "min_split_tokens=-1 must be at least 0"),
        ({"collective_timeout_s": 0.0}, r"collective_timeout_s=0.0 must be more than 0 seconds"),
        ({"collective_timeout_s": math.nan}, "collective_timeout_s=nan must be more"),
        ({"trace": "."}, r"trace='\.' is a folder"),
        (
            {"trace": "/nowhere/t.json"},
            "cannot be written: there is no folder /nowhere",
        ),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not one of auto, .*fp8_e4m3"),
        (
            {"context_attention": "best"},
            "context_attention='best' is not one of auto, local, sliced",
        ),
    ],
)
def test_what_cannot_be(base: EngineArgs, options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        replace(base, **options).resolve()


def test_the_log_says_what_runs_and_how_much_fits(base: EngineArgs, caplog: pytest.LogCaptureFixture):
    options = replace(
        base,
        tensor_parallel_size=2,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=4,
        pipeline_parallel_size=3,
        data_parallel_size=2,
        enable_expert_parallel=True,
        threads_per_rank=1,
    )
    with caplog.at_level(logging.INFO, "prefold"):
        LLMEngine(options.resolve(), executor=NoExecutor())
    text = caplog.text
    assert "24 rank(s) = DP 2 x PP 3 x PCP 2 x TP 2, DCP 4, EP on" in text
    assert "KV cache of a rank: 10 blocks of 4 tokens = 40 tokens" in text
    assert "160 tokens in each of 2 replica(s)" in text
    assert "4 tokens on each of 4 DCP rank(s) = 16 tokens" in text


class NoExecutor:
    """Of an engine that takes no step."""

    def submit(self, replica: int, step: object) -> None:
        raise AssertionError

    def receive(self) -> tuple[int, object]:
        raise AssertionError

    def execute(self, step: object) -> object:
        raise AssertionError

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def with_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(args_module, "available_memory", lambda: free)


def test_the_default_cache_is_a_share_of_what_is_left(base: EngineArgs, monkeypatch: pytest.MonkeyPatch):
    with_memory(monkeypatch, 4 * GB)
    for layout in ({}, {"prefill_context_parallel_size": 2}, {"pipeline_parallel_size": 3}):
        config = replace(base, num_blocks=None, max_num_seqs=1000, **layout).resolve()
        weights = held_weight_bytes(config.model, config.parallel, {}, "expanded")
        plan = plan_memory(config, weights, 4 * GB)
        rest = plan.free - plan.num_ranks * (plan.rank.total - plan.rank.kv_cache)
        share = plan.num_ranks * plan.rank.kv_cache / rest
        assert 0.95 * DEFAULT_KV_CACHE_SHARE < share <= 1.02 * DEFAULT_KV_CACHE_SHARE


def test_what_does_not_fit_is_refused_with_the_numbers(base: EngineArgs, monkeypatch: pytest.MonkeyPatch):
    with_memory(monkeypatch, GB)
    with pytest.raises(ValueError, match=r"KV 1\.23 GB, .* of 1\.00 GB free\. Lower kv_cache_memory_bytes"):
        replace(base, num_blocks=None, kv_cache_memory_bytes=2 * GB).resolve()
    with pytest.raises(ValueError, match=r"16 ranks: 2\.\d\d of 1\.00 GB free\. Weights and processes"):
        replace(base, data_parallel_size=16, num_blocks=100, max_num_batched_tokens=64).resolve()


def test_largest_steps_that_do_not_fit_are_a_warning(
    base: EngineArgs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Most workloads have smaller ones; the default cache leaves as much as it takes."""
    with_memory(monkeypatch, GB)
    replace(base, num_blocks=1000, max_num_batched_tokens=10**4).resolve()
    assert "may not fit" not in caplog.text
    config = replace(base, num_blocks=None, max_num_seqs=10**4, max_num_batched_tokens=10**6).resolve()
    assert "may not fit into memory; to be safe, lower max_num_batched_tokens" in caplog.text
    plan = plan_memory(config, held_weight_bytes(config.model, config.parallel, {}, "expanded"), GB)
    rest = GB - plan.rank.fixed + plan.rank.kv_cache
    assert 0.9 * DEFAULT_KV_CACHE_SHARE < plan.rank.kv_cache / (rest / 2) <= 1.02 * DEFAULT_KV_CACHE_SHARE


def test_the_workspace_grows_with_steps_and_not_with_the_cache(base: EngineArgs):
    def sizes(**options: int) -> tuple[int, int]:
        config = replace(base, max_model_len=300, prefill_context_parallel_size=2, **options).resolve()
        step = LargestStep.of(config, 0, native=True)
        buffers = buffer_bytes(step)
        assert config.runtime.workspace_bytes == sum(buffers.values())
        return sum(buffers.values()), sum(slots_bytes(step, buffers).values())

    one = sizes(num_blocks=100, max_num_batched_tokens=1000)
    assert sizes(num_blocks=1000, max_num_batched_tokens=1000) == one
    more = sizes(num_blocks=100, max_num_batched_tokens=2000)
    assert 1.3 < more[0] / one[0] < 2
    assert 1.3 < more[1] / one[1] < 2.3
