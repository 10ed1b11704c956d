"""Grouped-query attention: Llama, Mistral, Qwen2, Qwen3, Qwen3Moe, SmolLM2 and SmolLM3.

They differ in configuration only: biases, a norm on queries and keys, layers without rotary embedding, layers
with a sliding window. `ModelConfig` says all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from prefold.attention.backend import AttentionContext, HeadRows
from prefold.config import GQAConfig, ModelConfig
from prefold.layers.layer import Layer
from prefold.layers.linear import DELTA, ColumnParallelLinear, Env, RowParallelLinear
from prefold.layers.norm import RMSNorm
from prefold.layers.rotary import RotaryEmbedding
from prefold.layers.weight import Weight


class GQAttention(Layer):
    """Grouped-query attention up to and after `ctx.attend`. Splits heads over TP.

    With more TP ranks than KV heads, neighbours hold the same KV head.

    Args:
        layer: number in the checkpoint: layers differ in windows and rotary embedding.
        layer_idx: what `ctx.attend` is told: the layer's place on this rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        gqa: GQAConfig,
        layer: int,
        layer_idx: int,
        rotary: RotaryEmbedding,
        env: Env,
    ) -> None:
        super().__init__()
        self.layer_idx, self.env = layer_idx, env
        self.rotary = rotary if gqa.rope_layers[layer] else None
        self.num_heads = config.num_heads // env.tp.size
        self.num_kv_heads = gqa.kv_heads_per_rank(env.tp.size)
        self.head_dim = gqa.head_dim
        self.rows = HeadRows(self.num_kv_heads, gqa.head_dim, gqa.windows[layer])
        q_size, kv_size = config.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
        kv_shares = gqa.num_kv_heads // self.num_kv_heads
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size,
            [q_size, kv_size, kv_size],
            config.attention_bias,
            "attn.qkv",
            env,
            shares=[env.tp.size, kv_shares, kv_shares],
        )
        self.q_norm = RMSNorm(gqa.head_dim, config.qk_norm_eps, env) if gqa.qk_norm else None
        self.k_norm = RMSNorm(gqa.head_dim, config.qk_norm_eps, env) if gqa.qk_norm else None
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, gqa.output_bias, DELTA, env)

    def forward(self, x: torch.Tensor, rope_rows: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """x [T, hidden], normed -> [T, hidden]."""
        qkv = self.qkv_proj(x)
        heads = qkv.view(len(x), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q, k = heads[:, : self.num_heads], heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm(q, out=q)
            self.k_norm(k, out=k)
        if self.rotary is not None:
            self.rotary.rotate_(heads[:, : self.num_heads + self.num_kv_heads], rope_rows)
        kv = qkv[:, self.num_heads * self.head_dim :]  # keys | values
        return self.o_proj(ctx.attend(self.layer_idx, q, kv, self.rows))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.qkv_proj.weights(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weights(f"{prefix}.q_norm")
            yield from self.k_norm.weights(f"{prefix}.k_norm")
        yield from self.o_proj.weights(f"{prefix}.o_proj")
