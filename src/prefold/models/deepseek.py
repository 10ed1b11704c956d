"""Multi-head Latent Attention: DeepSeek-V2, V3 (Kimi-K2, Moonlight), V3.2, GLM-4.7-Flash and GLM-5.

They differ in configuration only, and `ModelConfig` says all of it. Under sparse attention some layers have
an indexer, and hand over what it says too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from prefold.attention.backend import AttentionContext, IndexQueries, LatentRows
from prefold.config import ModelConfig
from prefold.layers.indexer import Indexer
from prefold.layers.layer import Layer
from prefold.layers.linear import DELTA, ColumnParallelLinear, Env, Linear, RowParallelLinear
from prefold.layers.norm import RMSNorm
from prefold.layers.rotary import RotaryEmbedding
from prefold.layers.weight import Weight, parameter


class MLAttention(Layer):
    """Latent attention up to and after `ctx.attend`. Splits heads over TP.

    Args:
        layer: number in the checkpoint.
        layer_idx: what `ctx.attend` is told: the layer's place on this rank.
    """

    def __init__(
        self, config: ModelConfig, layer: int, layer_idx: int, rotary: RotaryEmbedding, env: Env
    ) -> None:
        super().__init__()
        self.layer_idx, self.rotary, self.env = layer_idx, rotary, env
        assert config.mla is not None
        self.mla = mla = config.mla
        self.num_heads = config.num_heads // env.tp.size
        hidden, bias = config.hidden_size, config.attention_bias
        q_size = config.num_heads * mla.qk_head_dim
        # The two down-projections have the same input and no split: one matrix multiplication.
        self.q_lora_rank = mla.q_lora_rank or 0
        widths = [width for width in (self.q_lora_rank, mla.token_dim) if width]
        self.a_proj = Linear(hidden, sum(widths), bias, "attn.a", env, widths)
        if mla.q_lora_rank is not None:
            self.q_a_norm = RMSNorm(mla.q_lora_rank, config.qk_norm_eps, env)
            self.q_proj = ColumnParallelLinear(mla.q_lora_rank, [q_size], False, "attn.q", env)
        else:
            self.q_a_norm = None
            self.q_proj = ColumnParallelLinear(hidden, [q_size], False, "attn.q", env)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, config.qk_norm_eps, env)
        # kv_b_proj, its keys' rows and its values' rows apart: each is contiguous for either form.
        dtype, device = env.weight_dtype, env.device
        self.w_uk = parameter(
            self.num_heads, mla.qk_nope_head_dim, mla.kv_lora_rank, dtype=dtype, device=device
        )
        self.w_uv = parameter(self.num_heads, mla.v_head_dim, mla.kv_lora_rank, dtype=dtype, device=device)
        self.o_proj = RowParallelLinear(config.num_heads * mla.v_head_dim, hidden, bias, DELTA, env)
        self.new_dim = mla.new_dim(layer, env.tp.size)
        self.indexer = None
        if mla.dsa is not None and mla.dsa.full_layers[layer]:
            assert mla.q_lora_rank is not None
            self.indexer = Indexer(hidden, mla.q_lora_rank, mla.dsa, rotary, env)

    def forward(self, x: torch.Tensor, rope_rows: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """x [T, hidden], normed -> [T, hidden]."""
        mla, num_tokens = self.mla, x.shape[0]
        a = self.a_proj(x)
        q_a, new_kv = a[:, : self.q_lora_rank], a[:, self.q_lora_rank :]
        kv = self.env.workspace.get("attn.kv", (num_tokens, self.new_dim), x.dtype)
        self.kv_a_norm(new_kv[:, : mla.kv_lora_rank], out=kv[:, : mla.kv_lora_rank])
        k_pe = kv[:, None, mla.kv_lora_rank : mla.token_dim]
        self.rotary.rotate(new_kv[:, None, mla.kv_lora_rank :], rope_rows, out=k_pe)

        q = self.q_proj(x if self.q_a_norm is None else self.q_a_norm(q_a, out=q_a))
        q = q.view(num_tokens, self.num_heads, mla.qk_head_dim)
        self.rotary.rotate_(q[..., mla.qk_nope_head_dim :], rope_rows)
        index = None
        if self.indexer is not None:
            index = IndexQueries(*self.indexer(x, q_a, rope_rows, key=kv[:, mla.token_dim :]))
        rows = LatentRows(mla, self.w_uk, self.w_uv, index)
        return self.o_proj(ctx.attend(self.layer_idx, q, kv, rows))

    def weights(self, prefix: str) -> Iterator[Weight]:
        mla = self.mla
        a_parts = {f"{prefix}.kv_a_proj_with_mqa": mla.token_dim}
        if self.q_a_norm is not None:
            a_parts = {f"{prefix}.q_a_proj": self.q_lora_rank} | a_parts
            yield from self.q_a_norm.weights(f"{prefix}.q_a_layernorm")
            yield from self.q_proj.weights(f"{prefix}.q_b_proj")
        else:
            yield from self.q_proj.weights(f"{prefix}.q_proj")
        yield from self.a_proj.weights(a_parts)
        yield from self.kv_a_norm.weights(f"{prefix}.kv_a_layernorm")
        yield self._kv_b_weight(f"{prefix}.kv_b_proj.weight")
        yield from self.o_proj.weights(f"{prefix}.o_proj")
        if self.indexer is not None:
            yield from self.indexer.weights(f"{prefix}.indexer")

    def _kv_b_weight(self, name: str) -> Weight:
        """This rank's heads of kv_b_proj, whose rows are, head by head, keys and then values."""
        mla, tp = self.mla, self.env.tp
        height = mla.qk_nope_head_dim + mla.v_head_dim
        columns = slice(0, mla.kv_lora_rank)
        parts = []
        for head in range(self.num_heads):
            start = (tp.rank * self.num_heads + head) * height
            middle = start + mla.qk_nope_head_dim
            parts.append(((slice(start, middle), columns), self.w_uk[head]))
            parts.append(((slice(middle, start + height), columns), self.w_uv[head]))
        return Weight(name, (self.num_heads * tp.size * height, mla.kv_lora_rank), tuple(parts))
