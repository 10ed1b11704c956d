"""Bytes that a rank hands to its collectives in a step: the formulas, each in one place.

What a step really moved is counted by `Group.traffic`; the two must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from prefold.config import DTYPES, EngineConfig, MLAConfig
from prefold.distributed.mesh import Coords
from prefold.distributed.pcp_layout import Partition
from prefold.distributed.stages import split_layers
from prefold.kv_spec import new_row_bytes, row_bytes

ALIGNMENT = 64
"""Sections of the exchange start at multiples of this, so that any dtype can view them."""

CAPACITY_BYTES = 8
"""The number on which replicas agree in a step: most tokens that one of their ranks sends to experts."""


def exchange_bytes(kv_bytes: int, hidden_bytes: int) -> tuple[int, int]:
    """(offset of the hidden section, length) of the step's exchange `decode KV | hidden rows`.

    >>> exchange_bytes(100, 64), exchange_bytes(0, 0)
    ((128, 192), (0, 0))
    """
    offset = -(-kv_bytes // ALIGNMENT) * ALIGNMENT
    return offset, offset + hidden_bytes


def experts_of(place: int, num_experts: int, size: int) -> range:
    """Experts on rank `place` of an EP group of `size` ranks: counts differ by at most 1, and may be 0.

    >>> [list(experts_of(place, 8, 3)) for place in range(3)]
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    return range(num_experts * place // size, num_experts * (place + 1) // size)


def dispatch_row_bytes(hidden_size: int, top_k: int, itemsize: int) -> tuple[int, int]:
    """(offset of ids and weights, length) of a token on its way to experts.

    `hidden | top_k ids, 4 bytes each | top_k weights, 4 bytes each`, padded to ALIGNMENT.

    >>> dispatch_row_bytes(hidden_size=1024, top_k=8, itemsize=2)
    (2048, 2112)
    """
    offset = -(-hidden_size * itemsize // 4) * 4
    return offset, -(-(offset + 8 * top_k) // ALIGNMENT) * ALIGNMENT


def dispatch_rows(ids_by_place: Sequence[np.ndarray], num_experts: int) -> np.ndarray:
    """[E, E] rows that each place of an EP group sends to each in one layer; as many go back.

    Args:
        ids_by_place: [tokens, top_k] experts of the tokens that each place sends. A token goes once
            to each rank that holds at least one of its experts.

    >>> dispatch_rows([np.array([[0, 1], [1, 3]]), np.array([[2, 3]])], num_experts=4)
    array([[2, 1],
           [0, 1]])
    """
    size = len(ids_by_place)
    place_of = np.repeat(np.arange(size), [len(experts_of(i, num_experts, size)) for i in range(size)])
    rows = np.zeros((size, size), np.int64)
    for source, ids in enumerate(ids_by_place):
        needed = np.zeros((len(ids), size), bool)
        needed[np.arange(len(ids))[:, None], place_of[ids]] = True
        rows[source] = needed.sum(axis=0)
    return rows


def expert_bytes(rows: np.ndarray, hidden_size: int, top_k: int, itemsize: int) -> np.ndarray:
    """[E] bytes that each place hands to other ranks in one layer, both ways, from `dispatch_rows`.

    Rows of a rank to itself do not count: they stay where they are.
    """
    others = rows - np.diag(np.diag(rows))
    sent = others.sum(axis=1) * dispatch_row_bytes(hidden_size, top_k, itemsize)[1]
    return sent + others.sum(axis=0) * hidden_size * itemsize


def expert_bytes_all_gather_form(
    num_tokens: int, size: int, hidden_size: int, top_k: int, itemsize: int
) -> int:
    """What a rank would hand to other ranks instead if every token went to all of them and came back from
    all: an all-gather and a reduce-scatter, padded to the `num_tokens` of the rank with the most."""
    row = dispatch_row_bytes(hidden_size, top_k, itemsize)[1] + hidden_size * itemsize
    return (size - 1) * num_tokens * row


def expected_places(num_experts: int, top_k: int, size: int) -> float:
    """Ranks that a token goes to on average (its own included) if every choice of experts is as likely.

    >>> expected_places(num_experts=4, top_k=1, size=2), expected_places(num_experts=4, top_k=4, size=2)
    (1.0, 2.0)
    >>> round(expected_places(num_experts=64, top_k=4, size=8), 2)
    3.38
    """
    every = comb(num_experts, top_k)
    held = [len(experts_of(place, num_experts, size)) for place in range(size)]
    return sum(1 - comb(num_experts - count, top_k) / every for count in held)


def travel_bytes(
    counts: Sequence[int], place: int, num_heads: int, q_bytes: int, out_dim: int
) -> tuple[int, int]:
    """(all-gather, all-to-all) of a layer's travelling queries on one rank of their group.

    Queries are padded to the fullest rank; results go back in float32, `output | lse` per head, and those
    of a rank's own queries stay where they are.

    Args:
        counts: queries of each place of the group, of `num_heads` heads.
        q_bytes: of one head of a query.
        out_dim: elements of one head of a result.

    >>> travel_bytes([3, 2], place=1, num_heads=4, q_bytes=100, out_dim=9)
    (1200, 480)
    """
    others = sum(counts) - counts[place]
    return max(counts) * num_heads * q_bytes, others * num_heads * (out_dim + 1) * 4


def shared_decode_bytes(num_tokens: int, num_heads: int, num_parts: int, mla: MLAConfig) -> dict[str, int]:
    """What a rank hands over in a layer for decode tokens that its DCP group computes, by collective;
    those of groups of one rank do not happen. Results that are large are summed instead of gathered
    (attention.merge).

    Args:
        num_parts: ranks of the group that have other heads, itself included (`dcp_tp`).
    """
    rows = num_tokens * num_heads * 4
    return {
        "dcp_tp.all_gather": rows * mla.token_dim,
        "dcp_tp.all_to_all": rows * (num_parts - 1) * (mla.kv_lora_rank + 1),
        "dcp_pcp.all_gather": rows * (mla.v_head_dim + 1),
    }


def projected_bytes(num_rows: int, num_heads: int, mla: MLAConfig, itemsize: int) -> int:
    """What a rank hands to the PCP group in a layer in which ranks share up-projected keys and values,
    besides the new KV: keys without position and values of all its heads, and k_pe.

    Args:
        num_rows: of all tiles, each padded to the fullest rank.
    """
    return num_rows * mla.projected_dim(num_heads) * itemsize


@dataclass(frozen=True)
class ShardedTokens:
    """Tokens whose keys are selected from shards, with sparse attention (attention.sparse_shards).

    Attributes:
        counts: visiting tokens of each PCP rank of the unit; empty: decode tokens, which all of them have.
        num_tokens: of the unit.
        num_candidates: that a rank sends for each: index_topk, or the keys of the fullest rank if fewer.
    """

    counts: tuple[int, ...]
    num_tokens: int
    num_candidates: int


def sharded_bytes(
    tokens: ShardedTokens, place: int, num_heads: int, num_parts: int, mla: MLAConfig, has_indexer: bool
) -> Counter[str]:
    """What a rank hands over in a layer for them, by collective; see `shared_decode_bytes`.

    Visitors travel in float32, `query | indexer's query | its weights`, padded to the fullest rank.

    Args:
        place: in the unit.

    """
    sent = Counter(shared_decode_bytes(tokens.num_tokens, num_heads, num_parts, mla))
    assert mla.dsa is not None
    if tokens.counts:
        index = mla.dsa.num_heads * (mla.dsa.head_dim + 1) if has_indexer else 0
        others = tokens.num_tokens - tokens.counts[place]
        sent["dcp_pcp.all_gather"] = max(tokens.counts) * (num_heads * mla.qk_head_dim + index) * 4
        sent["dcp_pcp.all_to_all"] = others * num_heads * (mla.v_head_dim + 1) * 4
    if has_indexer:
        sent["dcp.all_gather"] = tokens.num_tokens * tokens.num_candidates * 8
    return sent


def sparse_traffic(
    config: EngineConfig, at: Coords, tokens: Sequence[ShardedTokens], num_gathered: int
) -> dict[str, int]:
    """What sparse attention over shards (D > 1) adds to `step_traffic` on the rank at `at`.

    Args:
        tokens: each piece of visitors, and the decode tokens.
        num_gathered: rows of cached context that a rank sends in the tiles of a layer.
    """
    model, parallel = config.model, config.parallel
    mla, tp_size = model.mla, parallel.tensor_parallel_size
    assert mla is not None
    assert mla.dsa is not None
    dcp = parallel.decode_context_parallel_size
    unit = min(dcp, parallel.prefill_context_parallel_size)
    sent: Counter[str] = Counter()
    for layer in split_layers(model, parallel.pipeline_parallel_size)[at.pp]:
        sent["dcp.all_gather"] += num_gathered * new_row_bytes(mla, layer, tp_size, config.cache.cache_dtype)
        for some in tokens:
            heads = model.num_heads // tp_size
            sent += sharded_bytes(some, at.pcp % unit, heads, dcp // unit, mla, mla.dsa.full_layers[layer])
    sizes = {"dcp": dcp, "dcp_pcp": unit, "dcp_tp": dcp // unit}
    return {name: num_bytes for name, num_bytes in sent.items() if sizes[name.split(".")[0]] > 1}


def step_traffic(
    config: EngineConfig,
    parts: Partition,
    at: Coords,
    wanted_by_rank: np.ndarray,
    num_logits: int,
    num_sent_decode: int | None = None,
) -> dict[str, int]:
    """What the rank at `at` hands to its collectives in a step, by their names in `Group.traffic`.

    Per layer of its stage the PCP group gathers the new KV of prefill tokens, padded to the fullest rank;
    once per step it gathers the decode tokens' KV of these layers and, on the last stage, the hidden rows
    that are sampled, again padded. The TP group sums the embedding and two projections per layer, and
    gathers logits. A stage sends its tokens to the next. With experts on ranks, replicas agree on a number.

    Not in here: what goes to experts, which follows from the routing (`expert_bytes`); what travels to a
    sharded context or between slices of a replicated one, which attention decides (`travel_bytes`,
    `shared_decode_bytes`, `sparse_traffic`), and what it shares (`projected_bytes`). Nor the comparison of
    step plans.

    Args:
        wanted_by_rank: [P] hidden rows that each PCP rank restores.
        num_logits: rows of logits, on PCP place 0 of the last stage.
        num_sent_decode: most decode tokens whose KV a rank sends to others; default: with D = 1, all.
    """
    model, parallel = config.model, config.parallel
    if num_sent_decode is None:
        assert parallel.decode_context_parallel_size == 1
        num_sent_decode = int(parts.num_decode_tokens.max())
    layers = split_layers(model, parallel.pipeline_parallel_size)[at.pp]
    is_last = at.pp == parallel.pipeline_parallel_size - 1
    compute_size = DTYPES[config.runtime.compute_dtype]
    tp_size = parallel.tensor_parallel_size
    attention, cache_dtype = model.attention, config.cache.cache_dtype
    new_bytes = sum(new_row_bytes(attention, layer, tp_size, cache_dtype) for layer in layers)
    token_bytes = len(layers) * row_bytes(attention, tp_size, cache_dtype)
    hidden_bytes = model.hidden_size * compute_size
    num_tokens = int(parts.num_tokens[at.pcp])
    sent = dict.fromkeys(("pcp.all_gather", "tp.all_reduce", "tp.all_gather", "pp.send", "dp.all_gather"), 0)
    if parallel.prefill_context_parallel_size > 1:
        wanted_bytes = int(wanted_by_rank.max()) * hidden_bytes * is_last
        kv_bytes = num_sent_decode * token_bytes
        sent["pcp.all_gather"] = int(parts.num_prefill_tokens.max()) * new_bytes
        if kv_bytes or wanted_by_rank[1:].any():  # Rows of place 0 are where they are wanted.
            sent["pcp.all_gather"] += exchange_bytes(kv_bytes, wanted_bytes)[1]
    if parallel.tensor_parallel_size > 1:
        sums = (at.pp == 0) + 2 * len(layers)
        sent["tp.all_reduce"] = sums * num_tokens * hidden_bytes
        vocab_per_rank = -(-model.vocab_size // parallel.tensor_parallel_size)
        sent["tp.all_gather"] = num_logits * vocab_per_rank * compute_size * (is_last and at.pcp == 0)
    if not is_last:
        sent["pp.send"] = num_tokens * hidden_bytes
    if parallel.data_parallel_size > 1 and parallel.enable_expert_parallel:
        sent["dp.all_gather"] = CAPACITY_BYTES
    return {name: num_bytes for name, num_bytes in sent.items() if num_bytes}
