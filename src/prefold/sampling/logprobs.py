"""Log-probabilities of chosen and likeliest tokens, from raw logits."""

from __future__ import annotations

import torch

from prefold.sampling.largest import counts_above
from prefold.step import TokenLogprobs

CHUNK_ELEMENTS = 1 << 22
"""Logits that are worked on at a time: bounds the temporaries to a few times 16 MiB."""


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int, chunk_elements: int = CHUNK_ELEMENTS
) -> list[TokenLogprobs]:
    """One TokenLogprobs per row: the chosen token first, then the `num_logprobs` likeliest.

    Also serves prompt logprobs: row i holds the logits at position p, `token_ids[i]` is the prompt's
    token at p + 1. Ranks start at 1 and order tokens by (logit descending, id ascending), so equal
    logits have different ranks and the greedy token always has rank 1.

    Args:
        logits: [m, vocab] float32, not modified.
        token_ids: [m] int64, the chosen tokens.
        num_logprobs: how many of the likeliest; more than vocab gives vocab.
    """
    assert token_ids.shape == logits.shape[:1], (logits.shape, token_ids.shape)
    rows_per_chunk = max(1, chunk_elements // max(1, logits.shape[1]))
    result: list[TokenLogprobs] = []
    for start in range(0, len(logits), rows_per_chunk):
        stop = start + rows_per_chunk
        result += _chunk_logprobs(logits[start:stop], token_ids[start:stop], num_logprobs)
    return result


def _chunk_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    log_sum = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = 1 + counts_above(logits, chosen[:, 0])
    for row, token_id in enumerate(token_ids.tolist()):
        ranks[row] += torch.count_nonzero(logits[row, :token_id] == chosen[row])
    top_ids = _top_tokens(logits, min(num_logprobs, logits.shape[1]))
    all_ids = torch.cat([token_ids[:, None], top_ids], dim=1)
    logprobs = logits.gather(1, all_ids) - log_sum
    top_ranks = list(range(1, top_ids.shape[1] + 1))
    rows = zip(all_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [TokenLogprobs(ids, values, [rank, *top_ranks]) for ids, values, rank in rows]


def _top_tokens(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[m, k] ids by (logit descending, id ascending). torch.topk leaves the order of ties open."""
    if k == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    width = min(k + 1, logits.shape[1])
    values, ids = logits.topk(width, dim=-1)
    cut_tie = values[:, k - 1] == values[:, k] if width > k else torch.zeros(len(logits), dtype=torch.bool)
    for row in cut_tie.nonzero()[:, 0].tolist():
        # topk chose freely among tokens equal to the last one: choose the lowest ids instead.
        above = (logits[row] > values[row, k - 1]).nonzero()[:, 0]
        equal = (logits[row] == values[row, k - 1]).nonzero()[:, 0]
        ids[row, :k] = torch.cat([above, equal[: k - len(above)]])
    ids = ids[:, :k].sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
