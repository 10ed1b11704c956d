"""Bytes of shared memory that a rank sends its messages in, by group and channel (distributed.shm).

A slot is as large as the largest message that its channel has had, and a channel has two of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from prefold.distributed.slots import NUM_SLOTS, PIECE_BYTES, slot_bytes
from prefold.memory.buffers import expert_tokens, logits_rows
from prefold.memory.step import LargestStep
from prefold.traffic import dispatch_row_bytes


def slots_bytes(step: LargestStep, buffers: dict[str, int]) -> dict[str, int]:
    """Of all channels of a rank whose groups share memory; a channel without messages has none.

    Args:
        buffers: of the same step (memory.buffers): most of what is sent lies in one of them.
    """
    if not step.shares_memory:
        return {}
    slots: dict[str, int] = {}
    for name, num_bytes in _messages(step, buffers):
        if num_bytes > 0:
            slots[name] = max(slots.get(name, 0), NUM_SLOTS * slot_bytes(num_bytes))
    if step.config.parallel.enable_expert_parallel and step.ep > 1:
        slots["ep.exchange"] = sum(map(slot_bytes, _to_experts(step)))
    return slots


def _messages(step: LargestStep, buffers: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Channels, and how large their messages are, each kind apart."""
    model, parallel, item = step.config.model, step.config.parallel, step.item
    hidden = step.tokens * model.hidden_size * item
    if step.tp > 1:
        logits = logits_rows(step) * -(-model.vocab_size // step.tp) * item
        yield "tp.pieces", min(PIECE_BYTES, max(hidden, logits))
    if parallel.pipeline_parallel_size > 1 and step.layers.stop < model.num_layers:
        yield "pp.send", hidden
    if step.pcp > 1:
        yield "pcp.gather", buffers["attention.new_kv"]
        yield "pcp.gather", buffers["pcp.exchange"]
        if model.mla is not None:
            yield "pcp.gather", step.shared_rows * model.mla.projected_dim(step.heads) * item
    travel = "pcp" if step.dcp == 1 else "dcp"
    yield f"{travel}.gather", buffers.get("travel.sent", 0)
    yield f"{travel}.exchange", buffers.get("travel.back", 0)
    if step.dcp > 1:
        yield "dcp.gather", buffers["kv_tiles.sent"]
        yield "dcp.gather", buffers.get("shards.ranks", 0)
        if step.dcp > step.pcp:
            yield "dcp_tp.gather", buffers["decode.own_q"]
            yield "dcp_tp.exchange", buffers["merge.heads"]
    if step.unit > 1:
        yield "dcp_pcp.gather", max(buffers["merge.own"], buffers.get("shards.sent", 0))
        yield "dcp_pcp.exchange", buffers.get("shards.results", 0)
        yield "dcp_pcp.pieces", min(PIECE_BYTES, max(buffers["merge.own"], buffers.get("ep.decode", 0)))


def _to_experts(step: LargestStep) -> tuple[int, int]:
    """Tokens on their way to experts and back: by turns, so that each has a slot. Both have room for the
    most uneven routing."""
    moe, hidden = step.config.model.moe, step.config.model.hidden_size
    assert moe is not None
    tokens = expert_tokens(step)
    _, row = dispatch_row_bytes(hidden, moe.top_k, step.item)
    return tokens * min(step.ep, moe.top_k) * row, tokens * step.ep * hidden * step.item
