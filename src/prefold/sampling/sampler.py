"""Chooses the next token of every row of a batch with mixed sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from prefold.request import SamplingParams
from prefold.sampling.filters import filter_thresholds
from prefold.sampling.largest import first_largest
from prefold.sampling.logprobs import compute_logprobs
from prefold.sampling.random_draw import race
from prefold.step import TokenLogprobs

DRAW_ELEMENTS = 1 << 19
"""Logits that are filtered and drawn from at a time: a few MB of temporaries, which stay in a CPU's cache."""


class InvalidLogitsError(RuntimeError):
    """Logits that no token can be chosen from. `request_ids` names the requests they belong to."""

    def __init__(self, message: str, request_ids: list[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


@dataclass(frozen=True)
class SamplingMetadata:
    """What the sampler needs to know about the n rows it samples; one entry per row in each sequence.

    Attributes:
        request_ids: named in errors.
        params: sampling parameters.
        seeds: resolved seeds; samples of one prompt have different ones.
        num_generated: tokens generated before this one, also across preemptions: the draw's counter.
        tokens: of a row, integer arrays of its prompt and of its output; asked for penalties only.
        eos_token_ids: suppressed together with `stop_token_ids` before `min_tokens`.
        allowed: by row, [vocab] bool: the only tokens that it may take. Not an entry per row.
    """

    request_ids: Sequence[str]
    params: Sequence[SamplingParams]
    seeds: Sequence[int]
    num_generated: Sequence[int]
    tokens: Callable[[int], tuple[np.ndarray, np.ndarray]]
    eos_token_ids: Sequence[tuple[int, ...]]
    allowed: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        per_row = (self.request_ids, self.params, self.seeds, self.num_generated, self.eos_token_ids)
        assert len(set(map(len, per_row))) == 1, "fields disagree on the number of rows"

    def __len__(self) -> int:
        return len(self.params)


@dataclass(frozen=True)
class SamplerOutput:
    """`token_ids` [n] int64; `logprobs[row]` is None for rows that did not ask for them."""

    token_ids: torch.Tensor
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples one token per row.

    Order: logprobs (of the raw logits), logit_bias, min_tokens, penalties, allowed tokens, temperature,
    min_p, top_k, top_p, draw. A greedy row takes the largest allowed logit after the penalties, the lowest id
    among equals. The draw depends on (seed, num_generated) and the row's own logits, never on the rest of the
    batch.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """`logits` [n, vocab] float32, not modified: after an error the other rows can be sampled again.

        Raises:
            InvalidLogitsError: a row holds NaN or +inf, or has no finite logit (left).
        """
        n = len(metadata)
        assert logits.shape == (n, self.vocab_size), (logits.shape, n, self.vocab_size)
        assert logits.dtype == torch.float32, logits.dtype
        if n == 0:
            return SamplerOutput(torch.empty(0, dtype=torch.int64, device=logits.device), [])
        raw = logits
        if _needs_processing(metadata):
            _check_finite(logits, first_largest(logits), metadata)
            logits = raw.clone()
            apply_processors(logits, metadata)
        token_ids = first_largest(logits)
        _check_finite(logits, token_ids, metadata)
        random_rows = [row for row, p in enumerate(metadata.params) if not p.is_greedy]
        rows_per_chunk = max(1, DRAW_ELEMENTS // self.vocab_size)
        for start in range(0, len(random_rows), rows_per_chunk):
            rows = random_rows[start : start + rows_per_chunk]
            some = logits.index_select(0, torch.tensor(rows, device=logits.device))  # copies rows as they are
            token_ids[rows] = _draw(some, token_ids[rows], rows, metadata)
        return SamplerOutput(token_ids, _row_logprobs(raw, token_ids, metadata))


def apply_processors(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """logit_bias, min_tokens, penalties and allowed tokens on `logits` [n, vocab], in place."""
    _apply_logit_bias(logits, metadata)
    _apply_min_tokens(logits, metadata)
    _apply_penalties(logits, metadata)
    for row, allowed in metadata.allowed.items():
        logits[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)


def _needs_processing(metadata: SamplingMetadata) -> bool:
    return bool(metadata.allowed) or any(
        p.logit_bias or _has_penalty(p) or generated < p.min_tokens
        for p, generated in zip(metadata.params, metadata.num_generated, strict=True)
    )


def _has_penalty(p: SamplingParams) -> bool:
    return p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 or p.repetition_penalty != 1.0


def _check_finite(logits: torch.Tensor, best: torch.Tensor, metadata: SamplingMetadata) -> None:
    """`best` is each row's argmax; argmax stops at a NaN, so looking at that one logit is enough."""
    top = logits.gather(1, best[:, None])[:, 0].tolist()
    bad = [row for row, logit in enumerate(top) if not math.isfinite(logit)]
    if bad:
        request_ids = [metadata.request_ids[row] for row in bad]
        found = [f"{metadata.request_ids[row]!r}: largest logit {top[row]}" for row in bad]
        raise InvalidLogitsError(
            f"no token can be sampled from these logits ({'; '.join(found)})", request_ids
        )


def _index(pairs: list[tuple[int, np.ndarray]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, its token ids) pairs as one index (rows, ids) into [n, vocab]."""
    rows = np.repeat([row for row, _ in pairs], [len(ids) for _, ids in pairs])
    ids = np.concatenate([ids for _, ids in pairs]).astype(np.int64)
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def _apply_logit_bias(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    biased = [(row, p.logit_bias) for row, p in enumerate(metadata.params) if p.logit_bias]
    if not biased:
        return
    index = _index([(row, np.fromiter(bias, np.int64)) for row, bias in biased], logits.device)
    values = [value for _, bias in biased for value in bias.values()]
    logits[index] += torch.tensor(values, dtype=torch.float32, device=logits.device)


def _apply_min_tokens(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    early = [
        (row, np.array([*metadata.eos_token_ids[row], *p.stop_token_ids], dtype=np.int64))
        for row, p in enumerate(metadata.params)
        if metadata.num_generated[row] < p.min_tokens
    ]
    # A stop id beyond the vocabulary can never be sampled: nothing to suppress.
    pairs = [(row, ids[ids < logits.shape[1]]) for row, ids in early]
    pairs = [(row, ids) for row, ids in pairs if not _must_end(metadata.allowed.get(row), ids)]
    if pairs:
        logits[_index(pairs, logits.device)] = -torch.inf


def _must_end(allowed: np.ndarray | None, ends: np.ndarray) -> bool:
    """Whether nothing but one of `ends` is allowed."""
    return allowed is not None and not np.delete(allowed, ends).any()


def _apply_penalties(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """Repetition, then frequency and presence; touches only the tokens that occur."""
    repeated: list[tuple[int, np.ndarray]] = []
    generated: list[tuple[int, np.ndarray]] = []
    repetition: list[np.ndarray] = []
    subtracted: list[np.ndarray] = []
    for row, p in enumerate(metadata.params):
        if not _has_penalty(p):
            continue
        prompt, output = metadata.tokens(row)
        if p.repetition_penalty != 1.0:
            seen = np.unique(np.concatenate([prompt, output]))
            repeated.append((row, seen))
            repetition.append(np.full(len(seen), p.repetition_penalty, dtype=np.float32))
        if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
            ids, counts = np.unique(output, return_counts=True)
            generated.append((row, ids))
            subtracted.append((p.frequency_penalty * counts + p.presence_penalty).astype(np.float32))
    if repeated:
        index = _index(repeated, logits.device)
        factor = torch.from_numpy(np.concatenate(repetition)).to(logits.device)
        values = logits[index]
        logits[index] = torch.where(values > 0, values / factor, values * factor)
    if generated:
        penalty = torch.from_numpy(np.concatenate(subtracted)).to(logits.device)
        logits[_index(generated, logits.device)] -= penalty


def _draw(
    logits: torch.Tensor, best: torch.Tensor, rows: Sequence[int], metadata: SamplingMetadata
) -> torch.Tensor:
    """Draw one token for each of `rows`; `logits` [len(rows), vocab] is their copy, `best` its argmax."""
    params = [metadata.params[row] for row in rows]

    def column(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    # Subtracting the maximum first keeps the differences that matter exact at any temperature.
    logits -= logits.gather(1, best[:, None])
    logits /= column([p.temperature for p in params], torch.float32)[:, None]
    if any(p.min_p > 0.0 or p.top_k > 0 or p.top_p < 1.0 for p in params):
        threshold = filter_thresholds(
            logits,
            min_p=column([p.min_p for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
        )
        logits.masked_fill_(logits < threshold[:, None], -torch.inf)
    return race(logits, [metadata.seeds[row] for row in rows], [metadata.num_generated[row] for row in rows])


def _row_logprobs(
    raw: torch.Tensor, token_ids: torch.Tensor, metadata: SamplingMetadata
) -> list[TokenLogprobs | None]:
    wanted = [row for row, p in enumerate(metadata.params) if p.logprobs is not None]
    result: list[TokenLogprobs | None] = [None] * len(metadata)
    if not wanted:
        return result
    counts = [metadata.params[row].logprobs or 0 for row in wanted]
    most = compute_logprobs(raw[wanted], token_ids[wanted], max(counts))
    for row, count, entry in zip(wanted, counts, most, strict=True):
        keep = 1 + count
        result[row] = TokenLogprobs(entry.token_ids[:keep], entry.logprobs[:keep], entry.ranks[:keep])
    return result
