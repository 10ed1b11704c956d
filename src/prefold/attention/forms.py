"""Forms of attention: what queries, rows of the cache and results become on their way through a kernel.

Latent attention has two forms, which compute the same and cost differently: with keys and values per head
(`plain`), or `absorbed`, with the layer's projections in the queries and one key for all heads. Grouped-query
attention has one. All else (plans, walks, what travels between ranks) is the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from prefold.attention.backend import AttentionBackend, HeadRows, LatentRows
from prefold.attention.gqa import HeadForm
from prefold.attention.mla import AbsorbedForm, LayerProjections, UpProjectedForm
from prefold.config import GQAConfig, MLAConfig
from prefold.kernels.rows import RowHeads
from prefold.workspace import Workspace

Count = TypeVar("Count", int, np.ndarray)

PREPARE_KEYS = 40
"""Up-projecting in a layer begins with converting its weights to the compute dtype, which takes as long as
up-projecting this many keys. Measured: 2 ms for 4.2 million bfloat16 weights on a core."""

PER_KEY_ELEMENT = 60
"""Reading an element of the paged cache, once for all heads of a rank, and making it a key in float32, in
multiplications. Measured: 0.7 us for a key of 576 elements, whatever attends to it."""


class KVForm(Protocol):
    """How queries of one layer meet rows of its cache.

    Attributes:
        num_kv_heads: heads of its keys and values.
        q_dim, out_dim: elements of a query's and a result's head.
        row_heads: where its keys and values are in a row of the cache, unless rows have to be projected.
    """

    num_kv_heads: int
    q_dim: int
    out_dim: int

    @property
    def row_heads(self) -> RowHeads | None: ...

    def queries(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """The model's queries [n, num_heads, qk_head_dim] -> out [n, num_heads, q_dim]."""
        ...

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the cache [n, width] -> k, v [num_kv_heads, n, ...] in the backend's buffers."""
        ...

    def results(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """What was attended [n, num_heads, out_dim] -> the model's out [n, num_heads, v_head_dim]."""
        ...


@dataclass(frozen=True, eq=False)
class KVForms:
    """The forms of one layer; the same object twice where there is one.

    Attributes:
        plain: takes queries as they are and gives results as they are.
        absorbed: its keys and values serve the heads of any rank that holds the same rows.
        window: a token sees so many tokens, itself included; None: all before it.
    """

    plain: KVForm
    absorbed: KVForm
    window: int | None = None

    @classmethod
    def of(
        cls,
        rows: LatentRows | HeadRows,
        dtype: torch.dtype,
        backend: AttentionBackend,
        workspace: Workspace,
    ) -> KVForms:
        """Forms of a layer with such rows. `dtype`: of projections."""
        if isinstance(rows, HeadRows):
            form = HeadForm(rows, backend)
            return cls(form, form, rows.window)
        projections = LayerProjections(rows, workspace)
        up_projected = UpProjectedForm(rows, projections, dtype, backend, workspace)
        return cls(up_projected, AbsorbedForm(rows, projections, backend, workspace))

    def choose(self, absorbed: bool) -> KVForm:
        return self.absorbed if absorbed else self.plain


def form_costs(attention: MLAConfig | GQAConfig, num_queries: Count, num_keys: Count) -> tuple[Count, Count]:
    """Multiplications per head of (the plain form, the absorbed form), numbers or arrays.

    Counts projecting every key (and preparing to) against absorbing every query, plus the pairs.
    """
    pairs = num_queries * num_keys
    per_pair = attention.qk_head_dim + attention.v_head_dim
    plain = (num_keys + PREPARE_KEYS) * attention.projection_size + pairs * per_pair
    absorbed = num_queries * attention.projection_size + pairs * sum(attention.absorbed_dims)
    return plain, absorbed


def prefer_absorbed(attention: MLAConfig | GQAConfig, num_queries: int, num_keys: int) -> bool:
    """Whether the absorbed form needs fewer multiplications for one request and step.

    >>> mla = MLAConfig(None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    >>> prefer_absorbed(mla, 1, 4096), prefer_absorbed(mla, 4096, 4096)
    (True, False)
    """
    plain, absorbed = form_costs(attention, num_queries, num_keys)
    return absorbed < plain
