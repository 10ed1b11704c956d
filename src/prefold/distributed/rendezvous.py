"""How the ranks of a world find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch.distributed as dist

from prefold.distributed.errors import CollectiveError
from prefold.distributed.torch_collectives import Store

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
ANY_PORT = 9
"""Where no data goes: a UDP socket must have a port to be connected, and connecting it sends nothing."""


def init_distributed(
    rank: int,
    world_size: int,
    rendezvous: str,
    backend: str = "gloo",
    timeout_s: float = 300.0,
) -> Store | None:
    """Meet the other ranks, and return the rendezvous store for `make_groups`.

    A world of 1 needs none and does not touch torch.distributed.

    Args:
        rendezvous: "file:///path", a path that does not exist yet (ranks of one host; no ports needed), or
            "tcp://host:port", where rank 0 listens.

    CollectiveError if ranks do not come within `timeout_s`; it names them.
    """
    if world_size == 1:
        return None
    timeout = timedelta(seconds=timeout_s)
    store = _make_store(rank, world_size, rendezvous, timeout)
    _wait_for_all(store, rank, world_size, rendezvous, timeout_s)
    with listening_interface(store):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def shutdown_distributed() -> None:
    """Leave torch.distributed, if this process ever joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def listening_interface(store: Store | None) -> Iterator[None]:
    """Let gloo listen where the other ranks can reach it, unless the user chose an interface.

    That is the interface that leads to the store's host, or loopback if they meet by a file.
    gloo reads its choice from the environment when a process group is made, and only then.
    """
    if INTERFACE_VARIABLE in os.environ:
        yield
        return
    is_tcp = isinstance(store, dist.TCPStore)  # pyright: ignore[reportPrivateImportUsage]
    name = interface_to(store.host) if is_tcp else LOOPBACK
    if all(name != existing for _, existing in socket.if_nameindex()):
        yield
        return
    os.environ[INTERFACE_VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[INTERFACE_VARIABLE]


def interface_to(host: str) -> str:
    """Name of the network interface by which this machine reaches `host`; on `host` itself, the one
    that has its address.

    >>> interface_to("127.0.0.1")
    'lo'
    """
    family, _, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        # IPv6 addresses of a link have the interface behind them: fe80::1%eth0.
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    # Any other address of 127.0.0.0/8 is loopback's, too.
    return LOOPBACK


def _make_store(rank: int, world_size: int, rendezvous: str, timeout: timedelta) -> Store:
    scheme, _, place = rendezvous.partition("://")
    if scheme == "file" and place.startswith("/"):
        store = dist.FileStore(place, world_size)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timeout)
        return store
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit():
        raise ValueError(f"rendezvous={rendezvous!r} is neither 'file:///path' nor 'tcp://host:port'")
    host = host.strip("[]")
    try:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, int(port), world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        reason = "cannot listen" if rank == 0 else "cannot be reached; missing ranks: 0"
        raise CollectiveError(f"rendezvous {rendezvous} {reason}: {error}") from error


def _wait_for_all(store: Store, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
    keys = [f"arrived/{peer}" for peer in range(world_size)]
    try:
        store.set(keys[rank], "")
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = ", ".join(str(peer) for peer, key in enumerate(keys) if not store.check([key]))
        raise CollectiveError(
            f"rendezvous {rendezvous} was not complete within {timeout_s:g} s; missing ranks: {missing}"
        ) from error
