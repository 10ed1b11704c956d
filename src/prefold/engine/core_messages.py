"""What travels between the HTTP process and the engine process: kinds of messages, and their bodies.

Both are of one machine and one version. Times are `time.monotonic()`, which on Linux is one clock for all
processes of a machine: a request's arrival here and its first token there may be compared.
"""

from __future__ import annotations

import msgspec

from prefold.config import EngineConfig
from prefold.request import SamplingParams
from prefold.step import TokenLogprobs

SETUP, ADD, ABORT, PING, ASK, CHECK, QUIT = b"U", b"A", b"X", b"P", b"K", b"C", b"Q"
"""Kinds to the engine process. Bodies: CoreSetup, CoreRequest, sample ids, anything, RanksQuestion, none,
none."""
READY, REFUSED, OUTPUTS, ABORTED, PONG, TOLD, CHECKED = b"R", b"N", b"O", b"B", b"G", b"T", b"I"
"""Kinds from it: CoreReady, Refusal, CoreOutputs, the sample ids of an ABORT, a PING's body, RanksAnswer,
CheckReport."""
SNAPSHOT, LOG, FAILED = b"S", b"L", b"F"
"""Also from it: metrics.EngineSnapshot, LogLine, CoreFailure (the last message)."""


class CoreSetup(msgspec.Struct):
    """What the engine process is told first. `log_level`: of the lines that it is to send."""

    config: EngineConfig
    log_level: int


class CoreReady(msgspec.Struct):
    """The engine process has started its ranks. `rank_pids`: none if the only rank is this process."""

    rank_pids: list[int]


class CoreRequest(msgspec.Struct, array_like=True):
    """A request for the engine: one prompt, and as many samples as it has `sample_ids`."""

    request_id: str
    sample_ids: list[str]
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float


class Refusal(msgspec.Struct):
    """A request cannot be served, or not any more."""

    request_id: str
    message: str


class ScheduledSample(msgspec.Struct, array_like=True):
    """A sample is handed to the ranks for the first time, or for the first time after a preemption."""

    sample_id: str
    time_s: float
    num_cached_tokens: int
    preempted: bool


class SampleOutput(msgspec.Struct, array_like=True):
    """News of one sample. Fields as the arguments of `OutputProcessor.update`."""

    sample_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    prompt_start: int = 0


class CoreOutputs(msgspec.Struct, array_like=True):
    """News of the engine.

    Attributes:
        time_s: when the samples' tokens were there.
        waiting: requests that were added, and that the first step after that did not take in.
    """

    time_s: float
    samples: list[SampleOutput] = []
    scheduled: list[ScheduledSample] = []
    waiting: list[str] = []


class CheckReport(msgspec.Struct):
    """Do the engine's books agree? `error`: "" if so. Blocks are those of all replicas."""

    error: str
    blocks_used: int


class RanksQuestion(msgspec.Struct):
    """Do the ranks live? They have `limit_s` to show it."""

    number: int
    limit_s: float


class RanksAnswer(msgspec.Struct):
    """`silent`: names of the ranks that did not."""

    number: int
    silent: list[str]


class LogLine(msgspec.Struct):
    level: int
    text: str


class CoreFailure(msgspec.Struct):
    """Why the engine process ends. `user_error`: a ValueError, for the user to mend."""

    message: str
    user_error: bool = False
