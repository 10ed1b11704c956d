"""Configuration: frozen, composed, resolved once in the engine and sent whole to every worker.

`hf_config.load_model_config` makes a `ModelConfig` from a checkpoint; `EngineConfig.resolve`
fills what the user left open. After that nobody decides a setting a second time, and
`EngineConfig.digest()` must be equal on all ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields

import msgspec

DTYPES = {"float32": 4, "bfloat16": 2}
"""Supported dtypes and their bytes per element."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `dim` elements, as `rope_parameters` of a Hugging Face config names it.

    `parameters` holds the type's own keys (factor, beta_fast, short_factor, ...) unchanged.
    `interleaved` pairs elements (2i, 2i+1); otherwise element i is paired with i + dim/2.
    """

    rope_type: str
    theta: float
    dim: int
    max_position_embeddings: int
    interleaved: bool
    parameters: dict = field(default_factory=dict)


@dataclass(frozen=True)
class DSAConfig:
    """DeepSeek Sparse Attention: an indexer scores all keys of a query, attention sees the best.

    Attributes:
        index_topk: keys that a query attends to; all of them while there are no more.
        num_heads, head_dim: of the indexer. Its key, one per token, is in the cache too.
        full_layers: per layer, whether it has an indexer; one that has none attends to what the last layer
            with one has selected. The first layer has one.
        rope_interleaved: pairs of the indexer's rotary embedding, which may differ from attention's.
    """

    index_topk: int
    num_heads: int
    head_dim: int
    full_layers: tuple[bool, ...]
    rope_interleaved: bool


@dataclass(frozen=True)
class MLAConfig:
    """Dimensions of Multi-head Latent Attention. `q_lora_rank` None: queries come from one projection."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dsa: DSAConfig | None = None
    """Sparse attention; None: every query sees all keys before it."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def token_dim(self) -> int:
        """Elements of a token's latent: `kv_c | k_pe`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def absorbed_dims(self) -> tuple[int, int]:
        """Elements of a query's head and of a result's in the absorbed form: keys are latents there."""
        return self.token_dim, self.kv_lora_rank

    @property
    def projection_size(self) -> int:
        """Weights per head that make keys and values of a latent, or absorb a query and its result."""
        return self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)

    def projected_dim(self, num_heads: int) -> int:
        """Elements of a token's up-projected row: keys without position and values of the heads, and k_pe."""
        return num_heads * (self.qk_nope_head_dim + self.v_head_dim) + self.qk_rope_head_dim

    @property
    def has_windows(self) -> bool:
        """Whether queries of some layers see a window only."""
        return False

    def cache_dim(self, tp: int) -> int:
        """Elements per token and layer in the cache of one of `tp` ranks: each holds the whole latent, and
        with sparse attention an index key. Layers without an indexer leave it unused, so that one cache has
        rows of one width."""
        return self.token_dim + (self.dsa.head_dim if self.dsa else 0)

    def new_dim(self, layer: int, tp: int) -> int:
        """Elements per token that a layer fills: what travels between ranks."""
        is_full = self.dsa is not None and self.dsa.full_layers[layer]
        return self.cache_dim(tp) if is_full else self.token_dim

    def kv_head_repetition(self, tp: int) -> int:
        """TP ranks that hold the same KV. The latent is one head for all: every rank has it."""
        return tp


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention: query heads share `num_kv_heads` heads of keys and values.

    Attributes:
        qk_norm: RMSNorm over each head of queries and keys, before they are rotated.
        output_bias: o_proj has a bias (q, k and v: `ModelConfig.attention_bias`).
        rope_layers: per layer, whether queries and keys are rotated.
        windows: per layer, how many tokens a query sees, itself included; None: all before it.
    """

    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    output_bias: bool
    rope_layers: tuple[bool, ...]
    windows: tuple[int | None, ...]

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.head_dim

    @property
    def absorbed_dims(self) -> tuple[int, int]:
        """There is one form only: as the heads are."""
        return self.head_dim, self.head_dim

    @property
    def projection_size(self) -> int:
        """Nothing lies between the cache and keys and values."""
        return 0

    @property
    def has_windows(self) -> bool:
        """Whether queries of some layers see a window only."""
        return any(window is not None for window in self.windows)

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads of one of `tp` ranks: at least one, which several ranks then share."""
        return max(1, self.num_kv_heads // tp)

    def cache_dim(self, tp: int) -> int:
        """Elements per token and layer in the cache of one of `tp` ranks: `keys | values` of its KV heads."""
        return 2 * self.kv_heads_per_rank(tp) * self.head_dim

    def new_dim(self, layer: int, tp: int) -> int:
        """Elements per token that a layer fills: all."""
        return self.cache_dim(tp)

    def kv_head_repetition(self, tp: int) -> int:
        """TP ranks, neighbours, that hold the same KV heads."""
        return max(1, tp // self.num_kv_heads)


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts.

    `topk_method`: "greedy", "group_limited_greedy" (a group's score is its best expert) or
    "noaux_tc" (scores plus a correction bias; a group's score is the sum of its two best).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared_experts: int
    n_group: int
    topk_group: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, independent of how its checkpoint spells things.

    `moe_layers[i]` says whether layer i routes to experts. `softmax_scale` already contains
    YaRN's mscale.
    """

    path: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    rms_norm_eps: float
    qk_norm_eps: float
    """Epsilon of norms inside attention: of MLA's latents, or of queries and keys."""
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    mla: MLAConfig | None
    """Latent attention, or `gqa`."""
    rope: RopeConfig
    softmax_scale: float
    moe: MoEConfig | None
    moe_layers: tuple[bool, ...]
    dtype: str
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    num_nextn_predict_layers: int = 0
    """Multi-token-prediction layers that a checkpoint may hold after the last one; not loaded."""

    gqa: GQAConfig | None = None
    """Grouped-query attention, or `mla`. Two fields, because messages hold no choice of classes."""

    embedding_scale: float = 1.0
    """Embeddings are multiplied by it."""
    residual_scale: float = 1.0
    """What attention and MLP add to the residual stream is."""
    logits_scale: float = 1.0
    """The final hidden states are."""

    @property
    def attention(self) -> MLAConfig | GQAConfig:
        """Whichever there is."""
        attention = self.mla or self.gqa
        assert attention is not None
        assert self.mla is None or self.gqa is None
        return attention

    @property
    def dsa(self) -> DSAConfig | None:
        """Of a model with sparse attention."""
        return self.mla.dsa if self.mla is not None else None


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh's axes: world = DP x PP x PCP x TP, tp fastest (see distributed.mesh).

    Decode context parallelism and expert parallelism add no ranks: DCP groups are carved from the
    PCP x TP plane, and experts are spread over DP x PCP x TP of a pipeline stage.

    Attributes:
        tensor_parallel_size: ranks that split heads and hidden dimensions.
        prefill_context_parallel_size: ranks that split the tokens of a prefill.
        decode_context_parallel_size: ranks over which the KV cache of a sequence is spread.
        pipeline_parallel_size: stages that split the layers.
        data_parallel_size: replicas that split the requests.
        enable_expert_parallel: whole experts live on ranks, instead of a share of each on every TP rank.
        cp_kv_cache_interleave_size: consecutive tokens of a sequence on one DCP rank before the next
            rank's turn (see kv_ownership).
        nnodes: machines; ranks are spread over them evenly, in order.
    """

    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    cp_kv_cache_interleave_size: int = 1
    nnodes: int = 1

    @classmethod
    def of(cls, options: object) -> ParallelConfig:
        """From options that have the same names; what they lack keeps its default."""
        sizes = {f.name: getattr(options, f.name) for f in fields(cls) if hasattr(options, f.name)}
        return cls(**sizes)

    @property
    def plane_size(self) -> int:
        """Ranks of one pipeline stage of one replica: PCP x TP."""
        return self.prefill_context_parallel_size * self.tensor_parallel_size

    @property
    def replica_size(self) -> int:
        """Ranks of one replica: PP x PCP x TP."""
        return self.pipeline_parallel_size * self.plane_size

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.replica_size


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache of one rank. `cache_dtype`: how its rows are stored."""

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    cache_dtype: str = "float32"


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step. `max_num_batched_tokens` is what one rank computes: a step holds up to
    PCP times as many."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class RuntimeConfig:
    """How a rank computes, as against what.

    Attributes:
        device: "cpu" or "cuda".
        compute_dtype: activations and matrix multiplications; weights stay in the model's dtype.
        threads_per_rank: CPU threads of a rank.
        context_workspace_tokens: context tokens that attention up-projects at a time.
        transport: "shm" (ranks of one host) or "gloo".
        collective_timeout_s: a collective that takes longer raises and names itself.
        min_split_tokens: a prefill shorter than this stays whole on one PCP rank.
        enforce_eager: never replay recorded layers (worker.step_replay).
        debug_poison: fill unused KV and reused buffers with NaN (tests).
        context_attention: how prefill rows attend to cached context: "auto" (by cost), or one way
            forced where it is possible: "local", "sliced", "query" or "kv" (attention.context_ways).
        share_projections: PCP ranks share the up-projected keys and values of new tokens: "on", "off" or
            "auto": by cost, for ranks that share memory (attention.context_ways).
        check_step_plans: ranks compare a hash of each step's plan.
        trace: file for a trace of all steps (tracing); empty: none.
        weight_memory: "expanded", or "quantized": quantised weights stay as they are stored.
        workspace_bytes: of the fullest rank's workspace, at most (memory); 0: not planned.
    """

    device: str = "cpu"
    compute_dtype: str = "float32"
    threads_per_rank: int = 1
    pin_threads: bool = True
    context_workspace_tokens: int = 1024
    transport: str = "shm"
    collective_timeout_s: float = 300.0
    min_split_tokens: int = 0
    enforce_eager: bool = False
    debug_poison: bool = False
    context_attention: str = "auto"
    share_projections: str = "auto"
    check_step_plans: bool = True
    trace: str = ""
    weight_memory: str = "expanded"
    workspace_bytes: int = 0


@dataclass(frozen=True)
class ClusterConfig:
    """The commands that start ranks, each an equal run of them in order. One starts all ranks, unless
    there are several nodes or torchrun started one command per rank.

    Attributes:
        processes: how many commands there are; the engine runs in the first one.
        processes_per_node: more than 1 under torchrun.
        master_addr, master_port: where it expects the others.
        options: `EngineArgs` as the user gave them, where there are several commands: equal for all.
    """

    processes: int = 1
    processes_per_node: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    options: dict = field(default_factory=dict)

    def name(self, process: int) -> str:
        """How messages call a command."""
        return f"node {process}" if self.processes_per_node == 1 else f"torchrun's process {process}"


@dataclass(frozen=True)
class EngineConfig:
    """Everything a worker needs to know, resolved."""

    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    runtime: RuntimeConfig
    seed: int = 0
    cluster: ClusterConfig = ClusterConfig()

    @property
    def virtual_block_size(self) -> int:
        """Tokens of a block over all ranks that share it: the scheduler's block, and the unit of a
        prefix-cache hit."""
        return self.cache.block_size * self.parallel.decode_context_parallel_size

    def digest(self) -> str:
        """Hash that every rank must agree on."""
        return hashlib.sha256(msgspec.json.encode(asdict(self), order="sorted")).hexdigest()[:16]
