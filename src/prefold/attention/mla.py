"""The two forms of Multi-head Latent Attention over a latent cache `kv_c | k_pe`.

Up-projected: each context tile becomes keys and values per head (MHA). A key costs an
up-projection, a query-key pair costs qk_head_dim + v_head_dim.
Absorbed: w_uk goes into the query and w_uv onto the result, and all heads share the latent as
their one key and value (MQA). A key costs nothing, a pair costs 2 * kv_lora_rank + rope.

Both are the same function (DeepSeek-V2, arXiv 2405.04434, section 2.1.3). Which is cheaper
depends on how many queries share a key: `forms.prefer_absorbed`.
"""

from __future__ import annotations

import torch

from prefold.attention.backend import AttentionBackend, LatentRows
from prefold.kernels import fused, native
from prefold.kernels.recording import again
from prefold.kernels.rows import RowHeads
from prefold.limits import WIDENED_ROWS
from prefold.workspace import Workspace

PROJECT_FROM = 64
"""Queries from which converting the weights to float32 pays, even if no others of the layer need that."""


class LayerProjections:
    """A layer's w_uk and w_uv in other dtypes, each converted once per step, however often it is needed.

    Args:
        rows: of the layer. The buffers are overwritten by the next layer's.
    """

    def __init__(self, rows: LatentRows, workspace: Workspace) -> None:
        self._stored = {"w_uk": rows.w_uk, "w_uv": rows.w_uv}
        self._workspace = workspace
        self._converted: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """`name`: "w_uk" or "w_uv"."""
        stored = self._stored[name]
        if stored.dtype == dtype:
            return stored
        key = (name, dtype)
        if key not in self._converted:
            self._converted[key] = self._workspace.get(f"mla.{name}", stored.shape, dtype).copy_(stored)
        return self._converted[key]


class AbsorbedForm:
    """See attention.forms.KVForm. Few queries and results change in the dtype of the weights, many in
    float32, head by head: each head's are columns of a matrix."""

    def __init__(
        self,
        rows: LatentRows,
        projections: LayerProjections,
        backend: AttentionBackend,
        workspace: Workspace,
    ) -> None:
        self._mla, self._w_uk, self._w_uv = rows.mla, rows.w_uk, rows.w_uv
        self._projections = projections
        self.num_kv_heads = 1
        self.q_dim, self.out_dim = rows.mla.absorbed_dims
        self.row_heads = RowHeads()
        self._backend = backend
        self._workspace = workspace

    def _widens(self, rows: torch.Tensor) -> bool:
        """Whether rows in bfloat16 are few enough to change in float32, as native code does it."""
        return native.serves_as_float32(rows, self._w_uk.dtype, WIDENED_ROWS)

    def queries(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Queries for the latent: [n, num_heads, qk_head_dim] -> out [n, num_heads, token_dim] float32."""
        mla = self._mla
        if self._widens(q):
            q = fused.convert(q, self._workspace.get("mla.wide_q", q.shape, torch.float32))
        q_nope, latent_q = q[..., : mla.qk_nope_head_dim], out[..., : mla.kv_lora_rank]
        if len(q) >= PROJECT_FROM and q.dtype == torch.float32:
            for head, weight in enumerate(self._projections.get("w_uk", torch.float32)):
                torch.mm(q_nope[:, head], weight, out=latent_q[:, head])
            out[..., mla.kv_lora_rank :].copy_(q[..., mla.qk_nope_head_dim :])
            return
        if native.can_multiply(q, self._w_uk, out):
            native.combine(q_nope.transpose(0, 1), self._w_uk, latent_q.transpose(0, 1))
        else:
            again(_multiply_heads, q_nope, self._w_uk, latent_q)
        for one, latent_one in zip(q[..., mla.qk_nope_head_dim :], out[..., mla.kv_lora_rank :]):
            fused.convert(one, latent_one)

    def results(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Attended latents to values: [n, num_heads, kv_lora_rank] -> out [n, num_heads, v]."""
        if len(attended) >= PROJECT_FROM and attended.dtype == out.dtype == torch.float32:
            for head, weight in enumerate(self._projections.get("w_uv", torch.float32)):
                torch.mm(attended[:, head], weight.t(), out=out[:, head])
            return
        if native.can_multiply(attended, self._w_uv, out):
            native.linear(attended.transpose(0, 1), self._w_uv, out.transpose(0, 1))
            return
        if attended.dtype == torch.float32 and self._widens(out):
            values = self._workspace.get("mla.wide_values", out.shape, torch.float32)
            native.linear(attended.transpose(0, 1), self._w_uv, values.transpose(0, 1))
            fused.convert(values, out)
            return
        again(_multiply_heads, attended, self._w_uv.transpose(1, 2), out)

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, token_dim] -> k, v for one KV head: the values are the head of the keys."""
        k = self._backend.keys(1, *rows.shape)
        k[0, :, : rows.shape[1]].copy_(rows)
        return k, k[..., : self._mla.kv_lora_rank]


def _multiply_heads(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [n, heads, k] times weight [heads, k, m] into out [n, heads, m], of any dtypes."""
    # With few rows converting those is cheaper than converting the weight.
    heads = torch.bmm(x.transpose(0, 1).to(weight.dtype), weight)
    out.copy_(heads.transpose(0, 1))


