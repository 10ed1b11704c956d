"""Which parallel layouts a model can have, what a rank holds in each, and why others cannot be.

The one place that knows: start-up, `prefold layouts` and every message about a layout ask here. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prefold.config import DTYPES, ModelConfig, ParallelConfig
from prefold.distributed.mesh import divides_plane
from prefold.distributed.stages import check_stages, split_layers
from prefold.flops import LayerParameters, layer_parameters
from prefold.kv_spec import KVSpec, resolve_cache_dtype, row_bytes

SIZES = (
    "data_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
    "nnodes",
)


def kv_head_repetition(model: ModelConfig, tp: int) -> int:
    """TP ranks that hold the same KV: all with latent attention, else those that share a KV head."""
    return model.attention.kv_head_repetition(tp)


def legal_tensor_parallel_sizes(model: ModelConfig, expert_parallel: bool = False) -> list[int]:
    """TP sizes that divide everything that TP splits, and divide the KV heads or are a multiple of their
    number, ascending."""
    sizes = _split_sizes(model, expert_parallel).values()
    candidates = range(1, model.num_heads + 1)
    return [tp for tp in candidates if all(size % tp == 0 for size in sizes) and _fits_kv_heads(model, tp)]


def _fits_kv_heads(model: ModelConfig, tp: int) -> bool:
    if model.gqa is None:
        return True
    num_kv_heads = model.gqa.num_kv_heads
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0


def legal_dcp_sizes(model: ModelConfig, pcp: int, tp: int) -> list[int]:
    """DCP sizes on a PCP x TP plane, ascending: divisors of PCP, and PCP times a divisor of the number of
    TP ranks that would otherwise hold the same KV. 1 with sliding windows: see `check_layout`."""
    if model.attention.has_windows:
        return [1]
    repetition = kv_head_repetition(model, tp)
    return [dcp for dcp in range(1, pcp * repetition + 1) if divides_plane(dcp, pcp, repetition)]


def check_layout(model: ModelConfig, parallel: ParallelConfig, block_size: int) -> None:
    """Whether `model` can run that way, with KV blocks of `block_size` tokens per rank.

    Raises:
        ValueError: with the equation that fails, its numbers and what is legal instead.
    """
    for name in SIZES:
        if getattr(parallel, name) < 1:
            raise ValueError(f"{name}={getattr(parallel, name)} must be at least 1")
    if parallel.enable_expert_parallel and not _has_experts(model):
        raise ValueError(
            "enable_expert_parallel=True needs routed experts, and this model has n_routed_experts=0: "
            "its MLPs are split by tensor_parallel_size"
        )
    _check_tp(model, parallel)
    check_stages(model, parallel.pipeline_parallel_size)
    _check_windows(model, parallel)
    _check_dcp(model, parallel)
    interleave, nodes = parallel.cp_kv_cache_interleave_size, parallel.nnodes
    if block_size % interleave:
        legal = ", ".join(str(size) for size in range(1, block_size + 1) if block_size % size == 0)
        raise ValueError(
            f"cp_kv_cache_interleave_size={interleave} does not divide block_size={block_size}; "
            f"legal: {legal}"
        )
    if parallel.world_size % nodes:
        raise ValueError(
            f"{_world_equation(parallel)} is not divisible by nnodes={nodes}: ranks are spread evenly"
        )


def check_context_attention(model: ModelConfig, parallel: ParallelConfig, way: str) -> None:
    """Whether queries can reach cached context in this way; "auto" always can.

    Raises:
        ValueError: with sparse attention, where ranks share a context only if they hold parts of it.
    """
    dcp, dsa = parallel.decode_context_parallel_size, model.dsa
    legal = ("auto", "local") if dcp == 1 else ("auto", "kv", "query")
    if dsa is not None and way not in legal:
        raise ValueError(
            f"context_attention={way!r} is not possible with sparse attention (index_topk={dsa.index_topk}) "
            f"and decode_context_parallel_size={dcp}, where each query has keys of its own; "
            f"legal: {', '.join(legal)}"
        )


def check_world(parallel: ParallelConfig, world: int) -> None:
    """ValueError with the equation unless the layout takes exactly `world` ranks."""
    if parallel.world_size != world:
        raise ValueError(f"{_world_equation(parallel)}, but there are {world} ranks")


def _world_equation(parallel: ParallelConfig) -> str:
    """
    >>> _world_equation(ParallelConfig(tensor_parallel_size=8, prefill_context_parallel_size=8))
    'world = DP x PP x PCP x TP = 1 x 1 x 8 x 8 = 64'
    """
    sizes = (
        parallel.data_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.tensor_parallel_size,
    )
    return f"world = DP x PP x PCP x TP = {' x '.join(map(str, sizes))} = {parallel.world_size}"


def _has_experts(model: ModelConfig) -> bool:
    return model.moe is not None and any(model.moe_layers)


def _split_sizes(model: ModelConfig, expert_parallel: bool) -> dict[str, int]:
    """What TP must divide, by config.json's name. The vocabulary is padded instead."""
    sizes = {"num_attention_heads": model.num_heads}
    if not all(model.moe_layers):
        sizes["intermediate_size"] = model.intermediate_size
    moe = model.moe
    if moe is not None and not expert_parallel:
        sizes["moe_intermediate_size"] = moe.intermediate_size
    elif moe is not None and moe.num_shared_experts:
        sizes["moe_intermediate_size * n_shared_experts"] = moe.intermediate_size * moe.num_shared_experts
    return sizes


