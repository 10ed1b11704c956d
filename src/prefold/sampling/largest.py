"""The largest of a row's logits in few passes.

torch's argmax takes as long as five passes, its topk as ten, and its sort as two hundred; numpy's argmax and
sort compare vectors (with AVX2 or AVX-512), and logits on a CPU are numpy's, too.
"""

from __future__ import annotations

import numpy as np
import torch


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """[n] int64: where each row of [n, vocab] has its largest, or a NaN; the first of equal ones."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)  # documented to return the first of equal maxima
    return torch.from_numpy(logits.numpy().argmax(axis=-1))  # numpy documents the same


def sorted_values(logits: torch.Tensor) -> torch.Tensor:
    """Each row of [n, vocab], descending; no NaN."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    negative = (-logits).numpy()
    negative.sort(axis=-1)
    return torch.from_numpy(negative).neg_()


def counts_above(logits: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """[n] int64: how many of each row of [n, vocab] are larger than its bound [n]."""
    above = logits > bounds[:, None]
    if logits.device.type != "cpu":
        return above.sum(dim=-1)
    return torch.tensor([int(np.count_nonzero(row)) for row in above.numpy()])


def largest_values(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[n, count], descending: what topk gives, for 1 <= count <= vocab.

    Columns are dealt to groups, and the `count` groups with the largest maxima hold `count` values that no
    value elsewhere exceeds.
    """
    n, vocab_size = logits.shape
    size = int((vocab_size / count) ** 0.5)  # of a group: as many maxima as values to choose from at last
    num_groups = vocab_size // max(size, 1)
    if size < 2 or num_groups < count:
        return logits.topk(count, dim=-1).values
    grouped = logits[:, : size * num_groups].view(n, size, num_groups)
    found = grouped.amax(dim=1).topk(count, dim=-1, sorted=False).indices
    members = grouped.gather(2, found[:, None, :].expand(n, size, count)).flatten(1)
    return torch.cat([members, logits[:, size * num_groups :]], dim=1).topk(count, dim=-1).values