class UpProjectedForm:
    """See attention.forms.KVForm. Keys and values are projected, in the dtype given."""

    def __init__(
        self,
        rows: LatentRows,
        projections: LayerProjections,
        dtype: torch.dtype,
        backend: AttentionBackend,
        workspace: Workspace,
    ) -> None:
        self._mla, self._projections = rows.mla, projections
        self.num_kv_heads = rows.w_uk.shape[0]
        self.q_dim, self.out_dim = rows.mla.qk_head_dim, rows.mla.v_head_dim
        self.row_heads = None
        self.dtype = dtype
        self._backend = backend
        self._workspace = workspace

    def queries(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """As they are."""
        out.copy_(q)

    def results(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """As they are."""
        out.copy_(attended)

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, token_dim] -> k, v [num_heads, n, v] for every head."""
        shape = (rows.shape[0], self.projected_width)
        projected = self._workspace.get("mla.projected", shape, self.dtype)
        self.project(rows, projected)
        return self.heads_of(projected)

    @property
    def projected_width(self) -> int:
        """Elements of a projected row: all heads' keys without position, all heads' values, k_pe."""
        return self._mla.projected_dim(self.num_kv_heads)

    def project(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of the cache [n, token_dim] -> out [n, projected_width]."""
        kv_c, k_pe = rows.split([self._mla.kv_lora_rank, self._mla.qk_rope_head_dim], dim=1)
        if kv_c.dtype != self.dtype:
            kv_c = self._workspace.get("mla.kv_c", kv_c.shape, self.dtype).copy_(kv_c)
        k_nope, v, out_pe = self._parts(out)
        self._up_project(kv_c, "w_uk", k_nope)
        self._up_project(kv_c, "w_uv", v)
        out_pe.copy_(k_pe)

    def heads_of(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Projected rows [n, projected_width] -> k, v [num_heads, n, v] for every head."""
        mla, nope = self._mla, self._mla.qk_nope_head_dim
        k_nope, v, k_pe = self._parts(projected)
        k = self._backend.keys(self.num_kv_heads, len(projected), mla.qk_head_dim)
        k[..., :nope].copy_(self._by_head(k_nope, nope))
        k[..., nope : mla.qk_head_dim].copy_(k_pe)
        v = self._by_head(v, mla.v_head_dim)
        return k, self._backend.values(*v.shape).copy_(v)

    def _parts(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mla, num_heads = self._mla, self.num_kv_heads
        widths = [num_heads * mla.qk_nope_head_dim, num_heads * mla.v_head_dim, mla.qk_rope_head_dim]
        return projected.split(widths, dim=1)

    def _by_head(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """[n, num_heads * dim] -> [num_heads, n, dim]; dim may be 0."""
        return rows.unflatten(1, (self.num_kv_heads, dim)).transpose(0, 1)

    def _up_project(self, kv_c: torch.Tensor, weight_name: str, out: torch.Tensor) -> None:
        """[n, kv_lora_rank] by [num_heads, dim, kv_lora_rank] -> out [n, num_heads * dim]."""
        weight = self._projections.get(weight_name, self.dtype)
        torch.mm(kv_c, weight.view(-1, weight.shape[2]).t(), out=out)
