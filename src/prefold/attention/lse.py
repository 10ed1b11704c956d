"""Merging partial attention results by their log-sum-exp.

Convention of the whole project: natural log, float32, `-inf` for a row that saw no key.
"""

from __future__ import annotations

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a partial result into `(out, lse)` in place.

    Two softmaxes over disjoint key sets combine to the softmax over their union: each output is
    weighted by exp(its lse - joint lse). A row that is empty on one side takes the other side's
    value whatever the empty side holds (it may be uninitialised memory); a row empty on both
    sides becomes output 0, lse -inf.

    Args:
        out: [..., num_heads, head_dim] float32, changed.
        lse: [..., num_heads] float32, changed.
        part_out, part_lse: of the same shapes, not changed.
    """
    joint = torch.logaddexp(lse, part_lse)
    empty = joint == -torch.inf
    weight = torch.exp(lse - joint).masked_fill_(empty, 0.0)
    part_weight = torch.exp(part_lse - joint).masked_fill_(empty, 0.0)
    if bool(torch.any(weight == 0.0)) or bool(torch.any(part_weight == 0.0)):
        # 0 * NaN is NaN: an empty side must not be multiplied in.
        out.masked_fill_((weight == 0.0).unsqueeze(-1), 0.0)
        part_out = part_out.masked_fill((part_weight == 0.0).unsqueeze(-1), 0.0)
    out.mul_(weight.unsqueeze(-1)).addcmul_(part_out, part_weight.unsqueeze(-1))
    lse.copy_(joint)
