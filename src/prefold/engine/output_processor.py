"""Turns sampled tokens into what the caller sees: text, stop strings, log-probabilities, metrics.

The scheduler ends requests for reasons that are in token ids (end of sequence, stop tokens, length).
A stop string shows only in text, so it is found here, and the caller aborts those ids in the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from prefold.engine.core_messages import CoreOutputs
from prefold.engine.stop_strings import StoppableText
from prefold.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams
from prefold.step import TokenLogprobs


class Detokenizer(Protocol):
    """Text of a growing token list; pieces concatenate to the text of all tokens."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TokenizerLike(Protocol):
    """What is used of `prefold.tokenizer.Tokenizer`."""

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass
class _Sample:
    """One of a request's n samples: a request of its own for the scheduler."""

    index: int
    text: StoppableText
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text.visible(self.finish_reason is not None),
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass
class LiveRequest:
    """A request as the caller made it, and what has become of it so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    metrics: RequestMetrics
    samples: dict[str, _Sample]
    prompt_logprobs: list[dict[int, Logprob] | None] | None

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples.values())

    @property
    def completed(self) -> bool:
        """Whether it has finished, and not for an error or an abort."""
        return all(sample.finish_reason in ("stop", "length") for sample in self.samples.values())

    def output(self) -> RequestOutput:
        """All there is by now; a copy that does not change any more."""
        prompt_logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sample.output() for sample in self.samples.values()],
            finished=self.finished,
            prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
            metrics=replace(self.metrics),
        )


class OutputProcessor:
    """State of all requests between the scheduler and the caller.

    Args:
        tokenizer: None leaves all texts empty.
        clock: seconds; the clock of every `arrival_time` and `now`.

    Attributes:
        requests: unfinished ones by sample id; the samples of a request share it.
    """

    def __init__(self, tokenizer: TokenizerLike | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self.requests: dict[str, LiveRequest] = {}
        self._sample_ids: dict[str, list[str]] = {}  # by request id

    @property
    def num_unfinished(self) -> int:
        return len(self._sample_ids)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float | None = None,
        stream: bool = True,
    ) -> list[str]:
        """Register a request and return its samples' ids, the ones that the scheduler is to use.

        With n == 1 that is `request_id` itself, else `request_id:0`, `request_id:1`, ... Prompt
        log-probabilities are read from the first sample only. With `stream` False nothing is returned
        for the request until all its samples have finished.

        Raises:
            ValueError: the id is in use, or stop strings are asked for without a tokenizer.
        """
        n = params.n
        sample_ids = [request_id] if n == 1 else [f"{request_id}:{index}" for index in range(n)]
        if request_id in self._sample_ids or any(sample_id in self.requests for sample_id in sample_ids):
            raise ValueError(f"request id {request_id!r} is in use")
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={list(params.stop)} needs a tokenizer; stop_token_ids works without one")
        group = LiveRequest(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            params=params,
            stream=stream,
            metrics=RequestMetrics(arrival_time=self._clock() if arrival_time is None else arrival_time),
            samples={
                sample_id: self._new_sample(index, params) for index, sample_id in enumerate(sample_ids)
            },
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self._sample_ids[request_id] = sample_ids
        self.requests.update(dict.fromkeys(sample_ids, group))
        return sample_ids

    def mark_scheduled(self, sample_id: str, now: float | None = None, num_cached_tokens: int = 0) -> None:
        """The sample is in this step's batch. Only the first call for a request counts."""
        group = self.requests.get(sample_id)
        if group is not None and group.metrics.first_scheduled_s is None:
            group.metrics.first_scheduled_s = self._now(now) - group.metrics.arrival_time
            group.metrics.num_cached_tokens = num_cached_tokens

    def mark_preempted(self, sample_id: str) -> None:
        """The sample lost its blocks and will be recomputed."""
        group = self.requests.get(sample_id)
        if group is not None:
            group.metrics.num_preemptions += 1

    def apply(self, outputs: CoreOutputs) -> tuple[list[LiveRequest], set[str]]:
        """Take the engine's news.

        Returns:
            The requests that have something new to show, and the ids that met a stop string: see `update`.
        """
        for new in outputs.scheduled:
            if new.preempted:
                self.mark_preempted(new.sample_id)
            self.mark_scheduled(new.sample_id, new.time_s, new.num_cached_tokens)
        news: dict[str, LiveRequest] = {}
        to_stop: set[str] = set()
        for sample in outputs.samples:
            request, stopped = self.update(
                sample.sample_id,
                sample.new_token_ids,
                logprobs=sample.logprobs,
                prompt_logprobs=sample.prompt_logprobs,
                prompt_start=sample.prompt_start,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                now=outputs.time_s,
            )
            to_stop |= stopped
            if request is not None:
                news[request.request_id] = request
        return list(news.values()), to_stop

    def update(
        self,
        sample_id: str,
        new_token_ids: Sequence[int] = (),
        *,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        prompt_start: int = 0,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        now: float | None = None,
    ) -> tuple[LiveRequest | None, set[str]]:
        """One step's result of one sample.

        Args:
            sample_id: as returned by `add_request`. Unknown ids, and samples that have ended here, are
                ignored: a step may still be under way when its request is aborted or meets a stop string.
            new_token_ids: tokens sampled in this step.
            logprobs: one entry per new token, if the request asked for them.
            prompt_logprobs: entry i is about prompt token `prompt_start + i + 1`.
            prompt_start: first position that this step computed for the request. A chunk that was
                computed before a preemption may come again; its entries are then ignored.
            finish_reason, stop_reason: set if the scheduler has finished the request.

        Returns:
            The request (None if there is nothing new to show), and the ids that met a stop string: the
            scheduler must drop them as finished "stop".
        """
        group = self.requests.get(sample_id)
        if group is None:
            return None, set()
        sample = group.samples[sample_id]
        if sample.finish_reason is not None:
            return None, set()
        if sample.index == 0 and prompt_logprobs:
            self._add_prompt_logprobs(group, prompt_logprobs, prompt_start)
        now = self._now(now)
        if new_token_ids and group.metrics.ttft_s is None:
            group.metrics.ttft_s = now - group.metrics.arrival_time
        stop_string_met = self._add_tokens(group, sample, new_token_ids, logprobs, finish_reason == "stop")
        to_stop = {sample_id} if stop_string_met and finish_reason is None else set()
        if finish_reason is not None and not stop_string_met:
            stop_string_met = self._flush(group, sample)
        if stop_string_met:
            finish_reason, stop_reason = "stop", sample.text.stopped_by
        sample.finish_reason, sample.stop_reason = finish_reason, stop_reason
        if finish_reason is not None and group.finished:
            return self._finish(group, now), to_stop
        if group.stream and (new_token_ids or finish_reason is not None):
            return group, to_stop
        return None, to_stop

    def abort(self, request_id: str, now: float | None = None) -> tuple[RequestOutput | None, set[str]]:
        """End a request early with finish_reason "abort".

        Returns:
            The final output (None if the request is unknown or has finished), and the ids of the
            samples that the scheduler must drop.
        """
        if request_id not in self._sample_ids:
            return None, set()
        return self._end(request_id, "abort", None, now)

    def fail_all(self, message: str, now: float | None = None) -> list[RequestOutput]:
        """End all requests with finish_reason "error" and the message as stop_reason."""
        return [self._end(request_id, "error", message, now)[0] for request_id in list(self._sample_ids)]

    def _end(
        self, request_id: str, finish_reason: str, stop_reason: str | None, now: float | None
    ) -> tuple[RequestOutput, set[str]]:
        """End a known request: its final output, and the ids of the samples that had not finished."""
        sample_ids = self._sample_ids[request_id]
        group = self.requests[sample_ids[0]]
        unfinished = {sample_id for sample_id, s in group.samples.items() if s.finish_reason is None}
        for sample_id in unfinished:
            sample = group.samples[sample_id]
            self._flush(group, sample)
            sample.finish_reason, sample.stop_reason = finish_reason, stop_reason
        return self._finish(group, self._now(now)).output(), unfinished

    def _now(self, now: float | None) -> float:
        return self._clock() if now is None else now

    def _new_sample(self, index: int, params: SamplingParams) -> _Sample:
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = self._tokenizer.detokenizer(params.skip_special_tokens)
        sample = _Sample(index, StoppableText(tuple(params.stop)), detokenizer)
        if params.logprobs is not None:
            sample.logprobs, sample.cumulative_logprob = [], 0.0
        return sample

    def _add_tokens(
        self,
        group: LiveRequest,
        sample: _Sample,
        new_token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        ends_with_stop_token: bool,
    ) -> bool:
        """Append tokens up to a stop string; True if one was met. Later tokens are dropped."""
        if sample.logprobs is not None:
            assert len(logprobs) == len(new_token_ids), (len(logprobs), len(new_token_ids))
        for i, token_id in enumerate(new_token_ids):
            sample.token_ids.append(token_id)
            if sample.logprobs is not None and sample.cumulative_logprob is not None:
                sample.logprobs.append(self._logprob_dict(logprobs[i]))
                sample.cumulative_logprob += logprobs[i].logprobs[0]
            if ends_with_stop_token and i == len(new_token_ids) - 1:
                continue  # the token that ends a text is no part of it
            piece = "" if sample.detokenizer is None else sample.detokenizer.push(token_id)
            if sample.text.append(piece, _may_stop(group, sample)):
                return True
        return False

    def _flush(self, group: LiveRequest, sample: _Sample) -> bool:
        """Append what the detokenizer held back; True if that completes a stop string."""
        if sample.detokenizer is None:
            return False
        return sample.text.append(sample.detokenizer.finish(), _may_stop(group, sample))

    def _add_prompt_logprobs(self, group: LiveRequest, entries: Sequence[TokenLogprobs], start: int) -> None:
        have = group.prompt_logprobs
        assert have is not None, f"{group.request_id!r} asked for no prompt logprobs"
        first = start + 1  # what position `start` predicts
        assert first <= len(have), f"prompt logprobs {len(have)}..{first} are missing: were they cached?"
        have.extend(self._logprob_dict(entry) for entry in entries[len(have) - first :])
        assert len(have) <= len(group.prompt_token_ids), (len(have), len(group.prompt_token_ids))

    def _logprob_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Token id -> Logprob, the chosen token first."""
        text = (lambda _: None) if self._tokenizer is None else self._tokenizer.token_text
        return {
            token_id: Logprob(logprob, rank, text(token_id))
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        }

    def _finish(self, group: LiveRequest, now: float) -> LiveRequest:
        """Complete the metrics and forget the request."""
        metrics = group.metrics
        metrics.latency_s = now - metrics.arrival_time
        num_tokens = max(len(sample.token_ids) for sample in group.samples.values())
        if metrics.ttft_s is not None and num_tokens > 1:
            metrics.tpot_s = (metrics.latency_s - metrics.ttft_s) / (num_tokens - 1)
        for sample_id in self._sample_ids.pop(group.request_id):
            del self.requests[sample_id]
        return group


def _may_stop(group: LiveRequest, sample: _Sample) -> bool:
    """Whether a stop string that the latest token completed counts: not within `min_tokens`."""
    return len(sample.token_ids) > group.params.min_tokens
