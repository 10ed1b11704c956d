"""`python -m prefold...` without the seconds that importing torch takes: forked from a process that has.

`WarmPopen` takes the place of subprocess.Popen. Commands of this package (see FORKED) are then forked by a
nursery, `python -m prefold.testing.warm_python FD`: a process that has imported what they need, has one
thread and computes nothing. All others are started as ever. What a forked command starts in turn (the fork
server of its ranks) it forks from itself as long as it has one thread, so parents are who they would be.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import logging
import os
import pickle
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

IMPORTS = (
    "prefold.cli.main",
    "prefold.engine.llm",
    "prefold.worker.main",
    "prefold.worker.worker",
    "transformers.configuration_utils",
)
FORKED = ("prefold", "prefold.worker.fork_server", "prefold.testing.rank_main")
"""But for `prefold serve`: servers are tested as they are run."""
FIRST_FREE_FD = 400
"""Descriptors that travel are kept from here on until they are put where they belong."""
MAX_REQUEST = 1 << 17
CHILD_PARAMETERS = (
    "pass_fds cwd env startupinfo creationflags shell p2cread p2cwrite c2pread c2pwrite errread errwrite"
)
"""What subprocess.Popen hands to its private method that starts a child, from the fifth on (Python 3.11 to
3.13). There is no public way to have a child from elsewhere, but for doing all that Popen does."""
PR_SET_PDEATHSIG = 1


class Nursery:
    """The process that forks commands for this one. It starts with the first and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def _start(self) -> socket.socket:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "prefold.testing.warm_python", str(theirs.fileno())]
        with theirs:
            self._process = COLD_POPEN(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        return control

    def fork(self, arguments: list[str], environment: dict[str, str], fds: dict[int, int]) -> tuple[int, int]:
        """(process id, a descriptor that says its wait status when it has ended).

        Args:
            arguments: what follows `python -m`.
            fds: ours by the numbers that they have there.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = pickle.dumps((arguments, environment, os.getcwd(), list(fds)))
        with theirs, self._lock:
            self._control = self._control or self._start()
            socket.send_fds(self._control, [request], [theirs.fileno(), *fds.values()])
        pid = int(ours.recv(100))
        return pid, ours.detach()

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._process.wait()


@contextlib.contextmanager
def warm_commands() -> Iterator[None]:
    """Inside, subprocess forks the commands of this package from a nursery.

    Raises:
        RuntimeError: this Python's subprocess starts children in another way.
    """
    found = " ".join([*inspect.signature(COLD_POPEN._execute_child).parameters][5:17])  # type: ignore[attr-defined]
    private = ("_close_pipe_fds", "_try_wait", "_internal_poll", "_handle_exitstatus")
    if found != CHILD_PARAMETERS or not all(hasattr(COLD_POPEN, name) for name in private):
        raise RuntimeError(
            f"WarmPopen must be adapted to Python {sys.version.split()[0]}, whose subprocess.Popen starts "
            f"children with {found}, not {CHILD_PARAMETERS}"
        )
    WarmPopen.nursery = Nursery()
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = COLD_POPEN  # type: ignore[misc]
        WarmPopen.nursery.close()
        WarmPopen.nursery = None


class WarmPopen(subprocess.Popen):
    """subprocess.Popen, but for where commands of this package come from."""

    nursery: Nursery | None = None
    _status: int | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env = rest[:3]
        ends = rest[6], rest[9], rest[11]  # of the pipes, those of the child; -1: it inherits
        direct = self.nursery is None
        if not _is_ours(args) or preexec_fn is not None or cwd is not None or (direct and _num_threads() > 1):
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        fds = {fd: fd for fd in pass_fds}
        for number, fd in enumerate(ends):
            fds[number] = number if fd == -1 else fd
        environment = dict(os.environ if env is None else env)
        if self.nursery is not None:
            self.pid, self._status = self.nursery.fork(args[2:], environment, fds)
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                _become(args[2:], environment, os.getcwd(), fds)
        self._child_created = True
        self._close_pipe_fds(*rest[6:12])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0.0)[0]:
            return 0, 0
        told = os.read(self._status, 100)
        os.close(self._status)
        return self.pid, int(told) if told else signal.SIGKILL  # it ends with the nursery

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*args, **options)  # type: ignore[misc]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


COLD_POPEN = subprocess.Popen
"""The one that starts everything."""


def _is_ours(args: Any) -> bool:
    return (
        isinstance(args, list)
        and len(args) > 2
        and args[:2] == [sys.executable, "-m"]
        and args[2] in FORKED
        and args[3:4] != ["serve"]
    )


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _become(arguments: list[str], environment: dict[str, str], folder: str, fds: dict[int, int]) -> NoReturn:
    """In a forked process: run `python -m *arguments` there with these descriptors, and end."""
    code = 1
    try:
        _forget_the_parent()
        kept = {to: fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE_FD) for to, fd in fds.items()}
        os.closerange(0, FIRST_FREE_FD)
        for to, fd in kept.items():
            os.dup2(fd, to)
        os.closerange(FIRST_FREE_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = list(arguments)
        subprocess.Popen = WarmPopen  # type: ignore[misc]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _forget_the_parent() -> None:
    """What a new program would not have: handlers of signals, of the end, and of logging."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for logger in (logging.getLogger(), logging.getLogger("prefold")):
        logger.handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("prefold").setLevel(logging.NOTSET)


def main(fd: int) -> None:
    """Fork what is asked for until nobody can ask any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name in IMPORTS:
        importlib.import_module(name)
    assert _num_threads() == 1, "a process with threads must not fork"
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=fd)
    wakeup, signalled = socket.socketpair()
    for sock in (wakeup, signalled):
        sock.setblocking(False)
    for number in (signal.SIGCHLD, signal.SIGINT):  # an interrupt reaches the whole group; who asks ends this
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(signalled.fileno())
    asked: dict[int, int] = {}  # who wants to know, by process id
    while True:
        ready = select.select([control, wakeup], [], [])[0]
        if wakeup in ready:
            wakeup.recv(4096)
            _report_ended(asked)
        if control in ready:
            request, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, 32)
            if not request:
                return
            arguments, environment, folder, numbers = pickle.loads(request)
            pid = os.fork()
            if pid == 0:
                _become(arguments, environment, folder, dict(zip(numbers, fds[1:], strict=True)))
            asked[pid] = fds[0]
            os.write(fds[0], str(pid).encode())
            for own in fds[1:]:
                os.close(own)


def _report_ended(asked: dict[int, int]) -> None:
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(OSError):
            os.write(asked[pid], str(status).encode())
        os.close(asked.pop(pid))


if __name__ == "__main__":
    main(int(sys.argv[1]))
