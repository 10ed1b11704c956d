"""`prefold serve` in a process of its own, for tests and scripts."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2 as httpx
import psutil

if TYPE_CHECKING:
    import openai

START_S = 120.0


class Server:
    """A running `prefold serve` on a free port; `lines` is what it has printed.

    The server is there when the constructor returns. AssertionError if it ends or says nothing before.
    """

    def __init__(self, folder: str | Path, *options: str) -> None:
        command = [sys.executable, "-m", "prefold", "serve", str(folder), "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.url = self._wait_for(r"^Serving \S+ at (\S+)")
        except BaseException:
            self.stop()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))
        self.process.stdout.close()

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = re.search(pattern, self.output, re.MULTILINE)
            if found:
                return found.group(1)
            assert self.process.poll() is None, self.output
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {self.output!r}")

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """Sum of `prefold_{name}` over its labels; 0 before the first."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if re.match(rf"prefold_{name}[ {{]", line)
        )

    def is_idle(self) -> bool:
        """No request runs or waits, and no block is in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
        return all(self.metric(name) == 0 for name in names)

    def processes(self) -> list[psutil.Process]:
        """The server's process and all that it has started."""
        try:
            server = psutil.Process(self.process.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        """Processes of the ranks, if there are two or more: forks of one process, which is started anew."""
        children = self.processes()[1:]
        parents = {process.ppid() for process in children}
        commands = {process.pid: process.cmdline() for process in children}
        return [
            process
            for process in children
            if process.pid not in parents and commands.get(process.ppid()) == commands[process.pid]
        ]

    def stop(self) -> None:
        """End it if it has not ended, with all that it started."""
        processes = self.processes()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        for process in filter(is_alive, processes):
            process.kill()


@contextmanager
def serving(folder: str | Path, *options: str) -> Iterator[Server]:
    """A server that is stopped at the end."""
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.stop()


def is_alive(process: psutil.Process) -> bool:
    """It runs, and is not merely waiting to be buried."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """AssertionError unless it is true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
