"""Grouped-query attention: rows of the cache are the keys and values of this rank's KV heads.

There is one form. Queries travel as they are, also to ranks that have other query heads: those hold the
same KV head.
"""

from __future__ import annotations

import torch

from prefold.attention.backend import AttentionBackend, HeadRows
from prefold.kernels import fused
from prefold.kernels.rows import RowHeads


class HeadForm:
    """See attention.forms.KVForm."""

    def __init__(self, rows: HeadRows, backend: AttentionBackend) -> None:
        self.num_kv_heads = rows.num_kv_heads
        self.q_dim = self.out_dim = rows.head_dim
        self.row_heads = RowHeads(
            rows.num_kv_heads, rows.head_dim, rows.num_kv_heads * rows.head_dim, rows.head_dim
        )
        self._backend = backend

    def queries(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """As they are: [n, num_heads, head_dim]."""
        fused.convert(q, out)

    def results(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """As they are: [n, num_heads, head_dim]."""
        fused.convert(attended, out)

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 2 * num_kv_heads * head_dim] -> k, v [num_kv_heads, n, head_dim]."""
        shape = (self.num_kv_heads, len(rows), self.q_dim)
        keys, values = rows.view(len(rows), 2, self.num_kv_heads, self.q_dim).permute(1, 2, 0, 3)
        k = self._backend.keys(*shape)
        k[..., : self.q_dim].copy_(keys)
        return k, self._backend.values(*shape).copy_(values)
