"""A dense oracle for attention: no paging, no parallelism, no blocks."""

from __future__ import annotations

import torch

from prefold.attention.backend import HeadRows, LatentRows
from prefold.config import ModelConfig


def visible(
    num_tokens: int,
    num_keys: int,
    causal: bool = False,
    unseen: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, keys] bool: what an AttentionBackend's `attend_` lets tokens see of keys.

    Args:
        chosen: [tokens, keys] bool, what the bits of its `selected` say.
    """
    seen = torch.ones(num_tokens, num_keys, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if unseen is not None:
        seen &= torch.arange(num_keys) >= unseen[:, None]
    if chosen is not None:
        seen &= chosen
    return seen


class DenseContext:
    """`ctx` of a model's forward for one sequence, with whole score matrices.

    Keeps the cache's rows of every layer, so that a sequence may come in several forwards, the first
    from position 0. Works for any share of the heads.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        self._scale = model.softmax_scale
        self._dtype = dtype
        self.kv: dict[int, torch.Tensor] = {}
        """Per layer [tokens so far, width of a row]."""

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        num_tokens, num_heads, _ = q.shape
        past = self.kv.get(layer_idx)
        whole = kv.clone() if past is None else torch.cat((past, kv))
        self.kv[layer_idx] = whole
        k, v = self._keys_values(whole.to(self._dtype), rows, num_heads)
        scores = torch.einsum("thd,hsd->hts", q.to(self._dtype), k) * self._scale
        seq_len = whole.shape[0]
        key_positions = torch.arange(seq_len, device=q.device)
        query_positions = key_positions[seq_len - num_tokens :]
        scores.masked_fill_(key_positions > query_positions[:, None], float("-inf"))
        if isinstance(rows, HeadRows) and rows.window is not None:
            scores.masked_fill_(key_positions <= query_positions[:, None] - rows.window, float("-inf"))
        out = torch.einsum("hts,hsd->thd", scores.softmax(dim=-1), v)
        return out.reshape(num_tokens, num_heads * v.shape[-1]).to(q.dtype)

    def _keys_values(
        self, kv: torch.Tensor, rows: LatentRows | HeadRows, num_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, width] -> k, v [num_heads, n, dim]."""
        if isinstance(rows, HeadRows):
            heads = kv.view(len(kv), 2, rows.num_kv_heads, rows.head_dim)
            by_head = heads.repeat_interleave(num_heads // rows.num_kv_heads, dim=2)
            k, v = by_head.permute(1, 2, 0, 3)
            return k, v
        kv_c, k_pe = kv.split([rows.mla.kv_lora_rank, rows.mla.qk_rope_head_dim], dim=-1)
        k_nope = torch.einsum("sc,hdc->hsd", kv_c, rows.w_uk.to(self._dtype))
        v = torch.einsum("sc,hdc->hsd", kv_c, rows.w_uv.to(self._dtype))
        return torch.cat((k_nope, k_pe.expand(num_heads, -1, -1)), dim=-1), v
