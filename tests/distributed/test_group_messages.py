"""All-to-alls and messages between two ranks, over shared memory and gloo, against what all ranks know.

Ranks are started once; every rank derives every case, so each checks what it receives, and what it counted.
"""

import random
import time

import pytest
import torch

from prefold.distributed.group import Group, begin_step, make_groups
from prefold.distributed.mesh import Mesh
from prefold.testing.run_ranks import run_ranks

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
NUM_CASES = 80
DCP4 = Mesh(tp=2, pcp=2, dcp=4)
"""Its DCP group is {0, 2, 1, 3}."""


def rows_of(source, counts, width, dtype, seed):
    """[n, width] what `source` sends: no two rows of a case are equal in float32."""
    n = sum(counts)
    return ((torch.arange(n * width) * 3 + source * 1009 + seed) % 30_011).to(dtype).view(n, width)


def random_counts(choice, size):
    """[size][size] rows from each rank to each: dense, sparse, all to one, one to all, to itself, none."""
    kind = choice.randrange(6)
    one = choice.randrange(size)
    counts = [[choice.randrange(1, 40) for _ in range(size)] for _ in range(size)]
    for source in range(size):
        for target in range(size):
            is_empty = {
                0: False,
                1: choice.random() < 0.6,
                2: target != one,
                3: source != one,
                4: source != target,
                5: True,
            }[kind]
            if is_empty:
                counts[source][target] = 0
    return counts


class AllToAll:
    """One case: starts on construction, `check` compares and releases."""

    def __init__(self, group, choice, seed):
        self.group, self.seed = group, seed
        self.counts = random_counts(choice, group.size)
        self.width, self.dtype = choice.choice([1, 3, 130]), choice.choice(DTYPES)
        capacity = max(sum(row) for row in self.counts) + choice.choice([0, 1, 100])
        own = self.counts[group.rank]
        known = [row[group.rank] for row in self.counts] if choice.random() < 0.5 else None
        self.x = rows_of(group.rank, own, self.width, self.dtype, seed)
        self.exchange = group.start_all_to_all(self.x, own, capacity, known)
        self.is_called = capacity > 0
        self.num_bytes = (sum(own) - own[group.rank]) * self.width * self.x.element_size()
        self.trace = (group.name, "all_to_all", (capacity, self.width), str(self.dtype))

    def check(self):
        parts = self.exchange.wait()
        assert len(parts) == self.group.size
        for source, (part, counts) in enumerate(zip(parts, self.counts)):
            sent = rows_of(source, counts, self.width, self.dtype, self.seed)
            before = sum(counts[: self.group.rank])
            assert part.dtype == self.dtype
            assert torch.equal(part, sent[before : before + counts[self.group.rank]]), (source, self.counts)
        self.exchange.release()


def check_all_to_all(group):
    """Random cases, up to two in flight, other collectives in between, ranks out of step."""
    choice, mood = random.Random(f"{group.name}{group.size}"), random.Random(group.rank)
    traffic, trace = [0, 0], []
    group.traffic.clear()
    group.trace = []
    in_flight = []
    for seed in range(NUM_CASES):
        if mood.random() < 0.05:
            time.sleep(mood.random() * 3e-3)
        case = AllToAll(group, choice, seed)
        in_flight.append(case)
        if case.is_called:
            traffic = [traffic[0] + 1, traffic[1] + case.num_bytes]
            trace.append(case.trace)
        if choice.random() < 0.3:
            assert group.all_reduce(torch.ones(3)).tolist() == [group.size] * 3
            trace.append((group.name, "all_reduce", (3,), "torch.float32"))
        if len(in_flight) == 2:
            # The slot of the earlier one is needed next; the later one may come first, or stay.
            order = choice.choice([[0], [0, 1], [1, 0]])
            for index in order:
                in_flight[index].check()
            in_flight = in_flight[len(order) :]
    for case in in_flight:
        case.check()
    assert group.trace == trace
    assert group.traffic[f"{group.name}.all_to_all"] == traffic
    group.trace = None


