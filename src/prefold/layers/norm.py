"""RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from prefold.kernels import fused
from prefold.layers.layer import Layer
from prefold.layers.linear import Env
from prefold.layers.weight import Weight, parameter, whole

ROWS_PER_PASS = 256
"""Rows normalised at a time, so that the passes over them find them in the cache."""


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 whatever the input's dtype."""

    def __init__(self, size: int, eps: float, env: Env) -> None:
        super().__init__()
        self.eps, self.env = eps, env
        self.weight = parameter(size, dtype=env.compute_dtype, device=env.device)

    def forward(
        self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norm of x [n, size] or [n, heads, size] into `out`, which may be x.

        With `residual` [n, size]: residual += x first, and the norm is of that sum.
        """
        if fused.can_fuse(x):
            fused.rms_norm(x, self.weight, self.eps, out, residual)
            return out
        for start in range(0, x.shape[0], ROWS_PER_PASS):
            rows = slice(start, start + ROWS_PER_PASS)
            source = x[rows] if residual is None else residual[rows].add_(x[rows])
            self._normalise(source, out[rows])
        return out

    def _normalise(self, x: torch.Tensor, out: torch.Tensor) -> None:
        work = x
        if x.dtype != torch.float32:
            work = self.env.workspace.get("norm.float32", x.shape, torch.float32).copy_(x)
        norm = torch.linalg.vector_norm(work, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        # Rounded to the compute dtype before the weight, as in transformers.
        if work is x:
            torch.mul(x, scale, out=out)
        else:
            out.copy_(work.mul_(scale))
        out.mul_(self.weight)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield whole(f"{prefix}.weight", self.weight)
