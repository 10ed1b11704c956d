"""What a user may set, and how the rest is decided: `EngineArgs` -> `EngineConfig`, once."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from prefold.checkpoint_files import TensorEntry, check_checkpoint_files
from prefold.config import (
    DTYPES,
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from prefold.distributed.layouts import check_context_attention, check_layout, fullest_kv_spec
from prefold.engine.weight_memory import WEIGHT_MEMORY, held_weight_bytes, resolve_weight_memory
from prefold.hardware import available_cores, available_memory, fast_bfloat16
from prefold.hf_config import load_model_config
from prefold.kv_spec import CACHE_DTYPES, resolve_cache_dtype
from prefold.memory import MemoryPlan, plan_memory
from prefold.tracing import checked_trace_path

logger = logging.getLogger("prefold")

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Most that a rank's KV cache takes unless told otherwise."""
DEFAULT_KV_CACHE_SHARE = 0.4
"""And at most this share of what all ranks leave free otherwise."""
DEFAULT_STEP_TOKENS = 8192
DEFAULT_PIPELINE_STEP_TOKENS = 2048
"""Smaller in a pipeline: its stages work on different chunks of a prompt at the same time."""

MOST_THREADS_PER_CORE = 64
"""Of all ranks of a machine, so that a slip of the finger does not start a hundred thousand processes."""

CONTEXT_ATTENTION = ("auto", "local", "sliced", "query", "kv")
"""Choices of `context_attention`."""


