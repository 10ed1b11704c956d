"""What an engine's ranks on this machine need of its memory, and whether that is there."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from prefold.config import EngineConfig
from prefold.distributed.layouts import fullest_kv_spec
from prefold.memory.buffers import buffer_bytes, logits_rows
from prefold.memory.messages import slots_bytes
from prefold.memory.step import FLOAT, LargestStep

PROCESS_BYTES = 100 << 20
"""What a rank takes before it has anything to compute: Python and torch."""

GB = 1e9


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        weights: as they are held.
        kv_cache: all of its blocks.
        workspace: at most; it grows with the steps that come.
        slots: shared memory for messages, at most.
        other: the process itself, tables, states of requests, logits.
    """

    weights: int
    kv_cache: int
    workspace: int
    slots: int
    other: int

    @property
    def fixed(self) -> int:
        """What is taken whatever requests come."""
        return self.weights + self.kv_cache + self.other

    @property
    def total(self) -> int:
        return self.fixed + self.workspace + self.slots


@dataclass(frozen=True)
class MemoryPlan:
    """Of the ranks on this machine.

    Attributes:
        rank: the fullest one. They are all counted as such.
        num_ranks: on this machine.
        free: bytes that could be used before anything was started.
    """

    rank: RankMemory
    num_ranks: int
    free: int

    @property
    def needed(self) -> int:
        return self.rank.total * self.num_ranks

    @property
    def left(self) -> int:
        """Bytes that are free beside all this; at least half of those beside what is fixed, because few
        workloads have the largest steps of all kinds."""
        beside_fixed = self.free - self.rank.fixed * self.num_ranks
        return max(self.free - self.needed, beside_fixed // 2)

    def describe(self) -> str:
        """One line for the log.

        >>> rank = RankMemory(340 << 20, 1 << 30, 310 << 20, 64 << 20, 200 << 20)
        >>> MemoryPlan(rank, num_ranks=2, free=23 << 30).describe().split("; ")[1]
        '2 ranks: 4.06 of 24.70 GB free'
        """
        rank = self.rank
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return (
            f"memory per rank: weights {rank.weights / GB:.2f} GB, KV {rank.kv_cache / GB:.2f} GB, workspace "
            f"at most {rank.workspace / GB:.2f} GB, shared slots {rank.slots / GB:.2f} GB, other "
            f"{rank.other / GB:.2f} GB; {ranks}: {self.needed / GB:.2f} of {self.free / GB:.2f} GB free"
        )

    def check(self) -> None:
        """ValueError with the numbers, and what to lower, if what is fixed is more than is free."""
        rank = self.rank
        if rank.fixed * self.num_ranks <= self.free:
            return
        if (rank.weights + rank.other) * self.num_ranks > self.free:
            advice = (
                "Weights and processes alone do not: fewer ranks, more machines, or a quantised checkpoint"
            )
        else:
            advice = "Lower kv_cache_memory_bytes (or num_blocks)"
        raise ValueError(f"this does not fit into memory: {self.describe()}. {advice}")

    @property
    def warning(self) -> str:
        """What to lower if the largest steps would not fit; empty if they do."""
        if self.needed <= self.free:
            return ""
        return (
            "the largest steps may not fit into memory; to be safe, lower max_num_batched_tokens, "
            "max_num_seqs or max_model_len"
        )


def native_kernels() -> bool:
    """Whether the native kernels were built; what they are made of is not imported."""
    return find_spec("prefold.kernels._native") is not None


def plan_workspace(config: EngineConfig, stage: int) -> dict[str, int]:
    """Bytes of the buffers of a rank of this pipeline stage, at most, by name."""
    native = config.runtime.device == "cpu" and native_kernels()
    return buffer_bytes(LargestStep.of(config, stage, native))


def plan_memory(config: EngineConfig, weight_bytes: int, free: int) -> MemoryPlan:
    """The plan of a resolved configuration.

    Args:
        weight_bytes: of the fullest rank.
        free: see MemoryPlan.
    """
    parallel, cache = config.parallel, config.cache
    num_ranks = parallel.world_size // parallel.nnodes
    native = config.runtime.device == "cpu" and native_kernels()
    workspace = slots = other = 0
    for stage in range(parallel.pipeline_parallel_size):
        step = LargestStep.of(config, stage, native)
        buffers = buffer_bytes(step)
        workspace = max(workspace, sum(buffers.values()))
        slots = max(slots, sum(slots_bytes(step, buffers).values()))
        other = max(other, _other_bytes(step))
    spec = fullest_kv_spec(config.model, parallel, cache.block_size, cache.cache_dtype)
    kv_cache = cache.num_blocks * spec.bytes_per_block
    return MemoryPlan(RankMemory(weight_bytes, kv_cache, workspace, slots, other), num_ranks, free)


def _other_bytes(step: LargestStep) -> int:
    config, vocab = step.config, step.config.model.vocab_size
    scheduler, cache = config.scheduler, config.cache
    table = scheduler.max_model_len * config.model.rope.dim * FLOAT
    # Token ids of requests are written as they come, and each has its KV in the cache.
    ids = (
        min(scheduler.max_num_seqs * scheduler.max_model_len, cache.num_blocks * config.virtual_block_size)
        * 4
    )
    blocks = scheduler.max_num_seqs * -(-scheduler.max_model_len // config.virtual_block_size) * 8
    logits = 2 * logits_rows(step) * vocab * FLOAT if step.layers.stop == config.model.num_layers else 0
    return PROCESS_BYTES + table + ids + blocks + logits
