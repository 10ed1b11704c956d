"""The process of one rank of `run_ranks`: `python -m prefold.testing.rank_main FOLDER RANK PARENT`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch

from prefold.distributed.group import init_distributed, make_groups, shutdown_distributed
from prefold.distributed.shm_collectives import PIECE_BYTES
from prefold.testing.run_ranks import RankContext, RankError, RankJob

PR_SET_PDEATHSIG = 1


def main(folder: Path, rank: int, parent: int) -> int:
    _end_with_parent(parent)
    torch.set_num_threads(1)
    job: RankJob = pickle.loads((folder / f"job{rank}").read_bytes())
    try:
        result = pickle.dumps(_run(job))
    except Exception as error:
        (folder / "error.tmp").with_suffix(f".{rank}").write_bytes(_pickled_error(rank, error))
        (folder / "error.tmp").with_suffix(f".{rank}").rename(folder / f"error{rank}")
        return 1
    (folder / f"result{rank}").write_bytes(result)
    return 0


def _run(job: RankJob) -> object:
    sys.path[:] = job.sys_path
    module = _load(job.module_name, job.module_file)
    name, args = pickle.loads(job.call)
    world_size = job.mesh.world_size
    store = init_distributed(job.rank, world_size, job.rendezvous, timeout_s=job.collective_timeout_s)
    groups = make_groups(
        job.mesh,
        job.rank,
        job.transport,
        job.collective_timeout_s,
        store,
        job.piece_bytes or PIECE_BYTES,
        job.nnodes,
    )
    try:
        return getattr(module, name)(RankContext(job.rank, world_size, job.mesh, groups, store), *args)
    finally:
        shutdown_distributed()


def _load(name: str, file: str) -> ModuleType:
    """The module of the function. A test file that pytest loaded has a name that cannot be imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file):
        return importlib.import_module(name)
    # A script must not find itself called "__main__" and start over; pickles may still call it that.
    spec = importlib.util.spec_from_file_location("__rank_main__" if name == "__main__" else name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _pickled_error(rank: int, error: Exception) -> bytes:
    """`error` with its traceback as a note, or a RankError if it does not survive a pickle."""
    text = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"raised by rank {rank}:\n{text}")
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps(RankError(f"rank {rank} raised\n{text}"))
    return pickled


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and notice if that came first."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent ended")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
