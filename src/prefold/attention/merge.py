"""Partial results of ranks, joined by their log-sum-exp.

A partial result travels packed, one row per token: `num_heads x (output | lse)` in float32. Two ways
to join, each the identity in a group of one:

- `join_over`: the ranks have the same heads and tokens, and all need the result. Small results: one
  all-gather, read in place, so each rank reads (size - 1) parts and waits once. Large results of many ranks:
  an all-gather of the lse alone and a sum of the scaled outputs, which reads about two parts whatever the
  size, but waits three times.
- `scatter_heads`: every rank has partial results for the heads of all ranks and needs its own heads. One
  all-to-all: (size - 1) / size of the rows travel, once.

Which of the two a result goes through follows from who holds what (attention.shared_decode); all ranks
add in the order of the group, so ranks that join the same parts get equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefold.attention.lse import merge_
from prefold.distributed.group import Group
from prefold.workspace import Workspace

SUM_FROM_BYTES = 2 << 20
"""Bytes that a sum must save a rank to read (0.2 ms of shared memory) to be worth two more waits."""


def packed(
    workspace: Workspace, name: str, num_tokens: int, num_heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A buffer for partial results, and its two sections: (whole [num_tokens, num_heads, dim + 1],
    outputs [..., dim], lse [...])."""
    whole = workspace.get(name, (num_tokens, num_heads, dim + 1), torch.float32)
    return whole, whole[..., :dim], whole[..., dim]


def merge_packed(parts: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge packed results, in the order given.

    Args:
        parts: at least one, each [num_tokens, num_heads, dim + 1] float32; not changed.
        out: [num_tokens, num_heads, dim] float32, written.
        lse: [num_tokens, num_heads] float32, written.
    """
    out.copy_(parts[0][..., :-1])
    lse.copy_(parts[0][..., -1])
    for part in parts[1:]:
        merge_(out, lse, part[..., :-1], part[..., -1])


def join_over(group: Group, out: torch.Tensor, lse: torch.Tensor, workspace: Workspace) -> None:
    """Replace every rank's partial result for the same tokens and heads by the joint one.

    Args:
        out: [num_tokens, num_heads, dim], any float dtype; changed.
        lse: [num_tokens, num_heads] float32.
    """
    if out.numel() * 4 * (group.size - 3) > SUM_FROM_BYTES:
        _join_by_sum(group, out, lse, workspace)
        return
    own, own_out, own_lse = packed(workspace, "merge.own", *out.shape)
    own_out.copy_(out)
    own_lse.copy_(lse)
    _, joint, joint_lse = packed(workspace, "merge.joint", *out.shape)
    gather = group.start_all_gather(own)
    merge_packed(gather.wait(), joint, joint_lse)
    gather.release()
    out.copy_(joint)


def _join_by_sum(group: Group, out: torch.Tensor, lse: torch.Tensor, workspace: Workspace) -> None:
    """`join_over` for many bytes: the shares of the ranks in the softmax are known from the lse alone."""
    joint_lse = group.all_gather(lse).logsumexp(0)
    # A row that nobody has a key for is 0 already: finish() writes that.
    share = torch.exp(lse - joint_lse).masked_fill_(joint_lse == -torch.inf, 0.0)
    scaled = workspace.get("merge.own", out.shape, torch.float32).copy_(out).mul_(share.unsqueeze(-1))
    out.copy_(group.all_reduce(scaled))


def scatter_heads(
    group: Group, partial: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, workspace: Workspace
) -> None:
    """Bring each rank the results for its own heads, joined over the group.

    Args:
        partial: [num_tokens, size * num_heads, dim + 1] packed, heads in the order of the group.
        out: [num_tokens, num_heads, dim] float32, written.
        lse: [num_tokens, num_heads] float32, written.
    """
    num_tokens, num_heads = lse.shape
    width = num_heads * partial.shape[2]
    send = workspace.get("merge.heads", (group.size, num_tokens, width), torch.float32)
    send.copy_(partial.view(num_tokens, group.size, width).transpose(0, 1))
    counts = [num_tokens] * group.size
    exchange = group.start_all_to_all(
        send.view(-1, width), counts, capacity=group.size * num_tokens, receive_counts=counts
    )
    merge_packed([part.view(num_tokens, num_heads, -1) for part in exchange.wait()], out, lse)
    exchange.release()
