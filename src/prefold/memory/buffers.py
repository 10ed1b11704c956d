"""Bytes of the workspace of a rank, by the names of its buffers (`workspace.Workspace.get`).

An upper bound for any step that the scheduler can make. Every buffer has a line here; tests run largest
steps on many layouts, and find those that have none, or too little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from prefold.config import DTYPES
from prefold.limits import (
    ABSORBED_TOKENS,
    EXPAND_FROM,
    EXPANDED_TILE,
    LOGITS_ROWS,
    MLP_TILE,
    MOST_QUERIES,
    QUERY_BLOCK,
    WIDENED_ROWS,
)
from prefold.memory.step import FLOAT, LargestStep
from prefold.traffic import dispatch_row_bytes, exchange_bytes, expected_places

SKEW = 2
"""How many times as many tokens as the mean a rank's experts may get, before buffers grow again."""

Sizes = Iterator[tuple[str, int]]
"""Names of buffers and their bytes. "name.*" is several that together have so many."""

WORD_KEYS, WORD = 64, 8
"""Keys of a word of a mask, and its bytes (kernels.dense)."""

INDEX = 8
"""Bytes of a number of a token, slot or expert."""

LINE = 64
"""Bytes that rows of keys are padded to a multiple of (attention.native_backend)."""


def buffer_bytes(step: LargestStep) -> dict[str, int]:
    """All buffers of a rank."""
    parts = [_model(step), _linear(step), _attention(step), _sampling(step)]
    if step.expert_width:
        parts += [_experts(step)]
    if step.config.model.mla is not None:
        parts += [_latent(step)]
    if step.decodes_rows:
        parts += [_decoded_rows(step)]
    if step.config.model.dsa is not None:
        parts += [_sparse(step), _shards(step)]
    elif step.travel_group > 1:
        parts += [_travel(step)]
    if step.dcp > 1:
        parts += [_shared_cache(step)]
    if not step.native:
        parts += [_without_kernels(step)]
    sizes: dict[str, int] = {}
    for part in parts:
        for name, num_bytes in part:
            assert name not in sizes, name
            sizes[name] = num_bytes
    return sizes


def _model(step: LargestStep) -> Sizes:
    """What layers hand to each other."""
    model, tokens, item = step.config.model, step.tokens, step.item
    hidden = tokens * model.hidden_size * item
    yield "model.normed", hidden
    yield "layer.delta", hidden
    yield "model.residual" if step.layers.start == 0 else "pipeline.hidden", hidden
    yield "rope.rows", tokens * model.rope.dim * FLOAT
    yield "mlp.gate_up", min(MLP_TILE, tokens) * 2 * _mlp_width(step) * item
    if model.gqa is not None:
        heads = step.heads + 2 * model.gqa.kv_heads_per_rank(step.tp)
        yield "attn.qkv", tokens * heads * model.gqa.head_dim * item
    if (mla := model.mla) is not None:
        yield "attn.a", tokens * ((mla.q_lora_rank or 0) + mla.token_dim) * item
        yield "attn.kv", tokens * mla.cache_dim(step.tp) * item
        yield "attn.q", tokens * step.heads * mla.qk_head_dim * item
    if (dsa := model.dsa) is not None:
        yield "indexer.q", tokens * dsa.num_heads * dsa.head_dim * item
        yield "indexer.k", tokens * dsa.head_dim * item
        yield "indexer.weights", tokens * dsa.num_heads * FLOAT


