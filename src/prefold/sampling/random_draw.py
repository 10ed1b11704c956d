"""The random draw of a sample: noise that depends on (seed, step, token id) and on nothing else.

A token is drawn by an exponential race: give token i the noise E_i ~ Exp(1) and take the smallest
E_i / p_i, which token i wins with probability p_i. Unlike walking a cumulative sum, whose error grows
with the vocabulary and whose order flips with near-ties, a race changes its winner only if the two
best are closer than the error of the logits. E_i comes from a counter-based generator (the
SplitMix64 stream that starts at a key mixed from seed and step), in whole numbers up to the last
step, so every layout and batch sees the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefold.sampling.largest import counts_above, first_largest

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def _signed(value: int) -> int:
    """The int64 with the bits of `value`: torch has no arithmetic on uint64."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """SplitMix64's finaliser on a Python int."""
    value &= _MASK64
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK64
    return value ^ (value >> _SHIFTS[-1])


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """The same on int64, in place. `>>` keeps the sign on int64, hence the masks."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(multiplier))
    return x.bitwise_xor_((x >> _SHIFTS[-1]).bitwise_and_((1 << (64 - _SHIFTS[-1])) - 1))


def draw_key(seed: int, step: int) -> int:
    """The int64 at which the noise of one draw starts; any integers (taken modulo 2**64)."""
    return _signed(_mix(_mix(seed) + (step + 1) * _GOLDEN))


def exponential_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise, float32, for int64 `keys` and `token_ids` that broadcast to its shape."""
    bits = _mix_(keys + (token_ids + 1) * _signed(_GOLDEN))
    # Small noise decides the race, and float32 is finest near 0: u = bits / 2**63 keeps 24 significant
    # bits however small it is. Half a unit is added because noise of exactly 0 would beat everything.
    u = bits.bitwise_and_((1 << 63) - 1).to(torch.float32).add_(0.5).mul_(2.0**-63)
    return u.neg_().log1p_().neg_()


def race(logits: torch.Tensor, seeds: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """One token per row of unnormalised `logits` [n, vocab]: [n] int64. -inf is never drawn.

    `steps` count the tokens generated before. `logits` is overwritten; each row needs a finite one.
    """
    keys = [draw_key(seed, step) for seed, step in zip(seeds, steps, strict=True)]
    key = torch.tensor(keys, dtype=torch.int64, device=logits.device)
    num_kept = int(counts_above(logits, torch.full((len(logits),), -torch.inf, device=logits.device)).sum())
    if num_kept * 8 < logits.numel():  # after a filter few tokens are left: only those need noise
        rows, token_ids = torch.nonzero(logits > -torch.inf, as_tuple=True)
        noise = exponential_noise(key[rows], token_ids)
        logits[rows, token_ids] -= noise.log_()
    else:
        noise = exponential_noise(key[:, None], torch.arange(logits.shape[1], device=logits.device))
        logits -= noise.log_()
    return first_largest(logits)
