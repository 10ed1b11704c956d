"""The engine in one process: requests in, outputs out, one step at a time."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefold.config import EngineConfig
from prefold.engine.core import EngineCore, EngineMetrics
from prefold.engine.core_messages import CoreRequest
from prefold.engine.executor import Executor
from prefold.engine.output_processor import OutputProcessor, TokenizerLike
from prefold.engine.scheduler import Scheduler
from prefold.request import RequestOutput, SamplingParams


class LLMEngine:
    """An EngineCore and output processing behind one `step()`.

    Args:
        config: resolved configuration.
        tokenizer: None works on token ids only.
        executor: for tests; by default the ranks that `config` asks for are started.

    Attributes:
        core: schedulers and ranks.
        failed_outputs: the requests that ended with finish reason "error" when the engine died.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: TokenizerLike | None = None, executor: Executor | None = None
    ) -> None:
        self.config = config
        self.failed_outputs: list[RequestOutput] = []
        self._outputs = OutputProcessor(tokenizer)
        self.core = EngineCore(config, executor)

    @property
    def metrics(self) -> EngineMetrics:
        return self.core.metrics

    @property
    def schedulers(self) -> list[Scheduler]:
        """One per replica."""
        return self.core.schedulers

    @property
    def scheduler(self) -> Scheduler:
        """The first replica's."""
        return self.core.schedulers[0]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do: requests, or steps in flight of requests that were aborted."""
        return self.core.has_unfinished_requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        stream: bool = True,
    ) -> None:
        """Queue a request; with `stream` False nothing comes back before it has finished.

        Raises:
            ValueError: the request cannot be served; names the value and the limit.
            EngineDeadError: a rank has failed before.
        """
        self.core.raise_if_dead()
        if params.structured_outputs is not None:
            from prefold.grammar import check_grammar  # takes a while to import

            check_grammar(params.structured_outputs)
        token_ids = _integers(request_id, prompt_token_ids)
        now = time.monotonic()
        sample_ids = self._outputs.add_request(request_id, prompt, token_ids, params, now, stream)
        try:
            self.core.add_request(CoreRequest(request_id, sample_ids, token_ids, params, now))
        except BaseException:
            self._outputs.abort(request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """Hand out the steps that replicas have work for, then wait until one is done.

        Returns the requests that have something new to show.

        Raises:
            EngineDeadError: a step or a rank has failed, now or before; see `failed_outputs`.
        """
        with self._requests_fail_with_the_core():
            news, met_stop_string = self._outputs.apply(self.core.step())
            self.core.stop(met_stop_string)
            return [request.output() for request in news]

    def check_health(self) -> None:
        """For when no step is due. EngineDeadError if a rank has failed."""
        with self._requests_fail_with_the_core():
            self.core.check_health()

    @contextmanager
    def _requests_fail_with_the_core(self) -> Iterator[None]:
        try:
            with self.core.failure_is_fatal():
                yield
        finally:
            if self.core.failure is not None:
                self.failed_outputs += self._outputs.fail_all(self.core.failure)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once. None if unknown. Its blocks are free when no step in flight holds it."""
        result, sample_ids = self._outputs.abort(request_id)
        self.core.abort(sample_ids)
        return result

    def shutdown(self) -> None:
        """End the ranks. The engine is of no use afterwards."""
        self.core.shutdown()


def _integers(request_id: str, token_ids: Sequence[int]) -> list[int]:
    """Plain integers, also of numpy's; ValueError for anything else."""
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise ValueError(f"request {request_id}: token ids must be integers: {error}") from None
