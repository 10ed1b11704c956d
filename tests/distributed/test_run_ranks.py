import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from prefold.distributed.group import GROUP_NAMES
from prefold.testing.run_ranks import RankError, run_ranks


class Odd(Exception):
    """Cannot be made again from what pickle keeps of it."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def is_gone(pid):
    """Whether the process has ended (as a zombie that nobody awaits, too)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.05)


def misbehave(ctx, how, folder):
    """Rank 1 fails in the way asked for, while rank 0 waits for it in a collective."""
    (Path(folder) / f"{ctx.rank}").write_text(str(os.getpid()))
    if ctx.rank == 0:
        print("rank 0 waits")
        ctx.groups["pcp"].barrier()
        ctx.groups["pcp"].all_reduce(torch.ones(100))
    ctx.groups["pcp"].barrier()
    if how == "raise":
        raise KeyError("a mistake")
    if how == "raise something odd":
        raise Odd(1, 2)
    if how == "die":
        print("rank 1 is about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def pids_in(folder):
    return [int(path.read_text()) for path in sorted(folder.iterdir())]


def test_an_exception_comes_back_with_its_traceback(tmp_path):
    with pytest.raises(KeyError, match="a mistake") as caught:
        run_ranks(misbehave, 2, "raise", str(tmp_path))
    assert "raised by rank 1" in caught.value.__notes__[0]
    assert "in misbehave" in caught.value.__notes__[0]
    assert all(is_gone(pid) for pid in pids_in(tmp_path))


def test_an_exception_that_cannot_be_pickled(tmp_path):
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*Odd: 1 2"):
        run_ranks(misbehave, 2, "raise something odd", str(tmp_path))


def test_a_killed_rank_leaves_nothing(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankError, match=r"(?s)rank 1 ended with status -9.*rank 1 is about to die"):
        run_ranks(misbehave, 2, "die", str(tmp_path))
    assert len(pids_in(tmp_path)) == 2
    assert all(is_gone(pid) for pid in pids_in(tmp_path))
    assert set(os.listdir("/dev/shm")) <= before


def test_ranks_that_take_too_long_are_ended(tmp_path):
    with pytest.raises(RankError, match=r"ranks \[0, 1\] still run after 3 s"):
        run_ranks(misbehave, 2, "sleep", str(tmp_path), timeout_s=3, collective_timeout_s=100)
    assert all(is_gone(pid) for pid in pids_in(tmp_path))


def test_ranks_end_with_their_parent(tmp_path):
    before = set(os.listdir("/dev/shm"))
    script = tmp_path / "script.py"
    folder = tmp_path / "pids"
    folder.mkdir()
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_run_ranks import misbehave\n"
        "from prefold.testing.run_ranks import run_ranks\n"
        f"run_ranks(misbehave, 2, 'sleep', {str(folder)!r})\n"
    )
    # Killed, it cannot remove its temporary folder.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, str(script)], env=env)
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    wait_until_gone(pids_in(folder))
    assert set(os.listdir("/dev/shm")) <= before


def give_back(ctx, *args):
    return ctx.rank, args, torch.get_num_threads(), sorted(ctx.groups)


def test_one_rank_and_arguments():
    assert run_ranks(give_back, 1, "a", {"b": 2}) == [(0, ("a", {"b": 2}), 1, sorted(GROUP_NAMES))]


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ValueError, match="world_size=3 is not a multiple of tp=2"):
        run_ranks(give_back, 3, tp=2)
    with pytest.raises(ValueError, match="top level of a module"):
        run_ranks(lambda ctx: None, 2)
