"""Small all-reduces in native code: the same bits as in Python, whoever is late and whichever slots move."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from prefold.distributed import shm_collectives
from prefold.distributed.group import Group
from prefold.distributed.shm_collectives import ShmCollectives
from prefold.kernels import library
from prefold.kernels.shared_sum import SharedSum, Status
from prefold.testing.run_ranks import run_ranks

pytestmark = pytest.mark.skipif(not library.is_available(), reason=library.problem())


def inputs(seed: int, size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(numel, generator=generator) * 100).to(dtype) for _ in range(size)]


def check_sum(group: Group, seed: int, numel: int, dtype: torch.dtype) -> None:
    parts = inputs(seed, group.size, numel, dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    x = parts[group.rank].clone()
    assert group.all_reduce(x) is x
    assert torch.equal(x, total.to(dtype)), (seed, numel, dtype)


def watch(counts: dict[Status, int]) -> None:
    """Count how native sums end in this process."""
    call = SharedSum.__call__

    def watched(self: SharedSum, x: torch.Tensor) -> Status:
        before, status = x.clone(), call(self, x)
        counts[status] += 1
        assert status == Status.DONE or torch.equal(x, before)
        return status

    SharedSum.__call__ = watched


def spin_anyway(group: Group) -> None:
    """Ranks that share cores do not wait in native code, which would keep the others from theirs."""
    collectives = group._collectives
    assert isinstance(collectives, ShmCollectives)
    assert (collectives._sum_natively is not None) == (group.size <= (os.cpu_count() or 1))
    collectives._sum_natively = shm_collectives._shared_sum(group.rank, collectives._boxes)


def many_sums(ctx) -> tuple[dict[Status, int], int]:
    """Sizes that grow and shrink, up to above the limit, among other collectives of the group."""
    counts = dict.fromkeys(Status, 0)
    watch(counts)
    group, rng = ctx.groups["tp"], random.Random(0)
    spin_anyway(group)
    largest = shm_collectives.NATIVE_SUM_BYTES // 2
    sizes = [1, 2, 255, 256, 257, 4096, 4097, 5000, largest // 2, largest // 2 + 1, largest, largest + 1]
    for seed in range(300):
        numel = rng.choice(sizes[: 3 + seed // 20])
        check_sum(group, seed, numel, rng.choice((torch.float32, torch.bfloat16)))
        match rng.randrange(5):
            case 0:
                group.barrier()
            case 1:
                x = torch.full((rng.choice((3, 700)),), float(group.rank))
                assert torch.equal(group.all_gather(x)[:, 0], torch.arange(group.size).float())
            case 2:
                assert int(group.broadcast(torch.tensor([group.rank]), 1)) == 1
            case 3:
                assert int(group.all_reduce(torch.tensor([1]))) == group.size
    return counts, len(group.traffic)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_all_sizes_among_other_collectives(size: int) -> None:
    for counts, _ in run_ranks(many_sums, size, tp=size):
        # Ranks may be late at any time on a busy machine, but not always.
        assert counts[Status.DONE] >= 20, counts
        assert counts[Status.NOTHING] >= 2, "slots are mapped first, and mapped anew when they grow"


def late_ranks(ctx) -> dict[Status, int]:
    counts = dict.fromkeys(Status, 0)
    watch(counts)
    group = ctx.groups["tp"]
    spin_anyway(group)
    for seed in range(30):
        if seed % group.size == group.rank:
            time.sleep(0.003)
        check_sum(group, seed, 1000, torch.float32)
    return counts


def test_a_rank_that_waited_in_vain_goes_on_in_python() -> None:
    for counts in run_ranks(late_ranks, 2, tp=2):
        assert counts[Status.PUBLISHED] >= 10, counts