def _check_tp(model: ModelConfig, parallel: ParallelConfig) -> None:
    tp, ep = parallel.tensor_parallel_size, parallel.enable_expert_parallel
    for name, size in _split_sizes(model, ep).items():
        if size % tp == 0:
            continue
        legal = ", ".join(map(str, legal_tensor_parallel_sizes(model, ep)))
        message = (
            f"{name}={size} is not divisible by tensor_parallel_size={tp}; sizes that are legal for "
            f"this model: {legal}"
        )
        if not ep and _has_experts(model) and tp in legal_tensor_parallel_sizes(model, True):
            message += f". With enable_expert_parallel, which keeps experts whole, {tp} is legal too"
        raise ValueError(message)
    if model.gqa is not None and not _fits_kv_heads(model, tp):
        legal = ", ".join(map(str, legal_tensor_parallel_sizes(model, ep)))
        raise ValueError(
            f"num_key_value_heads={model.gqa.num_kv_heads} is neither divisible by "
            f"tensor_parallel_size={tp} nor a divisor of it; sizes that are legal for this model: {legal}"
        )


def _check_dcp(model: ModelConfig, parallel: ParallelConfig) -> None:
    dcp, pcp = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    tp = parallel.tensor_parallel_size
    legal, repetition = legal_dcp_sizes(model, pcp, tp), kv_head_repetition(model, tp)
    if dcp not in legal:
        raise ValueError(
            f"decode_context_parallel_size={dcp} adds no ranks: it must divide "
            f"prefill_context_parallel_size={pcp}, or be {pcp} times a divisor of "
            f"{repetition} (how many ranks of tensor_parallel_size={tp} hold the same KV); "
            f"legal: {', '.join(map(str, legal))}"
        )


def _check_windows(model: ModelConfig, parallel: ParallelConfig) -> None:
    """A rank's shard of a sequence is numbered by place, and a window counts positions."""
    dcp = parallel.decode_context_parallel_size
    if dcp > 1 and model.attention.has_windows:
        raise ValueError(
            f"decode_context_parallel_size={dcp}: this model has layers with a sliding window, whose KV "
            "cannot be spread over ranks; legal: 1"
        )


def fullest_kv_spec(
    model: ModelConfig, parallel: ParallelConfig, block_size: int, cache_dtype: str = "auto"
) -> KVSpec:
    """KV cache of a rank of the stage with the most layers: all ranks have as many blocks as that one."""
    num_layers = max(map(len, split_layers(model, parallel.pipeline_parallel_size)))
    stored = resolve_cache_dtype(cache_dtype, model.dtype)
    return KVSpec(num_layers, row_bytes(model.attention, parallel.tensor_parallel_size, stored), block_size)


