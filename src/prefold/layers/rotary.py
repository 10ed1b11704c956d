"""Rotary position embedding: all rope types that a supported config can name.

Frequencies follow transformers 5.24. Where they depend on the length of the sequence (longrope,
dynamic), transformers decides anew in every forward; here `max_model_len` decides once, so that a
key in the cache stays valid while its sequence grows.
"""

from __future__ import annotations

import math

import torch

from prefold.config import RopeConfig
from prefold.kernels import fused
from prefold.workspace import Workspace

TOKENS_PER_PASS = 128
"""Tokens rotated at a time, so that the passes over them find them in the cache."""


def rope_frequencies(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [dim / 2] float32 and the factor on cos and sin."""
    p = config.parameters
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    inv_freq = 1.0 / config.theta**exponents
    match config.rope_type:
        case "default":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / p["factor"], 1.0
        case "proportional":
            rotated = int(p.get("partial_rotary_factor", 1.0) * config.dim // 2)
            inv_freq[rotated:] = 0.0
            return inv_freq / p.get("factor", 1.0), 1.0
        case "dynamic":
            return _dynamic(config, max_model_len, exponents), 1.0
        case "yarn":
            return _yarn(config, inv_freq), _yarn_attention_factor(config)
        case "longrope":
            return _longrope(config, max_model_len, exponents)
        case "llama3":
            return _llama3(config, inv_freq), 1.0
    raise ValueError(f"rope type {config.rope_type!r} is not supported")


def _dynamic(config: RopeConfig, max_model_len: int, exponents: torch.Tensor) -> torch.Tensor:
    """NTK-aware: the base grows with the longest sequence that will be served."""
    factor, trained = config.parameters["factor"], config.max_position_embeddings
    length = max(max_model_len, trained)
    growth = factor * length / trained - (factor - 1)
    return 1.0 / (config.theta * growth ** (config.dim / (config.dim - 2))) ** exponents


def _factor(config: RopeConfig) -> float:
    """The explicit scaling factor, else what the two lengths imply."""
    factor = config.parameters.get("factor")
    if factor is None:
        return config.max_position_embeddings / config.parameters["original_max_position_embeddings"]
    return factor


def _yarn(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Fast dims keep their frequency, slow ones are divided by the factor, with a ramp between."""
    p, dim = config.parameters, config.dim

    def dim_of(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original length."""
        length = p["original_max_position_embeddings"]
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dim_of(p.get("beta_fast") or 32), dim_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / _factor(config) * slow + inv_freq * (1 - slow)


def _yarn_attention_factor(config: RopeConfig) -> float:
    p, factor = config.parameters, _factor(config)
    if p.get("attention_factor") is not None:
        return p["attention_factor"]

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)


def _longrope(config: RopeConfig, max_model_len: int, exponents: torch.Tensor) -> tuple[torch.Tensor, float]:
    p = config.parameters
    original, factor = p["original_max_position_embeddings"], _factor(config)
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    stretch = torch.tensor(p["long_factor"] if max_model_len > original else p["short_factor"])
    return 1.0 / (stretch.float() * config.theta**exponents), attention_factor


def _llama3(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, with a ramp between."""
    p = config.parameters
    length, low, high = p["original_max_position_embeddings"], p["low_freq_factor"], p["high_freq_factor"]
    rotations = length * inv_freq / (2 * math.pi)
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / p["factor"] + keep * inv_freq


class RotaryEmbedding:
    """Rotates queries and keys in place, from a float32 table of `max_model_len` positions.

    `interleaved` configs pair neighbours and leave them in place (transformers moves them to halves:
    scores are equal, because queries and keys agree).
    """

    def __init__(
        self, config: RopeConfig, max_model_len: int, workspace: Workspace, device: str = "cpu"
    ) -> None:
        self._workspace = workspace
        self.interleaved = config.interleaved
        self.dim = config.dim
        inv_freq, scale = rope_frequencies(config, max_model_len)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # [max_model_len, dim]: (cos, sin) pairs when interleaved, else cos | sin.
        join = (
            torch.stack((cos, sin), dim=-1).flatten(1)
            if config.interleaved
            else torch.cat((cos, sin), dim=-1)
        )
        self._table = join.to(device)

    @property
    def max_model_len(self) -> int:
        return self._table.shape[0]

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """What `rotate_` needs for `positions` [n]: float32 [n, dim], valid until the next call."""
        out = self._workspace.get("rope.rows", (positions.shape[0], self.dim), torch.float32)
        return torch.index_select(self._table, 0, positions, out=out)

    def rotate_(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Rotate x [n, heads, dim] in place; x may be a strided view."""
        self.rotate(x, rows, out=x)

    def rotate(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The same into `out`, which may be x."""
        if fused.can_fuse(x):
            fused.rotate(x, rows, out, self.interleaved)
            return
        if out is not x:
            x = out.copy_(x)
        for start in range(0, x.shape[0], TOKENS_PER_PASS):
            part = x[start : start + TOKENS_PER_PASS]
            angles = rows[start : start + TOKENS_PER_PASS, None]
            if part.dtype == torch.float32:
                self._rotate_float32_(part, angles)
            else:
                work = self._workspace.get("rope.float32", part.shape, torch.float32).copy_(part)
                self._rotate_float32_(work, angles)
                part.copy_(work)

    def _rotate_float32_(self, x: torch.Tensor, angles: torch.Tensor) -> None:
        """x [n, heads, dim], angles [n, 1, dim]."""
        if self.interleaved:
            pairs, cos_sin = x.unflatten(-1, (-1, 2)), angles.unflatten(-1, (-1, 2))
            if _is_complex(x):
                # One pass without a temporary, and 8 times faster than steps of two.
                torch.view_as_complex(pairs).mul_(torch.view_as_complex(cos_sin))
                return
            (first, second), (cos, sin) = pairs.unbind(-1), cos_sin.unbind(-1)
        else:
            first, second = x.chunk(2, dim=-1)
            cos, sin = angles.chunk(2, dim=-1)
        turned = self._workspace.get("rope.turned", first.shape, torch.float32)
        torch.mul(first, sin, out=turned)
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(turned)


def _is_complex(x: torch.Tensor) -> bool:
    """Whether pairs of neighbours can be seen as complex numbers where they are."""
    return x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
