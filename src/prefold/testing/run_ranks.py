"""Run a function on several ranks, each a process of its own, and bring the results back."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefold.distributed.group import Group
from prefold.distributed.mesh import Mesh
from prefold.distributed.torch_collectives import Store

POLL_S = 0.01
OUTPUT_TAIL = 4000
"""Characters of a dead rank's output that the error shows."""


@dataclass(frozen=True)
class RankContext:
    """What a rank is given. `groups`, by name, is what `make_groups` made; with `store` it can make more."""

    rank: int
    world_size: int
    mesh: Mesh
    groups: dict[str, Group]
    store: Store | None


class RankError(RuntimeError):
    """A rank died, ran out of time, or raised something that cannot be sent to the parent."""


@dataclass(frozen=True)
class RankJob:
    """All that a rank process reads. `call` is a pickle of (fn's qualified name, args)."""

    rank: int
    mesh: Mesh
    transport: str
    collective_timeout_s: float
    piece_bytes: int | None
    nnodes: int
    rendezvous: str
    module_name: str
    module_file: str
    sys_path: list[str]
    call: bytes


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    tp: int = 1,
    mesh: Mesh | None = None,
    transport: str = "shm",
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
    piece_bytes: int | None = None,
    nnodes: int = 1,
) -> list[Any]:
    """Run `fn(ctx, *args)` on `world_size` ranks of a mesh; return their results in rank order.

    Each rank is a process of its own with one torch thread, forked from one that has imported no more than
    `fn`'s module; `ctx` is a `RankContext` whose
    groups are connected. `fn` must be a function at the top level of a module (also of a test file
    that cannot be imported by name); `args` and results are pickled.

    If a rank raises, the other ranks are killed and the exception is raised here, with that
    rank's traceback as a note; of several, the first one to end counts. If a rank dies or `timeout_s`
    passes, RankError shows the end of what the ranks printed. In all cases every rank's process has ended
    when this returns, and ranks end with this process, however it ends.

    Args:
        tp: ranks per TP group; the others are PCP.
        mesh: instead of `tp`, any mesh of `world_size` ranks.
        transport: "shm" or "gloo".
        timeout_s: for all of it, start of the processes included.
        collective_timeout_s: for each collective; default `timeout_s`.
        piece_bytes: see `make_groups`.
        nnodes: as if the ranks were on so many hosts; they meet over TCP then.
    """
    if world_size % tp:
        raise ValueError(f"world_size={world_size} is not a multiple of tp={tp}")
    mesh = mesh or Mesh(tp=tp, pcp=world_size // tp)
    if mesh.world_size != world_size:
        raise ValueError(f"world_size={world_size}, but {mesh} has {mesh.world_size} ranks")
    module = sys.modules[fn.__module__]
    if "." in fn.__qualname__ or not getattr(module, "__file__", None):
        raise ValueError(f"{fn.__qualname__} must be a function at the top level of a module with a file")
    call = pickle.dumps((fn.__qualname__, args))
    with tempfile.TemporaryDirectory(prefix="prefold-ranks-") as name:
        folder = Path(name)
        rendezvous = f"file://{folder}/rendezvous" if nnodes == 1 else f"tcp://127.0.0.1:{_free_port()}"
        for rank in range(world_size):
            job = RankJob(
                rank=rank,
                mesh=mesh,
                transport=transport,
                collective_timeout_s=collective_timeout_s or timeout_s,
                piece_bytes=piece_bytes,
                nnodes=nnodes,
                rendezvous=rendezvous,
                module_name=module.__name__,
                module_file=str(Path(str(module.__file__)).resolve()),
                sys_path=sys.path,
                call=call,
            )
            (folder / f"job{rank}").write_bytes(pickle.dumps(job))
            (folder / f"output{rank}").touch()  # it may never come to print anything
        starter = _start(folder, world_size)
        try:
            _wait_for_all(starter, world_size, folder, timeout_s)
        finally:
            starter.terminate()
            starter.wait()
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(folder: Path, world_size: int) -> subprocess.Popen:
    # A process that has started threads must not fork.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    job = [str(folder), str(world_size), str(os.getpid())]
    command = [sys.executable, "-m", "prefold.testing.rank_main", *job]
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
        )


def _wait_for_all(starter: subprocess.Popen, world_size: int, folder: Path, timeout_s: float) -> None:
    """Return when all ranks have ended well; raise as soon as one has not."""
    deadline = time.monotonic() + timeout_s
    running = set(range(world_size))
    while running:
        starter_status = starter.poll()  # before the ranks': it ends after them
        for rank in sorted(running):
            if not (folder / f"status{rank}").exists():
                continue
            running.remove(rank)
            status = int((folder / f"status{rank}").read_text())
            if (folder / f"error{rank}").exists():
                raise pickle.loads((folder / f"error{rank}").read_bytes())
            if status != 0:
                raise RankError(f"rank {rank} ended with status {status}\n{_output(folder, rank)}")
        if running and starter_status is not None:
            text = (folder / "output").read_text(errors="replace")
            raise RankError(f"the ranks' starter ended with status {starter_status}\n{text[-OUTPUT_TAIL:]}")
        if running and time.monotonic() > deadline:
            outputs = "\n".join(_output(folder, rank) for rank in sorted(running))
            raise RankError(f"ranks {sorted(running)} still run after {timeout_s:g} s\n{outputs}")
        time.sleep(POLL_S)


def _output(folder: Path, rank: int) -> str:
    text = (folder / f"output{rank}").read_text(errors="replace")
    return f"--- output of rank {rank} ---\n{text[-OUTPUT_TAIL:]}"
