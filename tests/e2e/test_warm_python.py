"""Commands that are forked instead of started: to their caller they are like others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from prefold.testing.warm_python import COLD_POPEN, WarmPopen

PREFOLD = [sys.executable, "-m", "prefold"]


def outcome(popen: type[subprocess.Popen], command: list[str]) -> tuple[int, str, str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(command, text=True, env={**os.environ, "COLUMNS": "90"}, **pipes) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_streams_exit_code_and_environment() -> None:
    assert subprocess.Popen is WarmPopen
    for arguments in (["generate", "--help"], ["generate", "/nowhere", "--prompt", "x"], ["none"]):
        assert outcome(WarmPopen, [*PREFOLD, *arguments]) == outcome(COLD_POPEN, [*PREFOLD, *arguments])


def test_signals_and_descriptors() -> None:
    """A fork server has the descriptors that it was given, and it can be waited for and killed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "prefold.worker.fork_server", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.05)
    assert process.poll() is None
    files = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (theirs.fileno(), 0)}
    assert files == {f"socket:[{os.fstat(theirs.fileno()).st_ino}]", os.devnull}
    assert psutil.Process(process.pid).num_threads() == 1
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.poll() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)
    theirs.close()
    assert ours.recv(1) == b"", "somebody else holds the other end"
    ours.close()
