"""The two forms of Multi-head Latent Attention over a latent cache `kv_c | k_pe`.

Up-projected: each context tile becomes keys and values per head (MHA). A key costs an
up-projection, a query-key pair costs qk_head_dim + v_head_dim.
Absorbed: w_uk goes into the query and w_uv onto the result, and all heads share the latent as
their one key and value (MQA). A key costs nothing, a pair costs 2 * kv_lora_rank + rope.

Both are the same function (DeepSeek-V2, arXiv 2405.04434, section 2.1.3). Which is cheaper
depends on how many queries share a key: `prefer_absorbed`.
"""

from __future__ import annotations

import torch

from prefold.config import MLAConfig
from prefold.workspace import Workspace


def prefer_absorbed(mla: MLAConfig, num_queries: int, num_keys: int) -> bool:
    """Whether the absorbed form needs fewer multiplications for one request and step.

    Counts, per head: up-projecting every key against absorbing every query, plus the pairs.

    >>> mla = MLAConfig(None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    >>> prefer_absorbed(mla, 1, 4096), prefer_absorbed(mla, 4096, 4096)
    (True, False)
    """
    per_projection = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    pairs = num_queries * num_keys
    up_projected = num_keys * per_projection + pairs * (mla.qk_head_dim + mla.v_head_dim)
    absorbed = num_queries * per_projection + pairs * (mla.token_dim + mla.kv_lora_rank)
    return absorbed < up_projected


class KVProjection:
    """kv_b_proj of one layer in both forms.

    Args:
        mla: dimensions.
        w_kv_b: [num_heads * (nope + v), kv_lora_rank] in the weights' dtype; rows of a head: nope, then v.
        dtype: compute dtype of the up-projection.
    """

    def __init__(
        self, mla: MLAConfig, w_kv_b: torch.Tensor, dtype: torch.dtype, workspace: Workspace
    ) -> None:
        self.mla = mla
        self._num_heads = w_kv_b.shape[0] // (mla.qk_nope_head_dim + mla.v_head_dim)
        self._workspace = workspace
        self._weight = w_kv_b
        self._dtype = dtype
        self._converted: torch.Tensor | None = None
        per_head = w_kv_b.view(self._num_heads, -1, mla.kv_lora_rank)
        self._w_uk = per_head[:, : mla.qk_nope_head_dim]  # [num_heads, nope, kv_lora_rank]
        self._w_uv = per_head[:, mla.qk_nope_head_dim :]  # [num_heads, v, kv_lora_rank]

    def absorb(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Queries for the latent: [n, num_heads, qk_head_dim] -> out [n, num_heads, token_dim] float32."""
        mla = self.mla
        # Few queries: converting them is cheaper than converting the weight.
        q_nope = q[..., : mla.qk_nope_head_dim].transpose(0, 1).to(self._weight.dtype)
        out[..., : mla.kv_lora_rank].copy_(torch.bmm(q_nope, self._w_uk).transpose(0, 1))
        out[..., mla.kv_lora_rank :].copy_(q[..., mla.qk_nope_head_dim :])

    def unabsorb(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Attended latents to values: [n, num_heads, kv_lora_rank] -> out [n, num_heads * v]."""
        latent = attended.transpose(0, 1).to(self._weight.dtype)
        values = torch.bmm(latent, self._w_uv.transpose(1, 2))
        out.view(-1, self._num_heads, self.mla.v_head_dim).copy_(values.transpose(0, 1))

    def latent_keys_values(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, token_dim] -> k and v, both [n, 1, token_dim] float32: the values are the latent's head."""
        if latent.dtype != torch.float32:
            latent = self._workspace.get("mla.latent", latent.shape, torch.float32).copy_(latent)
        k = latent.unsqueeze(1)
        return k, k

    def head_keys_values(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, token_dim] -> k [n, num_heads, qk_head_dim], v [n, num_heads, v], both float32."""
        mla, nope = self.mla, self.mla.qk_nope_head_dim
        kv = self._up_project(latent[:, : mla.kv_lora_rank])
        k = self._workspace.get("mla.k", (*kv.shape[:2], mla.qk_head_dim), torch.float32)
        k[..., :nope].copy_(kv[..., :nope])
        k[..., nope:].copy_(latent[:, None, mla.kv_lora_rank :])
        v = kv[..., nope:]
        if v.dtype != torch.float32:
            v = self._workspace.get("mla.v", v.shape, torch.float32).copy_(v)
        return k, v

    def _up_project(self, kv_c: torch.Tensor) -> torch.Tensor:
        """[n, kv_lora_rank] -> [n, num_heads, nope + v] in compute dtype."""
        if self._converted is None:
            # Once per layer and step, however many tiles follow.
            self._converted = self._weight
            if self._weight.dtype != self._dtype:
                self._converted = self._workspace.get("mla.w_kv_b", self._weight.shape, self._dtype)
                self._converted.copy_(self._weight)
        if kv_c.dtype != self._dtype:
            kv_c = self._workspace.get("mla.kv_c", kv_c.shape, self._dtype).copy_(kv_c)
        out = self._workspace.get("mla.kv_b", (kv_c.shape[0], self._weight.shape[0]), self._dtype)
        torch.mm(kv_c, self._converted.t(), out=out)
        return out.view(-1, self._num_heads, self.mla.qk_nope_head_dim + self.mla.v_head_dim)
