"""From a step's hidden states to tokens and log-probabilities, on the ranks that have the head."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from prefold.distributed.group import Group
from prefold.limits import LOGITS_ROWS
from prefold.models.decoder import Decoder
from prefold.sampling.grammar import GrammarError, Grammars
from prefold.sampling.logprobs import compute_logprobs
from prefold.sampling.sampler import InvalidLogitsError, Sampler, SamplerOutput, SamplingMetadata
from prefold.step import SchedulerOutput, TokenLogprobs
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.request_states import RequestInfo, RequestStates


@dataclass(frozen=True, eq=False)
class WantedTokens:
    """Tokens of a step whose hidden states are looked at, as indices into the global batch.

    Attributes:
        prompt: by request (index into the batch), those whose logits predict a prompt token that somebody
            asked the log-probability of.
        last: last token of each request in `batch.sampled`.
    """

    prompt: dict[int, np.ndarray]
    last: np.ndarray

    @cached_property
    def indices(self) -> np.ndarray:
        """[n] int64, `prompt` first."""
        return np.concatenate([*self.prompt.values(), self.last]) if self.prompt else self.last

    @classmethod
    def of(cls, batch: GlobalBatch, states: RequestStates) -> WantedTokens:
        """A pure function of the global batch: the same on all ranks."""
        prompt = {}
        for i in np.flatnonzero(batch.is_prefill).tolist():
            row = batch.rows[i]
            if _info(states, row).sampling_params.prompt_logprobs is None:
                continue
            last = states.num_prompt_tokens[row] - 1  # its logits predict the first output token
            count = min(batch.num_scheduled[i], last - batch.num_computed[i])
            if count > 0:
                prompt[i] = batch.query_start_loc[i] + np.arange(count)
        return cls(prompt, batch.query_start_loc[batch.sampled + 1] - 1)


@dataclass(frozen=True)
class SampledStep:
    """See the fields of the same names in ModelRunnerOutput."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class StepSampler:
    """Decides the tokens of a step, once for all ranks.

    Args:
        model: a last stage.
        tp: its TP group: all of its ranks compute logits, the first one samples.
        grammars: of requests with structured outputs; used by the rank that samples only.
    """

    def __init__(self, model: Decoder, states: RequestStates, tp: Group, grammars: Grammars) -> None:
        self._model = model
        self._states = states
        self._decides = tp.rank == 0
        self._grammars = grammars
        self._sampler = Sampler(model.config.vocab_size)

    def begin_step(self, step: SchedulerOutput) -> None:
        """Before the layers of a step, so that the grammars of new requests are compiled meanwhile."""
        if not self._decides:
            return
        for request_id in step.finished_request_ids:
            self._grammars.remove(request_id)
        for new in step.new_requests:
            if new.sampling_params.structured_outputs is not None:
                self._grammars.add(new.request_id, new.sampling_params.structured_outputs)

    def __call__(self, batch: GlobalBatch, wanted: WantedTokens, hidden: torch.Tensor) -> SampledStep | None:
        """hidden [n, hidden], after the final norm, in the order of `wanted.indices`.

        Joins TP collectives. None on all ranks of the TP group but the first.
        """
        prompt_logprobs = self._prompt_logprobs(batch, wanted.prompt, hidden)
        logits = self._model.compute_logits(hidden[len(hidden) - len(wanted.last) :])
        if not self._decides:
            return None
        requests, sampled, errors = self._sample(batch, logits)
        ids = [batch.request_ids[request] for request in requests]
        return SampledStep(
            sampled_token_ids={i: [token] for i, token in zip(ids, sampled.token_ids.tolist())},
            logprobs={i: [entry] for i, entry in zip(ids, sampled.logprobs) if entry is not None},
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )

    def _prompt_logprobs(
        self, batch: GlobalBatch, tokens: dict[int, np.ndarray], hidden: torch.Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        """Joins TP collectives: runs on all TP ranks."""
        result: dict[str, list[TokenLogprobs]] = {}
        start = 0
        for i, indices in tokens.items():
            row = batch.rows[i]
            num_logprobs = _info(self._states, row).sampling_params.prompt_logprobs
            assert num_logprobs is not None
            entries: list[TokenLogprobs] = []
            for first in range(0, len(indices), LOGITS_ROWS):
                chunk = indices[first : first + LOGITS_ROWS]
                logits = self._model.compute_logits(hidden[start : start + len(chunk)])
                start += len(chunk)
                if self._decides:
                    next_ids = self._states.token_ids[row, batch.positions[chunk] + 1].astype(np.int64)
                    entries += compute_logprobs(logits, torch.from_numpy(next_ids), num_logprobs)
            result[batch.request_ids[i]] = entries
        return result

    def _sample(
        self, batch: GlobalBatch, logits: torch.Tensor
    ) -> tuple[list[int], SamplerOutput, dict[str, str]]:
        """Next tokens of `batch.sampled`: (indices into the batch, their tokens, errors by request id).

        A request whose logits are no numbers, or whose grammar fails, fails alone: the others are sampled
        without it.
        """
        sampled = batch.sampled.tolist()
        allowed, errors = self._allowed(batch, sampled)
        while True:
            keep = [i for i, request in enumerate(sampled) if batch.request_ids[request] not in errors]
            if len(keep) < len(sampled):
                logits, sampled = logits[keep], [sampled[i] for i in keep]
            try:
                metadata = self._sampling_metadata(batch, sampled, allowed)
                return sampled, self._sampler(logits, metadata), errors
            except InvalidLogitsError as error:
                failed = dict.fromkeys(error.request_ids, str(error))
            assert failed, "the error names no request"
            errors.update(failed)

    def _allowed(
        self, batch: GlobalBatch, requests: list[int]
    ) -> tuple[dict[int, np.ndarray], dict[str, str]]:
        """What grammars allow: (index into the batch -> [vocab] bool, errors by request id)."""
        states, allowed, errors = self._states, {}, {}
        for request in requests if self._grammars.num_requests else ():
            row = int(batch.rows[request])
            info = _info(states, row)
            if info.sampling_params.structured_outputs is None:
                continue
            output = states.token_ids[row, states.num_prompt_tokens[row] : states.num_tokens[row]]
            try:
                allowed[request] = self._grammars.allowed(info.request_id, output)
            except GrammarError as error:
                errors[info.request_id] = str(error)
        return allowed, errors

    def _sampling_metadata(
        self, batch: GlobalBatch, requests: list[int], allowed: dict[int, np.ndarray]
    ) -> SamplingMetadata:
        states = self._states
        rows = batch.rows[requests]
        infos = [_info(states, row) for row in rows.tolist()]

        def tokens(i: int) -> tuple[np.ndarray, np.ndarray]:
            prompt, end = states.num_prompt_tokens[rows[i]], states.num_tokens[rows[i]]
            known = states.token_ids[rows[i], :end]
            return known[:prompt], known[prompt:]

        return SamplingMetadata(
            request_ids=[info.request_id for info in infos],
            params=[info.sampling_params for info in infos],
            seeds=[info.seed for info in infos],
            num_generated=(states.num_tokens[rows] - states.num_prompt_tokens[rows]).tolist(),
            tokens=tokens,
            eos_token_ids=[info.eos_token_ids for info in infos],
            allowed={i: allowed[request] for i, request in enumerate(requests) if request in allowed},
        )


def _info(states: RequestStates, row: int) -> RequestInfo:
    info = states.info[row]
    assert info is not None, row
    return info
