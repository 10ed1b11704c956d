"""The HTTP process's end of an engine process (core_process.py): starts it, and says what became of it."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys

from prefold.config import EngineConfig
from prefold.control import Channel, encode
from prefold.engine.core_messages import QUIT, SETUP, CoreSetup
from prefold.engine.launch import describe_exit, python_environment

QUIT_S = 10.0
"""How long an engine process may take to end its ranks and leave."""
KILL_S = 5.0
"""How long the kernel may take to end a killed process."""


class CoreClient:
    """An engine process. `channel` is to be read and flushed by the owner."""

    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefold.engine.core_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=python_environment(),
                stdin=subprocess.DEVNULL,
            )
        self.channel = Channel(ours)
        self.pid = self._process.pid
        level = logging.getLogger("prefold").getEffectiveLevel()
        self.send(SETUP, encode(CoreSetup(config, level)))

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """Never waits; that the process is gone shows when it is read from."""
        with contextlib.suppress(OSError):
            self.channel.send(kind, body)

    def end(self) -> None:
        """Ask it to leave, kill it if it does not, and reap it. Waits; the channel is closed."""
        self.send(QUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_S)
        self.kill()

    def kill(self) -> None:
        """End it at once and reap it; its ranks end with it."""
        self.channel.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def describe_end(self) -> str:
        """How it ended, for messages. Waits until it has, or for KILL_S."""
        try:
            how = describe_exit(self._process.wait(KILL_S))
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        return f"the engine is dead: its process ({self.pid}) {how}"
