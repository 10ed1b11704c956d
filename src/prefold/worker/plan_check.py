"""Do all ranks mean the same step? A checksum of the plan, compared before anything is computed.

Every collective of a step follows from its plan, so ranks that disagree would exchange the wrong
tensors or wait for each other. Here they notice, and say so.
"""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np
import torch

from prefold.distributed.errors import CollectiveError
from prefold.distributed.group import Group
from prefold.distributed.pcp_layout import Partition
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.request_states import RequestStates


def plan_checksum(
    batch: GlobalBatch, states: RequestStates, parts: Partition, wanted_tokens: np.ndarray
) -> int:
    """CRC-32 of what a step computes, for which requests, on which ranks, and into which blocks.

    Args:
        wanted_tokens: global token indices whose hidden states are brought together.
    """
    num_blocks = int(states.num_blocks[batch.rows].max(initial=0))
    arrays = (
        np.array([batch.step_id]),
        batch.rows,
        batch.num_computed,
        batch.num_scheduled,
        batch.is_prefill,
        batch.token_ids,
        batch.sampled,
        states.block_ids[batch.rows, :num_blocks],
        parts.row_rank,
        parts.row_request,
        parts.row_start,
        parts.row_end,
        wanted_tokens,
    )
    checksum = zlib.crc32("\0".join(batch.request_ids).encode())
    for array in arrays:
        checksum = zlib.crc32(array.data, checksum)
    return checksum


def check_plan(
    tp: Group, pcp: Group, step_id: int, checksum: int, device: torch.device | str = "cpu"
) -> None:
    """Compare `checksum` over the PCP x TP ranks of a stage. All of them call this, and all of them raise.

    `device` is where the groups' tensors live.

    Raises:
        CollectiveError: naming the step, and the ranks that differ from most others.
    """
    own = torch.tensor([tp.ranks[tp.rank], checksum], device=device)
    found = pcp.all_gather(tp.all_gather(own)).view(-1, 2).tolist()
    if all(other == checksum for _, other in found):
        return
    most_common = Counter(other for _, other in found).most_common(1)[0][0]
    differing = ", ".join(str(rank) for rank, other in sorted(found) if other != most_common)
    plans = ", ".join(f"rank {rank} {other:08x}" for rank, other in sorted(found))
    raise CollectiveError(
        f"step {step_id}: ranks have planned different steps: {differing} differ from the others "
        f"(checksums: {plans})"
    )
