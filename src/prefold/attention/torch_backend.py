"""Attention through torch's own kernels."""

from __future__ import annotations

import torch

from prefold.attention.lse import merge_
from prefold.workspace import Workspace

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class TorchBackend:
    """torch's flash kernel on CPU, a blocked softmax elsewhere.

    The flash kernel returns its own LSE and takes strided inputs, but wants one head size for
    queries and values, aligns a causal mask top-left, and dies on zero keys: the narrower ones are
    padded, only squares are causal, empty inputs return early. Queries go in blocks, so that the result
    it allocates stays small enough for the allocator to recycle.
    """

    def __init__(self, workspace: Workspace, device: torch.device, query_block: int = 512) -> None:
        self._workspace = workspace
        self._query_block = query_block
        self._kernel = self._flash if device.type == "cpu" else self._blocked

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
        """See AttentionBackend.attend_."""
        num_queries, num_keys = q.shape[0], k.shape[0]
        assert not causal or num_queries == num_keys, (num_queries, num_keys)
        if num_queries == 0 or num_keys == 0:
            return
        if k.shape[1] == 1 and not causal:
            # One KV head: heads are further queries of one matrix multiplication.
            q, out, lse = q.view(-1, 1, q.shape[-1]), out.view(-1, 1, out.shape[-1]), lse.view(-1, 1)
            num_queries = q.shape[0]
        v_dim = out.shape[-1]
        head_dim = max(q.shape[-1], v_dim)
        q, k = self._padded("q", q, head_dim), self._padded("k", k, head_dim)
        v = self._padded("v", v[..., :head_dim], head_dim)
        for start in range(0, num_queries, self._query_block):
            rows = slice(start, min(start + self._query_block, num_queries))
            if causal and start > 0:
                # Below the diagonal square of this block lies a plain rectangle.
                part, part_lse = self._kernel(q[rows], k[:start], v[:start], scale, False)
                merge_(out[rows], lse[rows], part[..., :v_dim], part_lse)
            keys = rows if causal else slice(0, num_keys)
            part, part_lse = self._kernel(q[rows], k[keys], v[keys], scale, causal)
            merge_(out[rows], lse[rows], part[..., :v_dim], part_lse)

    def _padded(self, name: str, x: torch.Tensor, head_dim: int) -> torch.Tensor:
        """`x` with zeros behind each head's elements: they add nothing to a score or a value."""
        if x.shape[-1] == head_dim:
            return x
        padded = self._workspace.get(f"attention.{name}_padded", (*x.shape[:-1], head_dim), x.dtype)
        padded[..., : x.shape[-1]].copy_(x)
        padded[..., x.shape[-1] :].zero_()
        return padded

    @staticmethod
    def _flash(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _FLASH(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            0.0,
            causal,
            scale=scale,
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    @staticmethod
    def _blocked(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = q.shape[1] // k.shape[1]
        keys = k.transpose(0, 1).repeat_interleave(group, 0)
        values = v.transpose(0, 1).repeat_interleave(group, 0)
        scores = torch.matmul(q.transpose(0, 1) * scale, keys.transpose(1, 2))
        if causal:
            future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(1)
            scores.masked_fill_(future, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        out = torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), values)
        return out.transpose(0, 1), lse.transpose(0, 1)
