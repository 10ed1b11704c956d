"""The contract between the engine and its workers: one message each way per step.

Every rank receives the same `SchedulerOutput`, byte for byte, and derives the same global batch
from it. All that a worker needs to know about a request travels here; workers keep no policy.
"""

from __future__ import annotations

import msgspec

from prefold.request import SamplingParams


class NewRequestData(msgspec.Struct, array_like=True):
    """A request's first appearance on the workers (or its first after a preemption).

    `token_ids` holds prompt and, for a resumed request, the tokens generated before.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_prefill_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """Resolved seed of this sample: never None, equal on all ranks and restarts."""
    eos_token_ids: tuple[int, ...] = ()


class CachedRequestData(msgspec.Struct, array_like=True, gc=False):
    """What changed for a request that the workers hold already.

    `new_token_ids` are tokens sampled since the workers last heard of it: the engine decides the
    tokens, workers never feed their own samples back, so replicas cannot fork.
    """

    request_id: str
    new_token_ids: list[int]
    new_block_ids: list[int]
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step. `num_scheduled_tokens` is ordered: its order is the global batch's order."""

    step_id: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    finished_request_ids: list[str]
    """Finished, aborted or preempted: workers drop their state before adding new requests."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the likeliest, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class StepStats(msgspec.Struct, array_like=True):
    """Facts of a step, summed into metrics by the engine.

    `rank_tokens` and `rank_causal_pairs` have one entry per PCP rank and count prefill and decode.
    """

    rank_tokens: list[int]
    rank_causal_pairs: list[int]
    forward_s: float = 0.0
    bytes_sent: dict[str, int] = {}
    """Bytes this rank put on the wire (or into shared memory) by collective, e.g. 'pcp.all_gather'."""
    calls: dict[str, int] = {}
    """Collectives this rank took part in, under the same names."""
    collective_s: dict[str, float] = {}
    """Seconds that this rank spent in them, under the same names: mostly waiting for other ranks."""
    layer_s: list[float] = []
    """Seconds per layer of this rank's stage, in their order; their sum is less than `forward_s`."""
    ways: dict[str, int] = {}
    """Requests with cached context by how it was attended (`attention.context_ways`), all ranks' requests."""
    workspace_bytes: int = 0
    """That the steps of this rank have needed so far."""


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """Result of a step, from the one rank that samples.

    A request that is still in prefill after the step has no entry in `sampled_token_ids`.
    `prompt_logprobs[id]` has one entry per prompt position computed in this step that predicts a
    prompt token (position p predicts token p + 1).
    """

    step_id: int
    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    stats: StepStats
    errors: dict[str, str] = {}
    """Requests that this step failed, with the reason; the others are not affected."""