@dataclass(frozen=True)
class Layout:
    """A legal layout, and what it means for a rank.

    Attributes:
        parallel: the sizes.
        kv_shards: ranks over which the KV of a sequence is spread (D).
        kv_copies: ranks of a stage that hold the same token's KV: PCP / D times the TP ranks that share KV.
        experts_per_rank: fewest and most routed experts of a layer on a rank; (0, 0) without any.
        expert_width: intermediate size of a rank's part of an expert.
        heads_per_rank: attention heads of a rank.
        layers_per_stage: one entry per pipeline stage.
        kv_bytes_per_token: of the fullest rank's cache, per token of a sequence (rounded up): what D ranks
            share is divided by D.
        weight_bytes: of the fullest rank's matrices and embeddings.
        weights_stay_quantized: they are counted as they are stored.
    """

    parallel: ParallelConfig
    kv_shards: int
    kv_copies: int
    experts_per_rank: tuple[int, int]
    expert_width: int
    heads_per_rank: int
    layers_per_stage: tuple[int, ...]
    kv_bytes_per_token: int
    weight_bytes: int
    weights_stay_quantized: bool


def legal_layouts(model: ModelConfig, world: int, cache_dtype: str = "auto") -> list[Layout]:
    """All layouts of exactly `world` ranks; the order is that of (dp, pp, pcp, tp, dcp, ep)."""
    if world < 1:
        raise ValueError(f"world={world} must be at least 1")
    candidates = _candidates(model, world)
    return [
        describe_layout(model, parallel, cache_dtype) for parallel in candidates if is_legal(model, parallel)
    ]


def is_legal(model: ModelConfig, parallel: ParallelConfig, block_size: int = 1) -> bool:
    """Whether `check_layout` has nothing to say."""
    try:
        check_layout(model, parallel, block_size)
    except ValueError:
        return False
    return True


