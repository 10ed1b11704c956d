"""Ranks that stop, die or have no memory: the others raise, and say which call it was and who was missing."""

import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from prefold.distributed.group import (
    CollectiveError,
    CollectiveTimeout,
    begin_step,
    init_distributed,
    make_groups,
)
from prefold.distributed.mesh import Mesh
from prefold.testing.run_ranks import run_ranks

TIMEOUT_S = 0.7


def all_to_all(group):
    group.start_all_to_all(torch.ones(group.size, 2), [1] * group.size, group.size).wait()


def all_to_all_of_known_counts(group):
    counts = [1] * group.size
    group.start_all_to_all(torch.ones(group.size, 2), counts, group.size, counts).wait()


def all_gather(group):
    group.start_all_gather(torch.ones(4)).wait()


def all_reduce(group):
    group.all_reduce(torch.ones(4))


def recv(group):
    group.recv(torch.ones(4), 1)


def send(group):
    """The third message waits until the first one is read."""
    for _ in range(3):
        group.send(torch.ones(4), 1)


CALLS = (all_to_all, all_to_all_of_known_counts, all_gather, all_reduce, recv, send)


def check_stopped_rank(ctx):
    """Rank 1 stops (SIGSTOP); each call of the others has a group of its own, as a time-out ends a group."""
    pids = [int(pid) for pid in ctx.groups["pcp"].all_gather(torch.tensor(os.getpid()))]
    mesh = Mesh(pcp=ctx.world_size)
    groups = {}
    for transport in ("shm", "gloo"):
        for call in CALLS:
            made = make_groups(mesh, ctx.rank, transport, TIMEOUT_S, ctx.store)
            begin_step(made, 12)
            groups[transport, call.__name__] = made["pcp"], call
    unreleased = make_groups(mesh, ctx.rank, "shm", TIMEOUT_S)["pcp"]
    for _ in range(2):
        gather = unreleased.start_all_gather(torch.ones(4))
        gather.wait()
        if ctx.rank != 1:
            gather.release()
    ctx.groups["pcp"].barrier()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        ctx.groups["pcp"].barrier()
        return None
    while Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    messages = {}
    for key, (group, call) in groups.items():
        with pytest.raises(CollectiveTimeout) as caught:
            call(group)
        assert caught.value.missing == [1], key
        assert caught.value.step == 12
        messages[key] = str(caught.value)
    with pytest.raises(CollectiveTimeout, match=r"^all_gather \(call 3 .*missing ranks: 1$"):
        unreleased.start_all_gather(torch.ones(4))
    os.kill(pids[1], signal.SIGCONT)
    ctx.groups["pcp"].barrier()
    return messages


def test_a_stopped_rank_is_named():
    results = run_ranks(check_stopped_rank, 3, collective_timeout_s=30)
    assert results[0] == results[2]
    for (_, call), message in results[0].items():
        op, number = {
            "all_to_all_of_known_counts": ("all_to_all", 1),
            "send": ("send", 3),
        }.get(call, (call, 1))
        assert message == (
            f"step 12: {op} (call {number} of group 'pcp') did not complete within 0.7 s; missing ranks: 1"
        )


def kill(pid):
    """Return when it has ended: on a busy machine that takes its time."""
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)


def survive(folder, rank):
    """Ranks 1 to 3 end one after the other; what rank 0 hears, long before a time-out."""
    store = init_distributed(rank, 4, f"file://{folder}/rendezvous", timeout_s=60)
    line, ring, square, gloo = (
        make_groups(mesh, rank, transport, 60, store)
        for mesh, transport in [
            (Mesh(pp=4), "shm"),
            (Mesh(pcp=4), "shm"),
            (Mesh(tp=2, pcp=2), "shm"),
            (Mesh(pcp=4), "gloo"),
        ]
    )
    pids = ring["pcp"].all_gather(torch.tensor(os.getpid())).tolist()
    gloo["pcp"].barrier()
    if rank:
        time.sleep(600)
    steps = [
        (3, lambda: line["pp"].recv(torch.ones(4), 3)),
        (2, lambda: all_to_all(ring["pcp"])),
        (1, lambda: all_gather(square["tp"])),
        (None, lambda: recv(gloo["pcp"])),
        (None, lambda: all_reduce(gloo["pcp"])),
    ]
    for victim, call in steps:
        if victim is not None:
            kill(pids[victim])
        start = time.monotonic()
        try:
            call()
        except CollectiveError as error:
            print(json.dumps([type(error).__name__, str(error), time.monotonic() - start]), flush=True)
    os._exit(0)


def test_ranks_that_died_are_named_at_once(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.communicate()
    kinds, messages, waits = zip(*map(json.loads, output.decode().splitlines()))
    assert set(kinds) == {"CollectiveError"}
    assert messages[:3] == (
        "recv (call 1 of group 'pp'): a process ended; missing ranks: 3",
        "all_to_all (call 2 of group 'pcp'): a process ended; missing ranks: 2, 3",
        "all_gather (call 1 of group 'tp'): a process ended; missing ranks: 1",
    )
    assert re.match(r"recv \(call 2 of group 'pcp'\): .*; missing ranks: 1$", messages[3])
    assert re.match(r"all_reduce \(call 3 of group 'pcp'\): .*; missing ranks: 1, 2, 3$", messages[4])
    assert max(waits) < 10


def check_lack_of_memory(ctx):
    """A limit on rank 1's file size stands in for a full memory: all ranks must draw the same conclusion."""
    messages = []
    log = logging.getLogger("prefold.distributed.group")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log.addHandler(handler)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))
    group = make_groups(ctx.mesh, ctx.rank, "shm", 30, ctx.store)["pcp"]
    assert group.transport == "gloo"
    assert not group.shares_memory
    assert group.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    group = make_groups(ctx.mesh, ctx.rank, "shm", 1.0, ctx.store)["pcp"]
    assert group.transport == "shm"
    assert group.shares_memory
    with pytest.raises(CollectiveError) as caught:
        group.start_all_gather(torch.ones(1 << 19)).wait()
    ctx.groups["pcp"].barrier()
    return messages, str(caught.value)


def test_lack_of_memory_is_told_with_the_size():
    results = run_ranks(check_lack_of_memory, 2)
    for messages, _ in results:
        assert len(messages) == 1
        assert re.fullmatch(
            r"all groups use gloo, which is slower: rank 1: no \d+,\d+ bytes of shared memory: "
            r"\[Errno 27\] File too large",
            messages[0],
        )
    call = "all_gather (call 1 of group 'pcp')"
    assert results[0][1] == f"{call} did not complete within 1 s; missing ranks: 1"
    assert results[1][1] == f"{call}: no 2,097,152 bytes of shared memory: [Errno 27] File too large"


if __name__ == "__main__":
    survive(sys.argv[1], int(sys.argv[2]))
