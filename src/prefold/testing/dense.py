"""A dense oracle for attention: no paging, no parallelism, no blocks."""

from __future__ import annotations

import torch

from prefold.config import MLAConfig, ModelConfig


class DenseContext:
    """`ctx` of a model's forward for one sequence, with whole score matrices.

    Keeps `kv_c | k_pe` of every layer, so that a sequence may come in several forwards, the first
    from position 0. Works for any share of the heads.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        self._mla: MLAConfig = model.mla
        self._scale = model.softmax_scale
        self._dtype = dtype
        self.kv: dict[int, torch.Tensor] = {}
        """Per layer [tokens so far, kv_lora_rank + rope]."""

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        mla, (num_tokens, num_heads, _) = self._mla, q.shape
        past = self.kv.get(layer_idx)
        whole = kv.clone() if past is None else torch.cat((past, kv))
        self.kv[layer_idx] = whole
        kv_c, k_pe = whole.to(self._dtype).split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        k_nope = torch.einsum("sc,hdc->hsd", kv_c, w_uk.to(self._dtype))
        v = torch.einsum("sc,hdc->hsd", kv_c, w_uv.to(self._dtype))
        k = torch.cat((k_nope, k_pe.expand(num_heads, -1, -1)), dim=-1)
        scores = torch.einsum("thd,hsd->hts", q.to(self._dtype), k) * self._scale
        seq_len = whole.shape[0]
        key_positions = torch.arange(seq_len, device=q.device)
        query_positions = key_positions[seq_len - num_tokens :]
        scores.masked_fill_(key_positions > query_positions[:, None], float("-inf"))
        out = torch.einsum("hts,hsd->thd", scores.softmax(dim=-1), v)
        return out.reshape(num_tokens, num_heads * mla.v_head_dim).to(q.dtype)
