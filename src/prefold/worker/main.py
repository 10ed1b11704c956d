"""Entry point of a worker process: `python -m prefold.worker.main FD`.

FD is one end of a socket pair; the engine holds the other. First comes a `WorkerSetup`, then one
message per step. A worker leaves when the engine says so or when the socket closes, which also
happens when the engine dies in whatever way.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from prefold.config import EngineConfig
from prefold.step import SchedulerOutput

STEP, QUIT = b"S", b"Q"
"""Kinds of messages to a worker, their first byte."""
READY, OUTPUT, ERROR = b"R", b"O", b"E"
"""Kinds of messages from a worker."""


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker process is told first."""

    config: EngineConfig
    rank: int
    init_file: str
    """Where the ranks meet: a path that does not exist yet in a folder that does."""


class WorkerFailure(msgspec.Struct):
    """An error on its way to the engine. `user_error`: a ValueError, for the user to mend."""

    rank: int
    message: str
    traceback: str
    user_error: bool


def main(fd: int) -> int:
    connection = Connection(fd)
    # Ctrl-C reaches the whole process group; the engine decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup: WorkerSetup = pickle.loads(connection.recv_bytes())
    try:
        _serve(connection, setup)
    except (EOFError, ConnectionError):
        return _leave_orphaned(setup)
    except BaseException as error:
        failure = WorkerFailure(
            setup.rank,
            f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error),
            traceback.format_exc(),
            isinstance(error, ValueError),
        )
        try:
            connection.send_bytes(ERROR + msgspec.msgpack.encode(failure))
        except OSError:
            return _leave_orphaned(setup)
        return 1
    return 0


def _leave_orphaned(setup: WorkerSetup) -> int:
    """The engine is gone: nobody is left to tell, or to clear up."""
    shutil.rmtree(Path(setup.init_file).parent, ignore_errors=True)
    return 1


def _serve(connection: Connection, setup: WorkerSetup) -> None:
    """Set the rank up and run steps until told to quit."""
    config, rank = setup.config, setup.rank
    # Before torch is imported: its thread pool inherits the binding.
    from prefold.worker.pinning import pin_to_cores

    if config.runtime.pin_threads and config.runtime.device == "cpu":
        pin_to_cores(rank, config.parallel.world_size, config.runtime.threads_per_rank)
    from prefold.worker.worker import start_worker

    worker = start_worker(config, rank, setup.init_file)
    connection.send_bytes(READY + msgspec.msgpack.encode(worker.info()))
    decoder = msgspec.msgpack.Decoder(SchedulerOutput)
    encoder = msgspec.msgpack.Encoder()
    while True:
        message = connection.recv_bytes()
        if message[:1] == QUIT:
            return
        output = worker.execute(decoder.decode(memoryview(message)[1:]))
        if output is not None:
            connection.send_bytes(OUTPUT + encoder.encode(output))


if __name__ == "__main__":
    # Other ranks may wait for this one in a collective: leave without tearing anything down.
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