def _candidates(model: ModelConfig, world: int) -> Iterator[ParallelConfig]:
    """Everything of `world` ranks, by size of the axes; DCP sizes that exist, EP off and on."""
    for dp in _divisors(world):
        for pp in _divisors(world // dp):
            for pcp in _divisors(world // (dp * pp)):
                tp = world // (dp * pp * pcp)
                for dcp in legal_dcp_sizes(model, pcp, tp):
                    for ep in (False, True):
                        yield ParallelConfig(tp, pcp, dcp, pp, dp, ep)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


LayerBytes = Callable[[int, int, int], LayerParameters]
"""Bytes instead of weights, of (layer, TP size, parts of a routed expert). Layers are those of the model."""


def describe_layout(
    model: ModelConfig,
    parallel: ParallelConfig,
    cache_dtype: str = "auto",
    layer_bytes: LayerBytes | None = None,
) -> Layout:
    """What a rank holds in a layout that is legal. Without `layer_bytes` weights have the model's dtype."""
    moe, tp, ep = model.moe, parallel.tensor_parallel_size, parallel.enable_expert_parallel
    spread = parallel.data_parallel_size * parallel.plane_size if ep else 1
    num_experts = moe.num_experts if moe is not None and _has_experts(model) else 0
    experts = (num_experts // spread, -(-num_experts // spread))
    width = moe.intermediate_size // (1 if ep else tp) if moe is not None and num_experts else 0
    stages = split_layers(model, parallel.pipeline_parallel_size)
    dcp = parallel.decode_context_parallel_size
    kv = fullest_kv_spec(model, parallel, 1, cache_dtype)
    return Layout(
        parallel=parallel,
        kv_shards=dcp,
        kv_copies=parallel.prefill_context_parallel_size * kv_head_repetition(model, tp) // dcp,
        experts_per_rank=experts,
        expert_width=width,
        heads_per_rank=model.num_heads // tp,
        layers_per_stage=tuple(map(len, stages)),
        kv_bytes_per_token=-(-kv.bytes_per_token // dcp),
        weight_bytes=max(
            _stage_bytes(model, stage, tp, 1 if ep else tp, experts[1], layer_bytes or _in_dtype(model))
            for stage in stages
        ),
        weights_stay_quantized=layer_bytes is not None,
    )


def _in_dtype(model: ModelConfig) -> LayerBytes:
    def layer_bytes(layer: int, tp: int, expert_parts: int) -> LayerParameters:
        weights, size = layer_parameters(model, layer), DTYPES[model.dtype]
        sizes = (weights.whole, weights.split, weights.kv, weights.expert)
        return LayerParameters(*(size * number for number in sizes))

    return layer_bytes


def _stage_bytes(
    model: ModelConfig, stage: range, tp: int, expert_parts: int, experts: int, layer_bytes: LayerBytes
) -> int:
    """Of a rank of a stage that has a part of so many experts."""
    table = -(-model.vocab_size // tp) * model.hidden_size * DTYPES[model.dtype]
    first, last = stage.start == 0, stage.stop == model.num_layers
    one_table = first and last and model.tie_word_embeddings
    total = table * (int(first) + int(last) - int(one_table))
    for layer in stage:
        weights = layer_bytes(layer, tp, expert_parts)
        total += weights.whole + weights.split // tp + weights.expert * experts // expert_parts
        total += weights.kv * model.attention.kv_head_repetition(tp) // tp
    return total


def layout_options(parallel: ParallelConfig) -> str:
    """The layout as its user types it, without the sizes that are 1.

    >>> layout_options(ParallelConfig(prefill_context_parallel_size=8, enable_expert_parallel=True))
    '-pcp 8 -ep'
    >>> layout_options(ParallelConfig())
    '-tp 1'
    """
    sizes = {
        "-tp": parallel.tensor_parallel_size,
        "-pcp": parallel.prefill_context_parallel_size,
        "-dcp": parallel.decode_context_parallel_size,
        "-pp": parallel.pipeline_parallel_size,
        "-dp": parallel.data_parallel_size,
    }
    words = [f"{option} {size}" for option, size in sizes.items() if size > 1]
    words += ["-ep"] if parallel.enable_expert_parallel else []
    return " ".join(words) or "-tp 1"


@dataclass(frozen=True)
class Refusal:
    """A layout that cannot be, and why."""

    parallel: ParallelConfig
    reason: str


def explain_illegal(model: ModelConfig, world: int) -> list[Refusal]:
    """Layouts that people try on `world` ranks and that this model cannot have there, with the reason."""
    refusals = []
    for parallel, hint in _attempts(model, world):
        try:
            check_world(parallel, world)
            check_layout(model, parallel, block_size=1)
        except ValueError as error:
            refusals.append(Refusal(parallel, f"{error}. {hint}" if hint else str(error)))
    return refusals


def _attempts(model: ModelConfig, n: int) -> Iterator[tuple[ParallelConfig, str]]:
    """What people try on n ranks, with a hint at what they may have meant. Some of it may be legal."""
    one, pcp = ParallelConfig(), ParallelConfig(prefill_context_parallel_size=n)
    pcp_ep = replace(pcp, enable_expert_parallel=True)
    if _has_experts(model):
        shared = (
            f"One group of {n} that splits prompts in attention and shares the experts is TP 1, PCP {n}, EP: "
            f"{layout_options(pcp_ep)}"
        )
        yield replace(pcp, tensor_parallel_size=n), f"TP and PCP multiply. {shared}"
        hint = "EP adds no ranks: it spreads experts over those of DP, PCP and TP, as in "
        hint += layout_options(pcp_ep)
        yield replace(one, enable_expert_parallel=True), hint
    else:
        hint = f"TP and PCP multiply. All {n} ranks on one prompt is {layout_options(pcp)}"
        yield replace(pcp, tensor_parallel_size=n), hint
        yield pcp_ep, ""
    if n > 1:
        spread = layout_options(replace(pcp, decode_context_parallel_size=n))
        hint = f"DCP adds no ranks: it spreads KV over those of PCP and TP, as in {spread}"
        yield replace(one, decode_context_parallel_size=n), hint
    for dcp in (*range(2, n), 2 * n):
        if dcp not in legal_dcp_sizes(model, n, 1):
            yield replace(pcp, decode_context_parallel_size=dcp), ""
            break
    tp = max(size for size in _divisors(n) if size in legal_tensor_parallel_sizes(model))
    if tp > 1:
        yield ParallelConfig(tp, n // tp, decode_context_parallel_size=2 * n), ""
    for tp in _divisors(n):
        if tp not in legal_tensor_parallel_sizes(model):
            yield ParallelConfig(tp, n // tp), ""
            break
    for pp in _divisors(n):
        if pp > model.num_layers:
            yield ParallelConfig(prefill_context_parallel_size=n // pp, pipeline_parallel_size=pp), ""
            break