@dataclass(frozen=True)
class EngineArgs:
    """Options of an engine, under vLLM's names where vLLM has them."""

    model: str
    """Folder of a Hugging Face checkpoint."""
    tensor_parallel_size: int = 1
    """Ranks that split heads and hidden dimensions (TP)."""
    prefill_context_parallel_size: int = 1
    """Ranks that split the tokens of a prompt (PCP)."""
    decode_context_parallel_size: int = 1
    """Ranks over which the KV cache of a sequence is spread (DCP). Adds no ranks: they are those of
    PCP x TP. Legal are the divisors of PCP, and PCP times a divisor of TP."""
    cp_kv_cache_interleave_size: int = 1
    """Consecutive tokens of a sequence on one DCP rank; divides block_size."""
    enable_expert_parallel: bool = False
    """Spread whole experts over the DP x PCP x TP ranks of a stage (EP), rather than a share of every
    expert over TP. Adds no ranks."""
    pipeline_parallel_size: int = 1
    """Stages that split the layers (PP)."""
    data_parallel_size: int = 1
    """Replicas that split the requests (DP). The engine runs DP x PP x PCP x TP ranks."""
    nnodes: int = 1
    """Machines, over which the ranks are spread evenly, in order."""
    node_rank: int = 0
    """Which of them this is. The engine runs on node 0; the others start ranks for it (see `run_node`)."""
    master_addr: str | None = None
    """Address of node 0, where the engine waits for the other nodes."""
    master_port: int = 29501
    """Port for the same."""
    nproc_per_node: int = 1
    """Processes on each node that start an equal part of its ranks: torchrun has one per rank."""
    local_rank: int = 0
    """Which of them this is."""
    dtype: str = "auto"
    """Of weights: auto (the checkpoint's), float32 or bfloat16."""
    kv_cache_dtype: str = "auto"
    """How the KV cache is stored: auto (as `dtype` says), float32, bfloat16 (bf16), or fp8_e4m3 (fp8): a byte
    per element (kv_spec, kernels.fp8)."""
    weight_memory: str = "auto"
    """Quantised weights: expanded to dtype when loaded, quantized (as they are stored, decoded at each use:
    less memory), or auto: expanded where that takes at most half of the free memory."""
    compute_dtype: str = "auto"
    """Of activations and matrix multiplications: auto (the faster one on this machine, never less
    precise than dtype), float32 or bfloat16."""
    max_model_len: int | None = None
    """Longest prompt plus output. Default: the model's own limit, or what the KV cache holds."""
    max_num_batched_tokens: int | None = None
    """Tokens that one rank computes per step; a step holds up to PCP times as many. Default: 8192, or
    2048 in a pipeline, which several chunks of a prompt must fill."""
    max_num_seqs: int = 256
    """Requests that run at the same time."""
    block_size: int = 32
    """Tokens per block of the KV cache on a rank; times DCP, the unit of prefix cache hits."""
    num_blocks: int | None = None
    """Blocks of the KV cache on each rank. Default: from kv_cache_memory_bytes."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache on each rank. Default: up to 4 GiB and, over all ranks, 40 % of the memory that
    weights, workspace and shared memory leave free, and no more than the requests can use."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    seed: int = 0
    """Seed of the requests that bring none."""
    threads_per_rank: int | None = None
    """CPU threads of a rank. Default: cores / ranks, at least 1."""
    pin_threads: bool = True
    """Bind each worker process to its own cores (not where the single rank runs in process)."""
    device: str = "cpu"
    """cpu or cuda."""
    context_workspace_tokens: int = 1024
    """Context tokens that attention reads and up-projects at a time."""
    min_split_tokens: int = 32
    """Prompts shorter than this stay whole on one PCP rank."""
    transport: str = "shm"
    """How ranks of one host exchange data: shm (shared memory) or gloo."""
    collective_timeout_s: float = 300.0
    """A collective that takes longer fails and names the ranks that did not arrive."""
    enforce_eager: bool = False
    """Compute every step from Python. Default: decode steps are recorded, and replayed without it."""
    debug_poison: bool = False
    """Fill unused KV and reused buffers with NaN, to find reads of stale memory. Slow."""
    context_attention: str = "auto"
    """For debugging: how prompts attend to their cached context: auto (by cost), or one of local,
    sliced, query and kv wherever it is possible."""
    share_projections: str = "auto"
    """PCP ranks share the up-projected keys and values of a prompt's new tokens, rather than each project all
    of them: on, off, or auto (by cost, where ranks share memory)."""
    check_step_plans: str = "auto"
    """Ranks compare a checksum of every step's plan, and fail if it differs: on, off, or auto (where ranks
    of a stage share memory, which makes it cheap)."""
    trace: str | None = None
    """File for a trace of all steps on all ranks of this machine, for Perfetto or chrome://tracing."""

    def resolve(self) -> EngineConfig:
        """Read the checkpoint's config and settle every setting.

        Raises:
            ValueError: naming the option, its value and what is legal.
        """
        self.check()
        model = load_model_config(self.model, dtype=self.dtype)
        parallel = ParallelConfig.of(self)
        check_layout(model, parallel, self.block_size)
        check_context_attention(model, parallel, self.context_attention)
        entries = check_checkpoint_files(model.path)
        asked = self.weight_memory if self.device == "cpu" else "expanded"
        weight_memory = resolve_weight_memory(asked, model, parallel, entries)
        longest = self.max_model_len or model.max_position_embeddings
        cache_dtype = resolve_cache_dtype(self.kv_cache_dtype, model.dtype)
        draft = EngineConfig(
            model=model,
            parallel=parallel,
            cache=CacheConfig(self.block_size, 1, self.enable_prefix_caching, cache_dtype),
            scheduler=SchedulerConfig(self.max_num_seqs, self._step_tokens(), longest),
            runtime=self._runtime_config(model, parallel, weight_memory),
            seed=self.seed,
            cluster=self._cluster_config(),
        )
        plan = self._plan(draft, entries)
        cache = self._cache_config(draft, plan)
        scheduler = replace(draft.scheduler, max_model_len=self._max_model_len(model, parallel, cache))
        config = replace(draft, cache=cache, scheduler=scheduler)
        plan = self._plan(config, entries)
        if self.device == "cpu":
            plan.check()
            logger.info("%s", plan.describe())
            if plan.warning:
                logger.warning("%s", plan.warning)
        return replace(config, runtime=replace(config.runtime, workspace_bytes=plan.rank.workspace))

    def _plan(self, config: EngineConfig, entries: Mapping[str, TensorEntry]) -> MemoryPlan:
        weights = held_weight_bytes(config.model, config.parallel, entries, config.runtime.weight_memory)
        return plan_memory(config, weights, available_memory())

    @property
    def process_index(self) -> int:
        """Number of this process among all that start ranks; 0 runs the engine."""
        return self.node_rank * self.nproc_per_node + self.local_rank

    def _cluster_config(self) -> ClusterConfig:
        processes = self.nnodes * self.nproc_per_node
        if processes == 1:
            return ClusterConfig()
        assert self.master_addr is not None
        options = asdict(self)
        del options["node_rank"], options["local_rank"]
        return ClusterConfig(processes, self.nproc_per_node, self.master_addr, self.master_port, options)

    def check(self) -> None:
        """ValueError for what is wrong with the options themselves, whatever the model."""
        at_least_one = (
            "nnodes",
            "nproc_per_node",
            "tensor_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "cp_kv_cache_interleave_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "block_size",
            "num_blocks",
            "kv_cache_memory_bytes",
            "threads_per_rank",
            "context_workspace_tokens",
        )
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.min_split_tokens < 0:
            raise ValueError(f"min_split_tokens={self.min_split_tokens} must be at least 0")
        if not 0 < self.collective_timeout_s < math.inf:
            raise ValueError(f"collective_timeout_s={self.collective_timeout_s} must be more than 0 seconds")
        for name, size in (("node_rank", "nnodes"), ("local_rank", "nproc_per_node")):
            if not 0 <= getattr(self, name) < getattr(self, size):
                raise ValueError(f"{name}={getattr(self, name)} is outside [0, {size}={getattr(self, size)})")
        if self.nnodes * self.nproc_per_node > 1 and self.master_addr is None:
            raise ValueError(f"nnodes={self.nnodes} needs master_addr: an address of node 0")
        if not 0 < self.master_port < 65536:
            raise ValueError(f"master_port={self.master_port} is outside [1, 65535]")
        choices = {
            "dtype": ("auto", *DTYPES),
            "compute_dtype": ("auto", *DTYPES),
            "kv_cache_dtype": tuple(CACHE_DTYPES),
            "device": ("cpu", "cuda"),
            "weight_memory": WEIGHT_MEMORY,
            "transport": ("shm", "gloo"),
            "context_attention": CONTEXT_ATTENTION,
            "share_projections": ("auto", "on", "off"),
            "check_step_plans": ("auto", "on", "off"),
        }
        for name, legal in choices.items():
            if getattr(self, name) not in legal:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(legal)}")
        if self.weight_memory == "quantized" and self.device != "cpu":
            raise ValueError(f"weight_memory='quantized' needs device='cpu', not {self.device!r}")
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_blocks and kv_cache_memory_bytes both set the KV cache's size: give one")

    def _step_tokens(self) -> int:
        """Tokens that a rank computes per step."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return DEFAULT_STEP_TOKENS if self.pipeline_parallel_size == 1 else DEFAULT_PIPELINE_STEP_TOKENS

    def _cache_config(self, draft: EngineConfig, plan: MemoryPlan) -> CacheConfig:
        """Blocks of one rank: as told, or as many as memory allows and requests can use."""
        spec = fullest_kv_spec(draft.model, draft.parallel, self.block_size, self.kv_cache_dtype)
        num_blocks = self.num_blocks
        if num_blocks is None:
            useful = self.max_num_seqs * -(-draft.scheduler.max_model_len // draft.virtual_block_size)
            num_bytes = self.kv_cache_memory_bytes
            if num_bytes is None:
                num_bytes = self._default_cache_bytes(plan)
            num_blocks = min(spec.num_blocks_in(num_bytes), useful)
            if num_blocks == 0:
                raise ValueError(
                    f"kv_cache_memory_bytes={num_bytes} holds no block: one of {self.block_size} tokens "
                    f"takes {spec.bytes_per_block} bytes in the {spec.num_layers} layers of a rank"
                )
        return replace(draft.cache, num_blocks=num_blocks)

    def _default_cache_bytes(self, plan: MemoryPlan) -> int:
        left = plan.free
        if self.device == "cpu":
            plan.check()
            left = plan.left
        return min(DEFAULT_KV_CACHE_BYTES, int(left * DEFAULT_KV_CACHE_SHARE) // plan.num_ranks)

    def _max_model_len(self, model: ModelConfig, parallel: ParallelConfig, cache: CacheConfig) -> int:
        """The limit given, or the largest one that model and cache allow."""
        dcp = parallel.decode_context_parallel_size
        # The last token generated is never fed back: its KV needs no slot.
        capacity = cache.num_blocks * cache.block_size * dcp + 1
        wanted = self.max_model_len
        if wanted is None:
            wanted = min(model.max_position_embeddings, capacity)
            if wanted < model.max_position_embeddings:
                logger.info(
                    "max_model_len is %d, what the KV cache holds; the model's is %d",
                    wanted,
                    model.max_position_embeddings,
                )
        if wanted > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len={wanted} exceeds max_position_embeddings={model.max_position_embeddings} "
                f"of {self.model}"
            )
        if wanted > capacity:
            over = f" on each of {dcp} DCP ranks" if dcp > 1 else ""
            raise ValueError(
                f"the KV cache is too small for one request of max_model_len={wanted}: its "
                f"{cache.num_blocks} blocks of {cache.block_size} tokens{over} allow {capacity}. Raise "
                f"kv_cache_memory_bytes (or num_blocks), or lower max_model_len"
            )
        return wanted

    def _runtime_config(
        self, model: ModelConfig, parallel: ParallelConfig, weight_memory: str
    ) -> RuntimeConfig:
        cores, local = available_cores(), parallel.world_size // parallel.nnodes
        threads = self.threads_per_rank or max(1, cores // local)
        if local * threads > MOST_THREADS_PER_CORE * cores:
            raise ValueError(
                f"{local} ranks x {threads} threads are too many for {cores} cores: at most "
                f"{MOST_THREADS_PER_CORE} threads per core"
            )
        if self.device == "cpu" and local * threads > cores:
            logger.warning(
                "%d ranks x %d threads on %d cores: ranks will wait for each other", local, threads, cores
            )
        compute_dtype = self.compute_dtype
        if compute_dtype == "auto":
            native = self.device != "cpu" or fast_bfloat16()
            compute_dtype = model.dtype if native else "float32"
        return RuntimeConfig(
            device=self.device,
            compute_dtype=compute_dtype,
            threads_per_rank=threads,
            pin_threads=self.pin_threads,
            context_workspace_tokens=self.context_workspace_tokens,
            transport=self.transport,
            collective_timeout_s=self.collective_timeout_s,
            min_split_tokens=self.min_split_tokens,
            enforce_eager=self.enforce_eager,
            debug_poison=self.debug_poison,
            context_attention=self.context_attention,
            share_projections=self.share_projections,
            check_step_plans=self._checks_plans(parallel),
            weight_memory=weight_memory,
            trace="" if self.trace is None else checked_trace_path(self.trace),
        )

    def _checks_plans(self, parallel: ParallelConfig) -> bool:
        if self.check_step_plans != "auto":
            return self.check_step_plans == "on"
        shares_memory = self.transport == "shm" and self.device == "cpu" and parallel.nnodes == 1
        return shares_memory and parallel.plane_size > 1
