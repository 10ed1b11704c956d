"""What a model needs of attention, and what attention needs of a kernel."""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionContext(Protocol):
    """Handed to a model's forward; knows the batch, the cache and the ranks. The model does not."""

    def attend(self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, w_kv_b: torch.Tensor) -> torch.Tensor:
        """Causal MLA attention of the step's tokens over their requests' histories.

        Args:
            layer_idx: layer on this rank, from 0.
            q: [num_tokens, num_heads, qk_nope + qk_rope], rotary embedding applied.
            kv: [num_tokens, kv_lora_rank + qk_rope], `kv_c | k_pe`, normalised and rotated.
            w_kv_b: [num_heads * (qk_nope + v), kv_lora_rank], rows of a head: nope, then v.

        Returns:
            [num_tokens, num_heads * v_head_dim]; valid until the next call.
        """
        ...


class AttentionBackend(Protocol):
    """A kernel for rectangles (every query sees every key) and squares on the causal diagonal."""

    def attend_(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        causal: bool,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merge softmax(scale * q k^T) v into the running state `(out, lse)`.

        Args:
            q: [num_queries, num_heads, qk_dim] float32.
            k: [num_keys, num_kv_heads, qk_dim] float32; num_kv_heads divides num_heads.
            v: [num_keys, num_kv_heads, >= v_dim] float32; elements beyond v_dim are ignored, so
                that the latent can be key and value at once.
            scale: factor on the scores.
            causal: query i sees keys 0..i; num_queries must equal num_keys.
            out: [num_queries, num_heads, v_dim] float32, changed.
            lse: [num_queries, num_heads] float32, changed.

        Either num_queries or num_keys may be 0: nothing changes then.
        """
        ...
