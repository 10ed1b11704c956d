"""min_p, top_k and top_p as one threshold per row.

All three keep the likeliest tokens, so each is a lowest logit that stays. Tokens tied with the last
one kept stay too: which of two equal tokens is kept then depends neither on a sort's order nor on the
layout of the batch.
"""

from __future__ import annotations

import torch

from prefold.sampling.largest import largest_values, sorted_values

TOP_P_CANDIDATES = 512
"""top_p looks at that many of the likeliest tokens first and sorts the vocabulary only if it must."""


def filter_thresholds(
    logits: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    num_candidates: int = TOP_P_CANDIDATES,
) -> torch.Tensor:
    """Lowest logit that stays, per row: [n] float32, -inf where nothing is filtered.

    Applied in the order min_p, top_k, top_p; each sees the distribution that the one before left.

    Args:
        logits: [n, vocab] float32 after temperature, **each row's maximum 0**.
        min_p: [n] float32 in [0, 1]; 0 keeps all.
        top_k: [n] int64; below 1 or at least vocab keeps all.
        top_p: [n] float64 in (0, 1]; 1 keeps all.
        num_candidates: see TOP_P_CANDIDATES; any value gives the same result.
    """
    vocab_size = logits.shape[-1]
    threshold = min_p.log()
    limited = (top_k > 0) & (top_k < vocab_size)
    nucleus = top_p < 1.0
    needed = int(top_k[limited].max()) if limited.any() else 0
    if nucleus.any():
        needed = max(needed, min(num_candidates, vocab_size))
    if needed == 0:
        return threshold
    candidates = largest_values(logits, needed)
    kth = candidates.gather(1, (top_k.clamp(1, needed) - 1)[:, None])[:, 0]
    threshold = torch.where(limited, torch.maximum(threshold, kth), threshold)
    if nucleus.any():
        rows = nucleus.nonzero()[:, 0]
        threshold[rows] = _nucleus_thresholds(
            logits.index_select(0, rows), candidates[rows], threshold[rows], top_p[rows]
        )
    return threshold


def _nucleus_thresholds(
    logits: torch.Tensor, candidates: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """`threshold` raised to the last token of the smallest set that reaches `top_p` of the mass kept."""
    target = top_p * _weights(logits, threshold).sum(dim=-1, dtype=torch.float64)
    raised, is_reached = _raise_to_mass(candidates, threshold, target)
    # Not reached although more tokens follow: only the whole vocabulary can tell.
    short = ~is_reached & (candidates[:, -1] >= threshold) & (candidates.shape[1] < logits.shape[1])
    rows = short.nonzero()[:, 0]
    if len(rows):
        everything = sorted_values(logits.index_select(0, rows))
        raised[rows], _ = _raise_to_mass(everything, threshold[rows], target[rows])
    return raised


def _weights(logits: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities; 0 below the threshold [n]."""
    weights = logits.exp()
    if bool((threshold > -torch.inf).any()):
        weights.masked_fill_(logits < threshold[:, None], 0.0)
    return weights


def _raise_to_mass(
    values: torch.Tensor, threshold: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`threshold` raised to the first of the descending logits `values` [n, m] at which their mass reaches
    `target`, or to the last one; whether it does)."""
    mass = _weights(values, threshold).cumsum(1, dtype=torch.float64)
    last = torch.searchsorted(mass, target[:, None])[:, 0]  # first index whose mass reaches the target
    raised = values.gather(1, last.clamp(max=values.shape[1] - 1)[:, None])[:, 0]
    return torch.maximum(threshold, raised), last < values.shape[1]
