"""Attention by the native kernel: on a CPU, where the library was built.

Queries, keys and values are in the dtype that the run computes in, and so, where the processor is good at
it, are their products; all sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.torch_backend import TorchBackend
from prefold.kernels import dense, library
from prefold.workspace import Workspace

ALIGNMENT = 64
"""Bytes that rows of keys are padded to a multiple of: a cache line."""


@dataclass(frozen=True, eq=False)
class NativeState:
    """A request's running softmax; rows and sums are those of `kernels.dense`.

    Attributes:
        q: [num_kv_heads, rows, qk_dim].
        out: [num_kv_heads, rows, v_dim].
        references, sums: [num_kv_heads, rows].
        rows_per_token: query heads per KV head.
        scale: of scores.
    """

    q: torch.Tensor
    out: torch.Tensor
    references: torch.Tensor
    sums: torch.Tensor
    rows_per_token: int
    scale: float

    @property
    def num_tokens(self) -> int:
        return self.q.shape[1] // self.rows_per_token

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_kv_heads, rows, ...] -> [num_tokens, num_kv_heads, rows_per_token, ...]."""
        return rows.unflatten(1, (self.num_tokens, self.rows_per_token)).transpose(0, 1)


class NativeBackend:
    """See AttentionBackend.

    Args:
        dtype: of queries, keys and values, float32 or bfloat16.
        instruction_set: one of `dense.instruction_sets()`; default: see `dense.attend_`.
    """

    def __init__(
        self, workspace: Workspace, dtype: torch.dtype = torch.float32, instruction_set: str | None = None
    ) -> None:
        self._workspace = workspace
        self._dtype = dtype
        self._instruction_set = instruction_set

    def start(self, queries: Sequence[Queries], scale: float, name: str = "attention") -> list[NativeState]:
        """See AttentionBackend.start."""
        rows = [(x.num_kv_heads, x.q.shape[0] * x.q.shape[1] // x.num_kv_heads) for x in queries]
        widths = [x.q.shape[2] for x in queries]
        all_q = self._workspace.carve(f"{name}.state.q", [(*s, w) for s, w in zip(rows, widths)], self._dtype)
        all_out = self._workspace.carve(f"{name}.state.out", [(*s, x.v_dim) for s, x in zip(rows, queries)])
        all_references = self._workspace.carve(f"{name}.state.references", rows)
        all_sums = self._workspace.carve(f"{name}.state.sums", rows)
        states = []
        for x, q, out, references, sums in zip(queries, all_q, all_out, all_references, all_sums):
            references.fill_(dense.UNSEEN_REFERENCE)
            group = x.q.shape[1] // x.num_kv_heads
            state = NativeState(q, out.zero_(), references, sums.zero_(), group, scale)
            state.by_token(q).copy_(x.q.unflatten(1, (x.num_kv_heads, group)))
            states.append(state)
        return states

    def keys(self, num_kv_heads: int, num_keys: int, qk_dim: int) -> torch.Tensor:
        """See AttentionBackend.keys."""
        aligned = ALIGNMENT // self._dtype.itemsize
        shape = (num_kv_heads, num_keys, -(-qk_dim // aligned) * aligned)
        return self._workspace.get("attention.keys", shape, self._dtype)[..., :qk_dim]

    def values(self, num_kv_heads: int, num_keys: int, v_dim: int) -> torch.Tensor:
        """See AttentionBackend.values."""
        return self._workspace.get("attention.values", (num_kv_heads, num_keys, v_dim), self._dtype)

    def attend_(
        self,
        state: NativeState,
        tokens: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        unseen: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
    ) -> None:
        """See AttentionBackend.attend_."""
        dense.attend_(
            state.q,
            k,
            v,
            state.out,
            state.references,
            state.sums,
            tokens,
            state.rows_per_token,
            state.scale,
            causal,
            unseen,
            self._instruction_set,
            selected,
        )

    def finish(self, state: NativeState, out: torch.Tensor) -> None:
        """See AttentionBackend.finish."""
        factor = torch.where(state.sums > 0, state.sums, 1.0).reciprocal_()
        result = state.by_token(state.out.mul_(factor.unsqueeze(-1)))
        out.unflatten(1, result.shape[1:3]).copy_(result)

    def lse(self, state: NativeState) -> torch.Tensor:
        """See AttentionBackend.lse."""
        lse = torch.log(state.sums).add_(state.references)
        return state.by_token(lse).flatten(1)


def attention_backend(workspace: Workspace, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend of a rank on this device that computes in `dtype`."""
    if device.type == "cpu" and library.is_available():
        return NativeBackend(workspace, dtype, dense.best(dtype))
    return TorchBackend(workspace, device)