def _mlp_width(step: LargestStep) -> int:
    """Intermediate size of the widest MLP of these layers, experts included."""
    model = step.config.model
    widths = [step.expert_width]
    if not all(model.moe_layers[i] for i in step.layers):
        widths.append(model.intermediate_size // step.tp)
    if step.expert_width and model.moe is not None:
        widths.append(model.moe.intermediate_size * model.moe.num_shared_experts // step.tp)
    return max(widths)


def _matrices(step: LargestStep) -> list[tuple[int, int]]:
    """(rows, columns) of this rank's part of the linear layers outside MLPs."""
    model, heads = step.config.model, step.heads
    hidden, v_dim = model.hidden_size, model.attention.v_head_dim
    shapes = [(hidden, heads * v_dim)]
    if model.gqa is not None:
        out = (heads + 2 * model.gqa.kv_heads_per_rank(step.tp)) * model.gqa.head_dim
        shapes.append((out, hidden))
    if (mla := model.mla) is not None:
        rank = mla.q_lora_rank
        shapes += [((rank or 0) + mla.token_dim, hidden), (heads * mla.qk_head_dim, rank or hidden)]
        if (dsa := mla.dsa) is not None and rank is not None:
            shapes += [(dsa.num_heads * dsa.head_dim, rank), (dsa.head_dim, hidden)]
    return shapes


def _linear(step: LargestStep) -> Sizes:
    """Weights in another dtype than they are stored in, one layer's at a time."""
    model, item, width = step.config.model, step.item, _mlp_width(step)
    shapes = _matrices(step)
    mlp = [(2 * width, model.hidden_size), (model.hidden_size, width)]
    if step.item != step.weight:
        yield "linear.weight.*", max(rows * columns for rows, columns in shapes) * item
        yield "mlp.w_gate_up.*", math.prod(mlp[0]) * item
        yield "mlp.w_down.*", math.prod(mlp[1]) * item
    if step.config.runtime.weight_memory == "quantized":
        largest = max(max(min(EXPANDED_TILE, rows * columns), columns) for rows, columns in (*shapes, *mlp))
        yield "quantized.tile", largest * item
    if item != FLOAT:
        rows, columns = (max(sizes) for sizes in zip(*shapes, *mlp, strict=True))
        few = EXPAND_FROM if step.config.runtime.weight_memory == "quantized" else WIDENED_ROWS
        head = -(-model.vocab_size // step.tp)
        yield "linear.wide", few * max(columns, model.hidden_size) * FLOAT
        yield "linear.result", few * max(rows, head) * FLOAT


def _experts(step: LargestStep) -> Sizes:
    model, tokens, item = step.config.model, step.tokens, step.item
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    yield "moe.scores", tokens * moe.num_experts * FLOAT
    yield "moe.weights", tokens * moe.top_k * FLOAT
    yield "moe.ids", tokens * moe.top_k * INDEX
    if item != FLOAT:
        yield "moe.router_input", tokens * hidden * FLOAT
        yield "moe.wide", WIDENED_ROWS * hidden * FLOAT
        yield "moe.wide_result", WIDENED_ROWS * hidden * FLOAT
    arriving = tokens
    if step.config.parallel.enable_expert_parallel:
        sent = expert_tokens(step)
        # All tokens of all ranks may have an expert here, but routing as uneven as that is not planned for.
        even = sent * expected_places(moe.num_experts, moe.top_k, step.ep)
        arriving = min(sent * step.ep, int(SKEW * even))
        _, row = dispatch_row_bytes(hidden, moe.top_k, item)
        yield "ep.sent", sent * min(step.ep, moe.top_k) * row
        yield "ep.received", arriving * row
        yield "ep.result", arriving * hidden * item
        stride = -(-step.decode_tokens // (step.tp * step.unit)) + 1
        yield "ep.decode", stride * hidden * item
        yield "ep.decode_gathered", stride * step.unit * hidden * item
    pairs = min(MLP_TILE, arriving * moe.top_k)
    yield "moe.rows", pairs * hidden * item
    yield "moe.result", pairs * hidden * item


def expert_tokens(step: LargestStep) -> int:
    """Tokens that a rank sends to experts: those that it shares with other ranks of TP are cut."""
    return -(-step.tokens // step.tp)


def _attention(step: LargestStep) -> Sizes:
    """What all forms have."""
    config, tokens, item = step.config, step.tokens, step.item
    attention, heads = config.model.attention, step.heads
    q_dim, out_dim = attention.absorbed_dims
    row = step.row_bytes
    yield "attention.out", tokens * heads * attention.v_head_dim * item
    yield "attention.lse", tokens * heads * FLOAT
    yield "attention.rows", tokens * INDEX
    yield "attention.slots", tokens * INDEX
    yield "attention.new_kv", tokens * row
    yield "attention.all_new", step.new_tokens * row
    if step.dcp > 1:
        uneven = config.scheduler.max_num_seqs * config.parallel.cp_kv_cache_interleave_size
        yield "attention.written", min(step.new_tokens, step.new_tokens // step.dcp + uneven) * row
    tile = config.runtime.context_workspace_tokens
    index_tile = max(tile, config.model.dsa.index_topk) if config.model.dsa is not None else 0
    parts = [part.num_bytes(config.cache.cache_dtype) for part in step.row_parts]
    blocks = 2 * config.cache.block_size
    sizes = [(tile + blocks) * parts[0], *((index_tile + blocks) * part for part in parts[1:])]
    yield "attention.tile", max(sizes)
    yield from _states(step, "attention", tokens, step.absorbed_tokens)
    keys = max(_kv_heads(step) * tile * _aligned(attention.qk_head_dim, step), tile * _aligned(q_dim, step))
    yield "attention.keys", keys * _attended_item(step)
    yield "attention.values", _kv_heads(step) * tile * attention.v_head_dim * _attended_item(step)
    most = MOST_QUERIES * config.scheduler.max_num_seqs
    few = min(tokens, most) if step.dcp == 1 else 0
    if config.model.mla is not None:
        few = min(few, step.absorbed_tokens)
    longest = -(-config.scheduler.max_model_len // config.virtual_block_size)
    num_tables = config.scheduler.max_num_seqs if few else 0
    yield "paged.blocks", num_tables * (1 << (longest - 1).bit_length()) * INDEX
    yield "paged.tables", few * INDEX
    yield "paged.lengths", few * INDEX
    yield "paged.lse", few * heads * FLOAT
    yield "paged.results", few * heads * attention.v_head_dim * item
    if config.model.mla is not None or item != FLOAT:
        if config.model.dsa is None:
            few = max(few, min(step.all_travellers, most))
        yield "paged.q", few * heads * q_dim * FLOAT
        yield "paged.out", few * heads * out_dim * FLOAT


def _kv_heads(step: LargestStep) -> int:
    """Of keys and values that queries meet."""
    gqa = step.config.model.gqa
    return step.heads if gqa is None else gqa.kv_heads_per_rank(step.tp)


def _attended_item(step: LargestStep) -> int:
    """Bytes of an element of what the dense kernel takes."""
    return step.item if step.native else FLOAT


def _aligned(dim: int, step: LargestStep) -> int:
    """Elements of a key. Without native kernels one more, and padded."""
    return _padded(dim, LINE // step.item) if step.native else _padded(dim + 1, 8)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _states(step: LargestStep, name: str, tokens: int, absorbed: int) -> Sizes:
    """Running softmaxes of so many queries, of which some may be in the absorbed form."""
    attention, heads = step.config.model.attention, step.heads
    q_dim, out_dim = attention.absorbed_dims

    def rows(plain: int, other: int) -> int:
        return heads * (tokens * plain + absorbed * max(0, other - plain))

    out = rows(attention.v_head_dim, out_dim) * FLOAT
    if step.native:
        yield f"{name}.state.q", rows(attention.qk_head_dim, q_dim) * step.item
        yield f"{name}.state.out", out
        yield f"{name}.state.references", tokens * heads * FLOAT
        yield f"{name}.state.sums", tokens * heads * FLOAT
    else:
        q = rows(_padded(attention.qk_head_dim + 1, 8), _padded(q_dim + 1, 8))
        yield f"{name}.state.q", q * FLOAT
        yield f"{name}.state.sums", out
        yield f"{name}.state.denominators", tokens * heads * FLOAT


def _latent(step: LargestStep) -> Sizes:
    """Latent attention: projections, and queries in the absorbed form."""
    config, heads, item = step.config, step.heads, step.item
    mla = config.model.mla
    assert mla is not None
    q_dim, out_dim = mla.absorbed_dims
    tile = config.runtime.context_workspace_tokens
    projected = max(tile, step.shared_rows)
    yield "attention.absorbed_q", step.absorbed_tokens * heads * q_dim * FLOAT
    yield "attention.absorbed_out", step.absorbed_tokens * heads * out_dim * FLOAT
    if item != FLOAT:
        yield "mla.wide_q", WIDENED_ROWS * heads * mla.qk_head_dim * FLOAT
        yield "mla.wide_values", WIDENED_ROWS * heads * mla.v_head_dim * FLOAT
    yield "mla.projected", tile * mla.projected_dim(heads) * item
    if DTYPES.get(config.cache.cache_dtype, 2) != item:  # what is stored in FP8 is read as bfloat16
        yield "mla.kv_c", projected * mla.kv_lora_rank * item
    items = {item}
    yield "mla.w_uk", sum(items - {step.weight}) * heads * mla.qk_nope_head_dim * mla.kv_lora_rank
    if step.dcp > step.pcp:
        items.add(FLOAT)  # results that have travelled in the absorbed form
    yield "mla.w_uv", sum(items - {step.weight}) * heads * mla.v_head_dim * mla.kv_lora_rank


def _decoded_rows(step: LargestStep) -> Sizes:
    """FP8 as bfloat16, tile by tile; encoded rows of a decode step."""
    tile = step.config.runtime.context_workspace_tokens
    for i, part in enumerate(step.row_parts):
        dsa = step.config.model.dsa
        rows = max(tile, dsa.index_topk) if i and dsa is not None else max(tile, step.shared_rows)
        yield f"row_format.{part.dim}", rows * part.dim * 2
        if step.item != FLOAT:
            yield f"row_format.wide.{part.dim}", step.tokens * part.dim * FLOAT
        yield f"row_format.stored.{part.dim}", step.tokens * part.num_bytes(step.config.cache.cache_dtype)


def _travel(step: LargestStep) -> Sizes:
    """Queries that travel to other parts of the context."""
    attention, heads, item = step.config.model.attention, step.heads, step.item
    own, met = step.travellers, step.all_travellers
    q_dim, out_dim = attention.absorbed_dims
    heads_differ = step.dcp > step.pcp and step.config.model.mla is not None
    sent, back = (q_dim, out_dim) if heads_differ else (attention.qk_head_dim, attention.v_head_dim)
    q_item = FLOAT if step.dcp > step.pcp and heads_differ else item
    yield "travel.sent", own * heads * sent * q_item
    yield "travel.q", met * heads * sent * q_item
    for name, rows in (("results", met), ("back", met), ("context", own)):
        yield f"travel.{name}", rows * heads * (back + 1) * FLOAT
    yield "travel.own_out", own * heads * attention.v_head_dim * item
    yield "travel.joint", own * heads * attention.v_head_dim * FLOAT
    if heads_differ:
        yield "travel.own_q", own * heads * attention.qk_head_dim * item
        yield "travel.values", own * heads * attention.v_head_dim * FLOAT
    absorbed = 0
    if step.config.model.mla is not None:
        absorbed = met if heads_differ else min(met, ABSORBED_TOKENS)
    yield from _states(step, "travel", met, absorbed)
    if not heads_differ:
        yield "travel.absorbed_q", absorbed * heads * q_dim * FLOAT
        yield "travel.absorbed_out", absorbed * heads * out_dim * FLOAT


def _shared_cache(step: LargestStep) -> Sizes:
    """A cache that is spread over ranks: keys that are gathered, decode tokens that all of them compute."""
    config, heads = step.config, step.heads
    attention, v_dim = config.model.attention, config.model.attention.v_head_dim
    q_dim, out_dim = attention.absorbed_dims
    rows = max(1, config.runtime.context_workspace_tokens // step.dcp)
    yield "kv_tiles.sent", rows * step.row_bytes
    yield "kv_tiles.received", rows * step.dcp * step.row_bytes
    others = max(1, step.dcp // step.pcp)
    tokens = step.decode_tokens
    if config.model.dsa is not None:
        tokens = max(tokens, step.all_travellers)
    yield "decode.own_q", tokens * heads * q_dim * FLOAT
    yield "decode.all_q", tokens * others * heads * q_dim * FLOAT
    yield "decode.lse", step.decode_tokens * heads * FLOAT
    yield "decode.own_out", tokens * heads * out_dim * FLOAT
    yield "decode.partial", tokens * others * heads * (out_dim + 1) * FLOAT
    yield "merge.heads", tokens * others * heads * (out_dim + 1) * FLOAT
    yield "merge.own", step.decode_tokens * heads * (v_dim + 1) * FLOAT
    yield "merge.joint", step.decode_tokens * heads * (v_dim + 1) * FLOAT
    if not step.native:
        yield from _states(step, "decode", tokens * others, tokens * others)


def _sparse(step: LargestStep) -> Sizes:
    """Selections, and queries that attend to them, a block at a time."""
    config, heads, item = step.config, step.heads, step.item
    mla = config.model.mla
    assert mla is not None
    assert mla.dsa is not None
    dsa, block = mla.dsa, min(QUERY_BLOCK, step.tokens)
    q_dim, out_dim = mla.absorbed_dims
    yield "sparse.selected", step.tokens * dsa.index_topk * 4
    seen = min(masked_keys(step), config.scheduler.max_model_len)
    yield "sparse.bits", step.tokens * -(-seen // WORD_KEYS) * WORD
    yield "sparse.latent_q", block * heads * q_dim * FLOAT
    yield "sparse.latent_out", block * heads * out_dim * FLOAT
    yield "sparse.lse", block * heads * FLOAT
    if step.dcp > 1:
        yield "sparse.context", config.scheduler.max_model_len * step.row_bytes
    yield from _states(step, "masked", step.tokens, 0)
    if item != FLOAT:
        yield "selection.q", block * dsa.num_heads * dsa.head_dim * FLOAT
    yield "selection.candidates", 2 * block * (2 * dsa.index_topk + 64) * 4


def masked_keys(step: LargestStep) -> int:
    """Keys up to which a mask may be cheaper than a selection, see attention.sparse_costs."""
    mla = step.config.model.mla
    assert mla is not None
    assert mla.dsa is not None
    per_pair = step.heads * (mla.qk_head_dim + mla.v_head_dim)
    selected = max(mla.token_dim * 17, mla.token_dim * 8 + step.heads * sum(mla.absorbed_dims))
    return mla.dsa.index_topk * selected // per_pair


def _shards(step: LargestStep) -> Sizes:
    """Sparse attention by ranks that hold parts of the cache: visitors, and decode tokens."""
    mla, heads = step.config.model.mla, step.heads
    if step.dcp == 1 or mla is None or mla.dsa is None:
        return
    dsa, own, met = mla.dsa, step.travellers, step.all_travellers
    tokens = max(met, step.decode_tokens)
    widths = (heads * mla.qk_head_dim, dsa.num_heads * dsa.head_dim, dsa.num_heads)
    yield "shards.selected", (step.unit * step.tokens + step.decode_tokens) * dsa.index_topk * 4
    yield "shards.ranks", tokens * dsa.index_topk * INDEX
    yield "shards.sent", own * sum(widths) * FLOAT
    for i, item in enumerate((step.item, step.item, FLOAT)):
        yield f"shards.received.{i}", met * widths[i] * item
    yield "shards.results", met * heads * (mla.v_head_dim + 1) * FLOAT
    yield "shards.joint", own * heads * mla.v_head_dim * FLOAT
    yield "shards.lse", own * heads * FLOAT


def _sampling(step: LargestStep) -> Sizes:
    """Hidden states that are looked at: of last tokens, or of whole prompts for their log-probabilities."""
    config, hidden = step.config, step.config.model.hidden_size * step.item
    yield "pcp.restored", step.new_tokens * hidden
    if step.pcp > 1:
        kv = step.decode_tokens * len(step.layers) * step.row_bytes
        yield "pcp.exchange", exchange_bytes(kv, step.tokens * hidden)[1]
    if step.layers.stop == config.model.num_layers:
        yield "logits.local", logits_rows(step) * -(-config.model.vocab_size // step.tp) * step.item
        if step.item != FLOAT:
            yield "logits.float32", logits_rows(step) * config.model.vocab_size * FLOAT


def logits_rows(step: LargestStep) -> int:
    """Rows of logits at a time: of all requests, or of a prompt."""
    return min(step.new_tokens, max(step.config.scheduler.max_num_seqs, LOGITS_ROWS))


def _without_kernels(step: LargestStep) -> Sizes:
    """Scratch of what is done in torch, a block at a time, where there are no native kernels."""
    model, item = step.config.model, step.item
    widest = max(model.hidden_size, step.heads * model.attention.qk_head_dim)
    yield "attention.scores", 512 * 1024 * FLOAT
    yield "norm.float32", 256 * widest * FLOAT
    yield "rope.float32", 128 * (widest + _kv_heads(step) * model.attention.qk_head_dim) * FLOAT
    yield "rope.turned", 128 * (widest + _kv_heads(step) * model.attention.qk_head_dim) * FLOAT
    if item != step.weight:
        yield "embedding.rows", step.tokens * model.hidden_size * step.weight
    if step.expert_width and model.moe is not None:
        yield "moe.choice", step.tokens * model.moe.num_experts * FLOAT
    if (dsa := model.dsa) is not None and model.mla is not None:
        keys = max(step.config.runtime.context_workspace_tokens, dsa.index_topk)
        yield "selection.scores", QUERY_BLOCK * keys * FLOAT
        yield "selection.keys", keys * dsa.head_dim * FLOAT
        yield "selection.by_head", max(512 * 1024, dsa.num_heads * keys) * FLOAT
        gathered = max(1 << 20, dsa.index_topk * model.mla.token_dim)
        yield "selected.rows", gathered * FLOAT
        yield "selected.keys", gathered * FLOAT
        yield "selected.scores", gathered // model.mla.token_dim * step.heads * FLOAT
