"""Attention of each query to keys of its own in absorbed form: what follows a selection."""

from __future__ import annotations

import torch

from prefold.attention.row_format import RowFormat
from prefold.kernels import rows
from prefold.workspace import Workspace

GATHER_ELEMENTS = 1 << 20
"""Elements of selected keys that are copied together, at least one query's: 4 MiB."""


def attend_selected(
    q: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    row_format: RowFormat,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Attention of query i to the rows `slots[i]` of the cache, which all heads share.

    Args:
        q: [n, num_heads, dim] float32.
        slots: [n, topk] int32 or int64, -1: not in this cache. Different from each other but for those.
        cache: [num_slots, width], rows of dim elements in `row_format`: keys, whose first kv_lora_rank
            elements are the values.
        out: [n, num_heads, kv_lora_rank] float32, written; 0 for a query without keys. May be strided.
        lse: [n, num_heads] float32, written: natural log, -inf for a query without keys. May be strided.
    """
    if rows.can_attend(q, cache, row_format.fp8_rows):
        rows.attend(q, slots, cache, scale, out, lse, fp8=row_format.fp8_rows)
        return
    num_heads, dim = q.shape[1:]
    slots = _without_absent(slots.long())
    num_keys = slots.shape[1]
    size = max(1, GATHER_ELEMENTS // (num_keys * dim))
    for start in range(0, len(q), size):
        block = slots[start : start + size]
        stored = workspace.get("selected.rows", (block.numel(), row_format.width), cache.dtype)
        torch.index_select(cache, 0, block.flatten().clamp(min=0), out=stored)
        k = workspace.get("selected.keys", (len(block), num_keys, dim), torch.float32)
        k.copy_(row_format.decode(stored).view(k.shape))
        absent = block < 0
        k.masked_fill_(absent.unsqueeze(-1), 0.0)  # 0 * NaN is NaN
        shape = (len(block), num_heads, num_keys)
        scores = workspace.get("selected.scores", shape, torch.float32)
        torch.bmm(q[start : start + size], k.transpose(1, 2), out=scores)
        scores.mul_(scale).masked_fill_(absent.unsqueeze(1), -torch.inf)
        sums = torch.logsumexp(scores, dim=-1)
        lse[start : start + size].copy_(sums)
        scores.sub_(sums.masked_fill_(sums == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        out[start : start + size].copy_(torch.bmm(scores, k[..., : out.shape[2]]))


def _without_absent(slots: torch.Tensor) -> torch.Tensor:
    """The same slots in fewer columns, at least one, where each query has some -1.

    >>> _without_absent(torch.tensor([[-1, 3, -1], [7, -1, 5]])).tolist()
    [[3, -1], [7, 5]]
    """
    absent = slots < 0
    if not bool(absent.any()):
        return slots
    most = slots.shape[1] - int(absent.sum(dim=1).min())
    return slots.sort(dim=1, descending=True).values[:, : max(most, 1)]
