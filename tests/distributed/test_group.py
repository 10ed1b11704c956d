"""Every op, dtype and size over shared memory and gloo, against sums and copies made locally.

Ranks are started once per test; all ranks know all inputs, so each checks its own results.
"""

import hashlib
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from prefold.distributed.group import GROUP_NAMES, Group, make_groups
from prefold.distributed.mesh import Mesh
from prefold.testing.run_ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
PIECE_BYTES = 8192
# 1 and odd ones, around a slot of float32 (2048), and large enough for sliced sums of 3 ranks.
NUMELS = (1, 2, 3, 255, 2047, 2048, 2049, 12_345, 40_001)


def value(seed, rank, shape, dtype):
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def summed(parts):
    """In rank order, in float32 (or the parts' own dtype if that is exact), rounded once."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype == torch.bfloat16 else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


class Checker:
    """Runs ops on one group and compares; collects results that all ranks must agree on, bit for bit."""

    def __init__(self, group):
        self.group = group
        self.bits = hashlib.sha256()

    def inputs(self, seed, shape, dtype):
        return [value(seed, rank, shape, dtype) for rank in range(self.group.size)]

    def same_sum(self, result, parts):
        expected = summed(parts)
        if self.group.transport == "shm":
            assert torch.equal(result, expected), (result.dtype, result.shape)
        else:
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-3 * len(parts))

    def all_reduce(self, seed, numel, dtype):
        parts = self.inputs(seed, (numel,), dtype)
        x = parts[self.group.rank].clone()
        assert self.group.all_reduce(x) is x
        self.same_sum(x, parts)
        self.bits.update(x.view(torch.uint8).numpy().tobytes())

    def all_gather(self, seed, numel, dtype):
        parts = self.inputs(seed, (numel,), dtype)
        out = torch.empty(self.group.size, numel, dtype=dtype)
        assert self.group.all_gather(parts[self.group.rank], out) is out
        assert torch.equal(out, torch.stack(parts))

    def reduce_scatter(self, seed, numel, dtype):
        parts = self.inputs(seed, (self.group.size, numel), dtype)
        mine = parts[self.group.rank].clone()
        result = self.group.reduce_scatter(mine)
        self.same_sum(result, [part[self.group.rank] for part in parts])
        assert torch.equal(mine, parts[self.group.rank])

    def broadcast(self, seed, numel, dtype):
        parts = self.inputs(seed, (numel,), dtype)
        src = seed % self.group.size
        x = parts[self.group.rank].clone()
        assert self.group.broadcast(x, src) is x
        assert torch.equal(x, parts[src])

    def gather_in_place(self, seed, numel, dtype):
        parts = self.inputs(seed, (numel, 1), dtype)
        gather = self.group.start_all_gather(parts[self.group.rank])
        for result, part in zip(gather.wait(), parts, strict=True):
            assert torch.equal(result, part)
        gather.release()

    def ops(self):
        return [self.all_reduce, self.all_gather, self.reduce_scatter, self.broadcast, self.gather_in_place]


def check_all_ops(ctx):
    """Every op, dtype and size on shm and gloo; the groups of both share the processes."""
    torch.set_num_threads(1)
    digests = []
    mesh = Mesh(pcp=ctx.world_size)
    for transport in ("shm", "gloo"):
        group = make_groups(mesh, ctx.rank, transport, 60, ctx.store, PIECE_BYTES)["pcp"]
        assert group.transport == transport
        checker = Checker(group)
        for dtype in DTYPES:
            for seed, numel in enumerate(NUMELS):
                for op in checker.ops():
                    op(seed, numel, dtype)
        group.barrier()
        check_shapes(group)
        digests.append(checker.bits.hexdigest())
        if transport == "shm":
            check_random_sequence(group)
    return digests


def check_shapes(group):
    """Empty, strided and several-dimensional tensors, and inference mode."""
    before = dict(group.traffic)
    empty = torch.empty(0, 5)
    assert group.all_reduce(empty) is empty
    assert group.all_gather(empty).shape == (group.size, 0, 5)
    assert group.reduce_scatter(torch.empty(group.size, 0)).shape == (0,)
    assert group.broadcast(empty, 0) is empty
    gather = group.start_all_gather(empty)
    assert [part.shape for part in gather.wait()] == [(0, 5)] * group.size
    gather.release()
    assert group.traffic == before

    parts = [value(1, rank, (6, 4), torch.float32) for rank in range(group.size)]
    strided = parts[group.rank].clone().t()
    group.all_reduce(strided)
    torch.testing.assert_close(strided, summed(parts).t())
    strided = parts[group.rank].clone()[:, ::2]
    group.broadcast(strided, group.size - 1)
    assert torch.equal(strided, parts[-1][:, ::2])
    assert torch.equal(group.all_gather(parts[group.rank].t()), torch.stack([part.t() for part in parts]))
    stacked = torch.stack([parts[group.rank]] * group.size)
    torch.testing.assert_close(group.reduce_scatter(stacked), summed(parts))
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            x = parts[group.rank].clone().bfloat16()
            torch.testing.assert_close(
                group.all_reduce(x), summed([part.bfloat16() for part in parts]), rtol=1e-2, atol=0.1
            )
            gather = group.start_all_gather(parts[group.rank])
            assert torch.equal(gather.wait()[-1], parts[-1])
            gather.release()


def check_random_sequence(group, num_ops=400):
    """Ops at random with gathers in flight between them, ranks out of step; slots grow on the way."""
    checker = Checker(group)
    choice = random.Random(group.size)
    mood = random.Random(group.rank)
    in_flight = []
    num_gathers = 0
    for seed in range(num_ops):
        if mood.random() < 0.03:
            time.sleep(mood.random() * 5e-3)
        numel = choice.choice([1, 7, 300, 2048, 5000])
        dtype = choice.choice(DTYPES)
        kind = choice.randrange(7)
        can_start = all(number > num_gathers - 1 for number, _, _ in in_flight)
        if kind < 4:
            checker.ops()[kind](seed, numel, dtype)
        elif kind == 4 and can_start:
            checker.gather_in_place(seed, numel, dtype)
            num_gathers += 1
        elif kind == 5 and can_start:
            parts = checker.inputs(seed, (numel,), dtype)
            num_gathers += 1
            in_flight.append((num_gathers, group.start_all_gather(parts[group.rank]), parts))
        elif in_flight:
            _, gather, parts = in_flight.pop(choice.randrange(len(in_flight)))
            for result, part in zip(gather.wait(), parts, strict=True):
                assert torch.equal(result, part)
            gather.release()
    for _, gather, parts in in_flight:
        assert torch.equal(gather.wait()[0], parts[0])
        gather.release()


@pytest.mark.parametrize("size", [2, 3])
def test_all_ops_agree_on_both_transports(size):
    digests = run_ranks(check_all_ops, size)
    # all_reduce leaves the same bits on every rank.
    assert all(rank_digests == digests[0] for rank_digests in digests)


def check_mesh(ctx):
    groups = ctx.groups
    coords = ctx.mesh.coords(ctx.rank)
    assert (groups["tp"].rank, groups["pcp"].rank) == (coords.tp, coords.pcp)
    x = torch.tensor([float(10**ctx.rank)])
    tp, pcp = (groups[axis].all_reduce(x.clone()).item() for axis in ("tp", "pcp"))
    groups["tp"].all_gather(torch.zeros(3, 2))
    groups["tp"].broadcast(torch.zeros(5), 1)
    groups["tp"].barrier()
    # A third gather in flight is a mistake of the caller, not a dead-lock.
    gathers = [groups["pcp"].start_all_gather(x) for _ in range(2)]
    with pytest.raises(AssertionError, match="must be released"):
        groups["pcp"].start_all_gather(x)
    assert os.environ.get("GLOO_SOCKET_IFNAME") is None
    del gathers
    return tp, pcp, groups["tp"].traffic, check_all_ops(ctx)


def test_four_ranks_in_one_group_and_in_two_by_two():
    results = run_ranks(check_mesh, 4, tp=2)
    assert [result[:2] for result in results] == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]
    assert all(digests == results[0][3] for _, _, _, digests in results)
    for rank, (_, _, traffic, _) in enumerate(results):
        assert traffic == {
            "tp.all_reduce": [1, 4],
            "tp.all_gather": [1, 24],
            "tp.broadcast": [1, 20 if rank % 2 else 0],
            "tp.barrier": [1, 0],
        }


def test_a_group_of_one_is_the_identity_and_touches_nothing():
    group = Group("tp", [3], 3)
    x = torch.randn(1, 4, 5)
    original = x.clone()
    assert group.all_reduce(x) is x
    assert group.broadcast(x, 0) is x
    assert torch.equal(group.all_gather(x), x[None])
    assert torch.equal(group.reduce_scatter(x), x[0])
    out = torch.empty(1, 1, 4, 5)
    assert group.all_gather(x, out) is out
    assert torch.equal(out[0], x)
    gather = group.start_all_gather(x)
    assert gather.wait()[0] is x
    gather.release()
    group.barrier()
    assert torch.equal(x, original)
    assert group.traffic == {}
    assert (group.rank, group.size, group.transport) == (0, 1, "none")
    groups = make_groups(Mesh(), 0)
    assert {name: group.size for name, group in groups.items()} == dict.fromkeys(GROUP_NAMES, 1)
    assert not dist.is_initialized()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"rank 2 is not in group 'tp' of ranks \[0, 1\]"):
        Group("tp", [0, 1], 2)
    with pytest.raises(ValueError, match="transport='tcp'"):
        make_groups(Mesh(), 0, transport="tcp")
    with pytest.raises(ValueError, match="world size 3 is not a multiple of nnodes=2"):
        make_groups(Mesh(pcp=3), 0, nnodes=2)
