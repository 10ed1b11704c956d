"""The lightning indexer's projections: queries, per-head weights and one key per token (DeepSeek-V3.2).

What it makes of them, a score per query and key, is the business of attention: it knows the history.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from prefold.config import DSAConfig
from prefold.kernels.recording import again
from prefold.layers.layer import Layer
from prefold.layers.linear import Env, Linear
from prefold.layers.rotary import RotaryEmbedding
from prefold.layers.weight import Weight, parameter, whole

KEY_NORM_EPS = 1e-6
# transformers builds k_norm, a LayerNorm, without passing an epsilon of the config on.


class Indexer(Layer):
    """Whole on every TP rank: all of them select the same keys.

    A score is a sum over dims of query times key, so both may have their dims in any common order. Where
    the checkpoint rotates pairs (i, i + rope/2), they are made neighbours when weights are loaded, and one
    rotary embedding serves attention and indexer.

    Args:
        hidden_size, q_lora_rank: of the inputs.
        rotary: of attention, which pairs neighbours.
    """

    def __init__(
        self, hidden_size: int, q_lora_rank: int, dsa: DSAConfig, rotary: RotaryEmbedding, env: Env
    ) -> None:
        super().__init__()
        assert rotary.interleaved
        self.dsa, self.rotary, self.env = dsa, rotary, env
        self.q_proj = Linear(q_lora_rank, dsa.num_heads * dsa.head_dim, False, "indexer.q", env)
        self.k_proj = Linear(hidden_size, dsa.head_dim, False, "indexer.k", env)
        self.k_norm_weight = parameter(dsa.head_dim, dtype=torch.float32, device=env.device)
        self.k_norm_bias = parameter(dsa.head_dim, dtype=torch.float32, device=env.device)
        # In float32 whatever the model's dtype, as transformers keeps it.
        self.head_weights = parameter(dsa.num_heads, hidden_size, dtype=torch.float32, device=env.device)

    def forward(
        self, x: torch.Tensor, q_latent: torch.Tensor, rope_rows: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden], q_latent [T, q_lora_rank], both normed -> queries [T, index heads, index dim] in the
        compute dtype and weights [T, index heads] float32, with which the heads' scores are summed.

        Writes the tokens' keys to `key` [T, index dim], which may be strided.
        """
        return again(self._project, x, q_latent, rope_rows, key)

    def _project(
        self, x: torch.Tensor, q_latent: torch.Tensor, rope_rows: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dsa, rope, num_tokens = self.dsa, self.rotary.dim, x.shape[0]
        q = self.q_proj(q_latent).view(num_tokens, dsa.num_heads, dsa.head_dim)
        self.rotary.rotate_(q[..., :rope], rope_rows)
        projected = self.k_proj(x).float()
        shape = (dsa.head_dim,)
        key.copy_(F.layer_norm(projected, shape, self.k_norm_weight, self.k_norm_bias, KEY_NORM_EPS))
        self.rotary.rotate_(key[:, None, :rope], rope_rows)
        weights = self.env.workspace.get("indexer.weights", (num_tokens, dsa.num_heads), torch.float32)
        torch.mm(x.float(), self.head_weights.t(), out=weights)
        return q, weights.mul_((dsa.num_heads * dsa.head_dim) ** -0.5)

    def weights(self, prefix: str) -> Iterator[Weight]:
        heads, dim = self.dsa.num_heads, self.dsa.head_dim
        yield self._rotated(f"{prefix}.wq_b.weight", self.q_proj.weight.view(heads, dim, -1))
        yield self._rotated(f"{prefix}.wk.weight", self.k_proj.weight[None])
        yield self._rotated(f"{prefix}.k_norm.weight", self.k_norm_weight[None])
        yield self._rotated(f"{prefix}.k_norm.bias", self.k_norm_bias[None])
        yield whole(f"{prefix}.weights_proj.weight", self.head_weights)

    def _rotated(self, name: str, heads: torch.Tensor) -> Weight:
        """A tensor whose rows are, head by head, the dims that are rotated and the rest. heads
        [num_heads, index dim, ...]: where they go, with rotated pairs side by side."""
        num_heads, dim, *columns = heads.shape
        rope = self.rotary.dim
        # (first row of the checkpoint's head, where its rows go)
        targets = [(0, slice(0, dim))]
        if not self.dsa.rope_interleaved:
            pairs = rope // 2
            targets = [(0, slice(0, rope, 2)), (pairs, slice(1, rope, 2)), (rope, slice(rope, dim))]
        parts = []
        for head in range(num_heads):
            for first, rows in targets:
                target = heads[head, rows]
                start = head * dim + first
                slices = (slice(start, start + len(target)), *(slice(0, n) for n in columns))
                parts.append((slices, target))
        return Weight(name, (num_heads * dim, *columns), tuple(parts))