def check_messages(group):
    """Random messages between all pairs, in both directions; buffers grow; senders reuse theirs."""
    choice, mood = random.Random(group.size), random.Random(group.rank)
    sent = 0
    group.traffic.clear()
    group.trace = []
    expected = []
    for seed in range(NUM_CASES):
        src, dst = choice.sample(range(group.size), 2)
        shapes = [
            (choice.choice([0, 1, 5, 700]), choice.choice([1, 33])) for _ in range(choice.choice([1, 2]))
        ]
        dtype = choice.choice(DTYPES)
        if mood.random() < 0.05:
            time.sleep(mood.random() * 3e-3)
        for number, shape in enumerate(shapes):
            message = rows_of(src, [shape[0]], shape[1], dtype, seed + number)
            op = {src: "send", dst: "recv"}.get(group.rank)
            if op and message.numel():
                expected.append((group.name, op, shape, str(dtype)))
            if group.rank == src:
                x = message.clone()
                group.send(x, dst)
                x.fill_(7)
                sent += message.nbytes
            if group.rank == dst:
                out = torch.zeros(shape, dtype=dtype)
                assert group.recv(out, src) is out
                assert torch.equal(out, message)
    group.barrier()
    assert group.trace[:-1] == expected
    assert group.trace[-1] == (group.name, "barrier", (), "")
    assert group.traffic[f"{group.name}.send"][1] == sent
    assert f"{group.name}.recv" not in group.traffic
    group.trace = None


def check_two_unread(group):
    """Two messages may be unread before their receiver does anything, however large they are."""
    numels = [100_000, 3, 70_000, 200_000]
    if group.rank == 0:
        for first in (0, 2):
            for numel in numels[first : first + 2]:
                group.send(torch.full((numel,), float(numel)), 1)
            group.barrier()
    else:
        for first in (0, 2):
            group.barrier()
            for numel in numels[first : first + 2]:
                assert torch.equal(group.recv(torch.empty(numel), 0), torch.full((numel,), float(numel)))


def check_mistakes(group):
    """What a caller did wrong is an assertion, not a hang."""
    x = torch.ones(4, 2)
    counts = [0] * group.size
    counts[-1] = 4
    with pytest.raises(AssertionError):
        group.start_all_to_all(x, counts, capacity=3)
    with pytest.raises(AssertionError):
        group.start_all_to_all(x, counts[1:], capacity=4)
    with pytest.raises(AssertionError):
        group.start_all_to_all(x[:3], counts, capacity=4)
    with pytest.raises(AssertionError):
        group.send(x, group.rank)


def check_everything(ctx):
    torch.set_num_threads(1)
    results = {}
    for transport in ("shm", "gloo"):
        groups = make_groups(DCP4, ctx.rank, transport, 60, ctx.store)
        assert {groups[name].transport for name in ("tp", "pcp", "dcp")} == {transport}
        with torch.inference_mode():
            check_all_to_all(groups["dcp"])
        for name in ("tp", "dcp"):
            check_all_to_all(groups[name])
            check_messages(groups[name])
        check_two_unread(groups["pcp"])
        check_mistakes(groups["dcp"])
        gathered = groups["dcp"].all_gather(torch.tensor([ctx.rank]))
        scattered = groups["dcp"].reduce_scatter(torch.arange(4).view(4, 1) * 10)
        root = groups["dcp"].broadcast(torch.tensor([ctx.rank]), 1)
        gather = groups["dcp"].start_all_gather(torch.tensor([ctx.rank]))
        started = [part.item() for part in gather.wait()]
        gather.release()
        results[transport] = (gathered.flatten().tolist(), scattered.item(), root.item(), started)
    return results


def test_random_exchanges_and_messages():
    results = run_ranks(check_everything, 4, mesh=DCP4)
    order = [0, 2, 1, 3]
    for rank, by_transport in enumerate(results):
        for result in by_transport.values():
            assert result == (order, order.index(rank) * 40, 2, order)


def test_a_group_of_one_is_the_identity():
    group = Group("ep", [5], 5)
    group.trace = []
    x = torch.randn(6, 4)
    for known in (None, [6]):
        exchange = group.start_all_to_all(x, [6], 8, known)
        assert exchange.wait()[0] is x
        exchange.release()
    begin_step({"ep": group}, 3)
    assert (group.step, group.trace, group.traffic) == (3, [], {})
