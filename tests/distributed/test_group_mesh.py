"""Which groups there are, what they run on, and how ranks meet: by a file, over TCP, on several nodes."""

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from prefold.distributed.group import GROUP_NAMES, CollectiveError, init_distributed, make_groups
from prefold.distributed.mesh import Mesh
from prefold.distributed.rendezvous import interface_to
from prefold.testing.run_ranks import run_ranks

MESHES = [
    Mesh(tp=2, pcp=2, dcp=4, ep=True),
    Mesh(tp=2, pcp=2, dcp=2),
    Mesh(pp=2, pcp=2, dcp=2, ep=True),
    Mesh(dp=2, tp=2, ep=True),
]


def check_groups(group):
    """Each op brings together the members of the group, in its order."""
    members = torch.tensor([group.ranks[group.rank]])
    assert group.all_gather(members).flatten().tolist() == group.ranks
    assert group.all_reduce(members.clone()).item() == sum(group.ranks)
    assert group.reduce_scatter(torch.arange(group.size)[:, None]).item() == group.rank * group.size
    for src in range(group.size):
        assert group.broadcast(members.clone(), src).item() == group.ranks[src]
    exchange = group.start_all_to_all(members.repeat(group.size, 1), [1] * group.size, group.size)
    assert [part.item() for part in exchange.wait()] == group.ranks
    exchange.release()
    group.barrier()


CASES = [(mesh, transport, nnodes) for mesh in MESHES for transport in ("shm", "gloo") for nnodes in (1, 2)]


def check_meshes(ctx):
    transports = []
    for mesh, transport, nnodes in CASES:
        before = dist.distributed_c10d._world.group_count
        groups = make_groups(mesh, ctx.rank, transport, 60, ctx.store, nnodes=nnodes)
        made = dist.distributed_c10d._world.group_count - before
        assert list(groups) == list(GROUP_NAMES)
        for name, group in groups.items():
            assert group.ranks == mesh.group_of(name, ctx.rank)
            check_groups(group)
        transports.append(({name: group.transport for name, group in groups.items()}, made))
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    return transports


def expected_transport(mesh, name, rank, transport, nnodes):
    ranks = mesh.group_of(name, rank)
    if len(ranks) == 1:
        return "none"
    spans = len({member * nnodes // mesh.world_size for member in ranks}) > 1
    return "gloo" if spans else transport


def test_every_group_of_every_mesh():
    results = run_ranks(check_meshes, 4, mesh=MESHES[0], nnodes=2)
    for rank, result in enumerate(results):
        for (mesh, transport, nnodes), (transports, made) in zip(CASES, result, strict=True):
            expected = {name: expected_transport(mesh, name, rank, transport, nnodes) for name in GROUP_NAMES}
            assert transports == expected, (rank, mesh)
            # One process group per set of ranks that needs one, over the whole mesh.
            sets = {
                frozenset(ranks)
                for name in GROUP_NAMES
                for ranks in mesh.groups(name)
                if expected_transport(mesh, name, ranks[0], transport, nnodes) == "gloo"
            }
            assert made == len(sets), (rank, mesh, transport)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_who_does_not_come_is_named(tmp_path, scheme):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = f"file://{tmp_path}/meet" if scheme == "file" else f"tcp://127.0.0.1:{port}"
    with pytest.raises(CollectiveError, match=r"not complete within 0.3 s; missing ranks: 1, 2$"):
        init_distributed(0, 3, place, timeout_s=0.3)
    if scheme == "tcp":
        with pytest.raises(CollectiveError, match=r"cannot be reached; missing ranks: 0: "):
            init_distributed(1, 3, place, timeout_s=0.3)
    assert not dist.is_initialized()


@pytest.mark.parametrize("place", ["/tmp/x", "file://x", "tcp://host", "tcp://:1", "udp://host:1", ""])
def test_a_rendezvous_that_is_none_is_refused(place):
    with pytest.raises(ValueError, match=r"neither 'file:///path' nor 'tcp://host:port'"):
        init_distributed(0, 2, place)


def test_a_world_of_one_meets_nobody():
    assert init_distributed(0, 1, "") is None


def test_the_interface_to_an_address_of_this_machine_has_it():
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                assert interface_to(entry.address) == name
    assert interface_to("localhost") == "lo"
