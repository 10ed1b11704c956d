"""Starts the ranks of `run_ranks`: `python -m prefold.testing.rank_main FOLDER WORLD_SIZE PARENT`.

Importing torch and the tests takes seconds of a core. This process does it once and forks the ranks; it has
one thread. It ends when they have ended, and ends them when it is told to (SIGTERM).
"""

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
from typing import NoReturn

import psutil
import torch

from prefold.distributed.group import init_distributed, make_groups, shutdown_distributed
from prefold.distributed.slots import PIECE_BYTES
from prefold.testing.run_ranks import RankContext, RankError, RankJob

PR_SET_PDEATHSIG = 1


def main(folder: Path, world_size: int, parent: int) -> None:
    _end_with_parent(os.getppid())
    # It may have been forked by a nursery of that process (testing.warm_python), which ends with it.
    if parent not in [process.pid for process in psutil.Process().parents()]:
        sys.exit("the parent ended")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    job: RankJob = pickle.loads((folder / "job0").read_bytes())
    sys.path[:] = job.sys_path
    module, starter = _load(job.module_name, job.module_file), os.getpid()
    ranks: dict[int, int] = {}  # by process id
    try:
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _become_rank(folder, rank, starter, module)
            ranks[pid] = rank
        while ranks:
            pid, status = os.waitpid(-1, 0)
            write_whole(folder / f"status{ranks.pop(pid)}", str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in ranks:
            os.waitpid(pid, 0)


def _become_rank(folder: Path, rank: int, starter: int, module: ModuleType) -> NoReturn:
    """Run in the forked process, whatever happens, to its end."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(folder / f"output{rank}", os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(output, fd)
        _end_with_parent(starter)
        torch.set_num_threads(1)
        job: RankJob = pickle.loads((folder / f"job{rank}").read_bytes())
        try:
            result = pickle.dumps(_run(job, module))
        except Exception as error:
            write_whole(folder / f"error{rank}", _pickled_error(rank, error))
        else:
            write_whole(folder / f"result{rank}", result)
            code = 0
    except Exception:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def write_whole(path: Path, data: bytes) -> None:
    """Who sees the file sees all of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(data)
    unfinished.rename(path)


def _run(job: RankJob, module: ModuleType) -> object:
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
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
