"""`AsyncLLM`: the engine for a server, in a process of its own, with asyncio on this side.

This process makes text of tokens and finds stop strings; the engine process knows neither (core_process.py).
Whoever reads a request's outputs gets the latest state whenever he looks: nothing queues up behind a slow
reader, and he slows nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import replace
from enum import Enum
from typing import Any, NoReturn

from msgspec.structs import replace as replace_fields

from prefold.config import EngineConfig
from prefold.control import decode, encode
from prefold.engine import core_messages as kinds
from prefold.engine.args import EngineArgs
from prefold.engine.async_tokenizer import AsyncTokenizer, load_if_any
from prefold.engine.core_client import CoreClient, CoreFailed
from prefold.engine.core_messages import (
    CheckReport,
    CoreFailure,
    CoreOutputs,
    CoreRequest,
    Refusal,
)
from prefold.engine.errors import EngineDeadError, EngineRestartingError, QueueFullError
from prefold.engine.output_processor import OutputProcessor
from prefold.engine.request_checks import check_request
from prefold.engine.streams import Stream, Streams
from prefold.metrics import EngineSnapshot, StepRecord
from prefold.request import RequestOutput, SamplingParams
from prefold.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "EngineDeadError", "EngineRestartingError", "EngineStatus", "QueueFullError"]

RECENT_STEPS = 256
RECENT_PREFILLS = 12
MAX_FAILURES = 3
"""So many failures within FAILURE_WINDOW_S, and no request completed in between, are for good."""
FAILURE_WINDOW_S = 60.0
BACK_OFF_S = 0.5
"""Before the first restart; doubled before each further one."""

logger = logging.getLogger("prefold")


class EngineStatus(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DEAD = "dead"
    STOPPED = "stopped"


class AsyncLLM:
    """Generates for many callers of one event loop; made by `start`.

    Attributes:
        config: resolved.
        status, failure: where the engine stands, and why it is DEAD or RESTARTING.
        snapshot: what the engine process said last about itself.
        recent_steps: the latest steps of the engine.
        recent_prefills: the latest steps that held a prefill: many decodes may have followed.
        rank_pids: process ids of the ranks; none where the only rank is the engine process.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        max_waiting: int | None = None,
        restart_workers: bool = False,
    ) -> None:
        self.config = config
        self.status = EngineStatus.STARTING
        self.failure: str | None = None
        self.snapshot = EngineSnapshot()
        self.recent_steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.recent_prefills: deque[StepRecord] = deque(maxlen=RECENT_PREFILLS)
        self.rank_pids: list[int] = []
        self._max_waiting = max_waiting
        self._restart_workers = restart_workers
        self._client: CoreClient | None = None
        self._outputs = OutputProcessor(tokenizer)
        self._streams = Streams(config.scheduler.max_num_seqs * config.parallel.data_parallel_size)
        self._aborting: Counter[str] = Counter()
        """Samples that the engine has been told to drop, until it says that it has."""
        self._checks: deque[asyncio.Future[CheckReport]] = deque()
        self._failed_at: list[float] = []
        self._restart: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._draining = False
        self._tokenizer = AsyncTokenizer(tokenizer)
        self._loop = asyncio.get_running_loop()

    # ---------------------------------------------------------------- start and end

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        *,
        max_waiting: int | None = None,
        restart_workers: bool = False,
        trace: str | None = None,
    ) -> AsyncLLM:
        """Start an engine and wait until it is ready.

        Args:
            max_waiting: requests that may wait at a time; more are refused.
            restart_workers: start a new engine process when one has failed.
            trace: as EngineArgs.trace.

        Raises:
            ValueError: an option or the checkpoint is not usable; says why.
            EngineDeadError: a rank has failed while it started.
        """
        if args.process_index > 0:
            raise ValueError(f"a server runs on node 0; on node {args.node_rank} call prefold.run_node")
        if trace is not None:
            args = replace(args, trace=trace)
        config = await asyncio.to_thread(args.resolve)
        engine = cls(config, None, max_waiting, restart_workers)
        try:
            # The tokenizer and the ranks load at the same time.
            tokenizer, _ = await asyncio.gather(asyncio.to_thread(load_if_any, args.model), engine._launch())
            engine._tokenizer.tokenizer, engine._outputs = tokenizer, OutputProcessor(tokenizer)
        except BaseException as error:
            await engine.shutdown()
            if isinstance(error, CoreFailed):
                kind = ValueError if error.failure.user_error else EngineDeadError
                raise kind(str(error)) from None
            raise
        return engine

    async def _launch(self) -> None:
        """Start an engine process and wait until it is ready. CoreFailed, OSError: it does not start."""
        self._client = client = CoreClient(self.config, self._on_message, self._on_lost)
        self.rank_pids = (await client.ready).rank_pids
        if client.alive:  # else `_on_lost` was called, or will be
            self.status, self.failure = EngineStatus.READY, None

    async def shutdown(self) -> None:
        """End the engine process and its ranks; unfinished requests fail. May be called again."""
        if self.status is not EngineStatus.DEAD:
            self.status, self.failure = EngineStatus.STOPPED, "the engine was shut down"
        self._fail_requests(self.failure or "")
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        self._tokenizer.shutdown()
        if self._client is not None:
            await self._client.end()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those that run; end with "abort" what is left after the time."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self.num_unfinished and time.monotonic() < deadline:
            self._streams.changed.clear()
            try:
                await asyncio.wait_for(self._streams.changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                break
        for stream in self._streams.all():
            _, sample_ids = self._outputs.abort(stream.request_id)
            self._abort(sample_ids)
            self._streams.remove(stream)
            stream.event.set()

    async def wait_dead(self) -> str:
        """Wait until the engine is dead for good, and return why."""
        await self._ended.wait()
        return self.failure or ""

    # ---------------------------------------------------------------- requests

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if the checkpoint has none."""
        return self._tokenizer.tokenizer

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of a request, each with all there is by then, the last one with `finished`. A slow reader
        gets fewer of them. Closing or cancelling the iterator aborts the request.

        Raises (at the first step of the iterator, the last two later, too):
            ValueError: the request cannot be served; names the value and the limit.
            QueueFullError: `max_waiting` requests wait already.
            EngineRestartingError: try again soon.
            EngineDeadError: the engine has failed or is shutting down; says why.
        """
        return self._generate(request_id, prompt_token_ids, params, prompt, time.monotonic())

    async def _generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        arrival_time: float,
    ) -> AsyncIterator[RequestOutput]:
        stream = self._add(request_id, prompt_token_ids, params, prompt, arrival_time)
        try:
            while True:
                await stream.event.wait()
                stream.event.clear()
                if stream.error is not None:
                    raise stream.error
                output = stream.request.output()
                yield output
                if output.finished:
                    return
        finally:
            if self._streams.remove(stream):
                _, sample_ids = self._outputs.abort(request_id)
                self._abort(sample_ids)

    def _add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        arrival_time: float,
    ) -> Stream:
        """Send a request to the engine."""
        if self.status is not EngineStatus.READY or self._client is None or not self._client.alive:
            self._raise_not_ready()
        if self._draining:
            raise EngineDeadError("the server is shutting down")
        check_request(self.config, request_id, prompt_token_ids, params)
        if self._max_waiting is not None:
            waiting = self._streams.num_waiting_with_one_more
            if waiting > self._max_waiting:
                raise QueueFullError(
                    f"{waiting - 1} requests are waiting, and max_waiting is {self._max_waiting}: try later"
                )
        sample_ids = self._outputs.add_request(request_id, prompt, prompt_token_ids, params, arrival_time)
        stream = Stream(request_id, self._outputs.requests[sample_ids[0]], len(sample_ids))
        self._streams.add(stream)
        request = CoreRequest(request_id, sample_ids, prompt_token_ids, params, arrival_time)
        self._client.send(kinds.ADD, encode(request))
        return stream

    def _raise_not_ready(self) -> NoReturn:
        if self.status in (EngineStatus.DEAD, EngineStatus.STOPPED):
            raise EngineDeadError(self.failure or "the engine is dead")
        if self.status is EngineStatus.STARTING:
            raise EngineRestartingError("the engine is starting")
        if self.status is EngineStatus.READY:  # and its process is not: what became of it will be known soon
            kind = EngineRestartingError if self._restart_workers else EngineDeadError
            raise kind("the engine process has failed or is gone")
        raise EngineRestartingError(f"the engine is being restarted: {self.failure}")

    def _abort(self, sample_ids: set[str]) -> None:
        if sample_ids and self._client is not None and self._client.alive:
            self._aborting.update(sample_ids)
            self._client.send(kinds.ABORT, encode(list(sample_ids)))

    # ---------------------------------------------------------------- the tokenizer, off the event loop

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `Tokenizer.encode`."""
        return await self._tokenizer.encode(text, add_special_tokens)

    async def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """As `Tokenizer.decode`."""
        return await self._tokenizer.decode(token_ids, skip_special_tokens)

    async def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """As `Tokenizer.apply_chat_template`."""
        return await self._tokenizer.apply_chat_template(messages, **options)

    # ---------------------------------------------------------------- health

    async def check_health(self, timeout_s: float = 5.0) -> None:
        """Raises:
        EngineDeadError: the engine has failed, or its process or a rank does not answer within the time.
        """
        if self.status is not EngineStatus.READY or self._client is None:
            self._raise_not_ready()
        try:
            silent = await self._client.silent_ranks(timeout_s)
        except TimeoutError:
            raise EngineDeadError(f"the engine process has not answered for {timeout_s:g} s") from None
        except ConnectionError:
            raise EngineDeadError("the engine process has failed or is gone") from None
        if silent:
            verb = "does" if len(silent) == 1 else "do"
            raise EngineDeadError(f"{', '.join(silent)} {verb} not answer")

    async def check_integrity(self) -> int:
        """For tests: AssertionError unless the engine's books agree; returns how many blocks are in use.
        Answered between two steps."""
        if self._client is None or not self._client.alive:
            self._raise_not_ready()
        answer = self._loop.create_future()
        self._checks.append(answer)
        self._client.send(kinds.CHECK)
        report: CheckReport = await answer
        if report.error:
            raise AssertionError(report.error)
        return report.blocks_used

    # ---------------------------------------------------------------- messages

    def _on_message(self, kind: bytes, body: bytes) -> None:
        if kind == kinds.OUTPUTS:
            self._on_outputs(decode(body, CoreOutputs))
        elif kind == kinds.REFUSED:
            self._on_refused(decode(body, Refusal))
        elif kind == kinds.ABORTED:
            self._aborting -= Counter(decode(body, list))
        elif kind == kinds.SNAPSHOT:
            self.snapshot = decode(body, EngineSnapshot)
            self.recent_steps.extend(self.snapshot.steps)
            self.recent_prefills.extend(step for step in self.snapshot.steps if step.rows)
        else:
            assert kind == kinds.CHECKED, kind
            answer = self._checks.popleft()
            if not answer.done():
                answer.set_result(decode(body, CheckReport))

    def _on_outputs(self, outputs: CoreOutputs) -> None:
        if self._aborting:
            outputs.samples = [s for s in outputs.samples if s.sample_id not in self._aborting]
            outputs.scheduled = [s for s in outputs.scheduled if s.sample_id not in self._aborting]
            outputs.waiting = [i for i in outputs.waiting if i not in self._aborting]
        requests = self._outputs.requests
        for sample_id in outputs.waiting:
            if sample_id in requests:
                self._streams.mark_waiting(requests[sample_id].request_id)
        for sample in outputs.scheduled:
            if sample.sample_id in requests:
                self._streams.mark_running(requests[sample.sample_id].request_id)
        news, met_stop_string = self._outputs.apply(outputs)
        self._abort(met_stop_string)
        for request in news:
            stream = self._streams.get(request.request_id)
            assert stream is not None, request.request_id
            stream.event.set()
            if request.finished:
                self._streams.remove(stream)
                if request.completed:
                    self._failed_at.clear()

    def _on_refused(self, refusal: Refusal) -> None:
        stream = self._streams.get(refusal.request_id)
        if stream is not None and not self._aborting.keys() & stream.request.samples.keys():
            self._outputs.abort(refusal.request_id)
            self._streams.remove(stream)
            stream.fail(ValueError(refusal.message))

    # ---------------------------------------------------------------- failure and restart

    def _fail_requests(self, reason: str) -> None:
        self._outputs.fail_all(reason)
        for stream in self._streams.all():
            self._streams.remove(stream)
            stream.fail(EngineDeadError(reason))
        for answer in self._checks:
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))
        self._checks.clear()
        self._aborting.clear()

    def _on_lost(self, failure: CoreFailure) -> None:
        """The engine process has failed or is gone: end all requests, and begin anew if that is wanted."""
        if self.status is EngineStatus.STOPPED:
            return
        self.failure = failure.message
        self.status = EngineStatus.RESTARTING if self._restart_workers else EngineStatus.DEAD
        self.snapshot = replace_fields(
            self.snapshot, num_running=0, num_waiting=0, blocks_used=0, blocks_cached=0, requests=[], steps=[]
        )
        self._fail_requests(failure.message)
        if self._restart_workers:
            self._restart = self._loop.create_task(self._begin_anew())
        else:
            self._ended.set()

    async def _begin_anew(self) -> None:
        """Start engine processes until one is ready, or too many have failed."""
        assert self._client is not None
        while self._may_restart():
            delay = BACK_OFF_S * 2 ** (len(self._failed_at) - 1)
            logger.warning("%s; a new engine starts in %g s", self.failure, delay)
            await self._client.end()  # two at a time may be more than the memory holds
            await asyncio.sleep(delay)
            try:
                await self._launch()
                return
            except CoreFailed as error:
                self.failure = error.failure.message
            except OSError as error:
                self.failure = f"the engine is dead: its process cannot be started: {error}"
        self.status = EngineStatus.DEAD
        self.failure = f"{self.failure} ({MAX_FAILURES} failures within {FAILURE_WINDOW_S:g} s)"
        self._ended.set()

    def _may_restart(self) -> bool:
        """Count a failure; False if there were too many."""
        now = time.monotonic()
        self._failed_at = [at for at in self._failed_at if now - at < FAILURE_WINDOW_S]
        self._failed_at.append(now)
        return len(self._failed_at) < MAX_FAILURES
