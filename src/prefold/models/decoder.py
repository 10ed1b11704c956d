"""A decoder of transformer layers: embedding, layers of attention and MLP or experts, norm, head.

What the families have in common; they differ in their attention (`models.deepseek`, `models.llama`). A
layer hands its queries and its new KV to `ctx.attend`, which knows where the tokens are cached and which
rank holds them.

A pipeline stage is a model of some of the layers. What travels from one to the next is the residual
stream: the same numbers, bit for bit, from which the next layer of a whole model goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from prefold.attention.backend import AttentionContext
from prefold.config import ModelConfig, RuntimeConfig
from prefold.layers.embedding import VocabParallel
from prefold.layers.layer import Layer
from prefold.layers.linear import DELTA, Env, GatedMLP, scale_
from prefold.layers.moe import MoE
from prefold.layers.norm import RMSNorm
from prefold.layers.rotary import RotaryEmbedding
from prefold.layers.weight import Weight
from prefold.models.deepseek import MLAttention
from prefold.models.llama import GQAttention

if TYPE_CHECKING:
    from prefold.distributed.group import Group
    from prefold.layers.expert_parallel import ExpertParallel
    from prefold.workspace import Workspace


EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
RunLayers = Callable[[Callable[[], torch.Tensor], torch.Tensor], torch.Tensor]
"""Runs the function given or does what that would do, and returns what it returns."""
LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.")


def build_attention(
    config: ModelConfig, layer: int, layer_idx: int, rotary: RotaryEmbedding, env: Env
) -> MLAttention | GQAttention:
    """A layer's attention. `layer`: number in the checkpoint. `layer_idx`: place on this rank, which is
    what `ctx.attend` is told."""
    if config.gqa is not None:
        return GQAttention(config, config.gqa, layer, layer_idx, rotary, env)
    return MLAttention(config, layer, layer_idx, rotary, env)


class DecoderLayer(Layer):
    """Attention and MLP (dense or experts), each behind a norm and added to the residual stream.

    Args:
        layer: number in the checkpoint.
        layer_idx: place on this rank.
    """

    def __init__(
        self, config: ModelConfig, layer: int, layer_idx: int, rotary: RotaryEmbedding, env: Env
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps, env)
        self.attention = build_attention(config, layer, layer_idx, rotary, env)
        self.post_attention_norm = RMSNorm(hidden, eps, env)
        if config.moe_layers[layer]:
            assert config.moe is not None
            self.mlp = MoE(hidden, config.moe, config.mlp_bias, DELTA, env)
        else:
            self.mlp = GatedMLP(hidden, config.intermediate_size, config.mlp_bias, DELTA, env)

    def weights(self, prefix: str, names: Container[str]) -> Iterator[Weight]:
        yield from self.input_norm.weights(f"{prefix}.input_layernorm")
        yield from self.attention.weights(f"{prefix}.self_attn")
        yield from self.post_attention_norm.weights(f"{prefix}.post_attention_layernorm")
        if isinstance(self.mlp, MoE):
            yield from self.mlp.weights(f"{prefix}.mlp", names)
        else:
            yield from self.mlp.weights(f"{prefix}.mlp")


class Decoder(Layer):
    """The decoder of one rank, or the layers that its pipeline stage computes.

    The stage with layer 0 has the embedding, the one with the last layer the final norm and the head.
    Parameters are uninitialised until `loader.load_weights`.

    Args:
        layers: consecutive layers of this stage, by their numbers in the checkpoint.
        experts: who holds which experts; None: every TP rank has a part of each.

    Attributes:
        layer_begins: called with a layer's place on this rank before it is computed, for whoever measures.
        run_layers: called with what computes the layers, and the residual stream that it works on.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp_group: Group,
        workspace: Workspace,
        runtime: RuntimeConfig,
        max_model_len: int,
        layers: range,
        experts: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        assert 0 <= layers.start < layers.stop <= config.num_layers, (layers, config.num_layers)
        assert layers.step == 1, layers
        self.config, self.workspace = config, workspace
        self.compute_dtype = getattr(torch, runtime.compute_dtype)
        dtype = getattr(torch, config.dtype)
        env = Env(tp_group, workspace, dtype, self.compute_dtype, runtime.device, experts)
        self.rotary = RotaryEmbedding(config.rope, max_model_len, workspace, runtime.device)
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        tied = config.tie_word_embeddings

        def vocab_parallel() -> VocabParallel:
            return VocabParallel(config.vocab_size, config.hidden_size, env)

        self.embedding = vocab_parallel() if is_first else None
        # Keyed by the layers' own numbers, so that a parameter has one name on every layout.
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(config, layer, i, self.rotary, env) for i, layer in enumerate(layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, env) if is_last else None
        self.head = None
        if is_last:
            self.head = self.embedding if tied and is_first else vocab_parallel()
        self.layer_begins: Callable[[int], object] = lambda layer_idx: None
        self.run_layers: RunLayers = lambda layers, residual: layers()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, positions [T] int64 -> hidden states [T, hidden], of the compute dtype.

        T may be 0. All TP ranks must call this with equal arguments.

        Args:
            hidden: what the previous stage returned, [T, hidden]; overwritten. Stages with layer 0
                need none: they embed `input_ids`.

        Returns:
            The last stage: after the final norm. Others: the residual stream. Both are buffers,
            valid until the next forward.
        """
        shape = (input_ids.shape[0], self.config.hidden_size)
        normed = self.workspace.get("model.normed", shape, self.compute_dtype)
        rope_rows = self.rotary.rows(positions)
        if self.embedding is not None:
            assert hidden is None
            residual = self.workspace.get("model.residual", shape, self.compute_dtype)
            self.embedding.embed(input_ids, out=residual)
            scale_(residual, self.config.embedding_scale)
        else:
            assert hidden is not None, "a later stage computes on what the previous one returned"
            assert hidden.shape == shape, (hidden.shape, shape)
            residual = hidden
        delta = self.run_layers(partial(self._layers, residual, normed, rope_rows, ctx), residual)
        if self.norm is None:
            return residual.add_(delta)
        return scale_(_add_norm(self.norm, residual, delta, normed), self.config.logits_scale)

    def _layers(
        self, residual: torch.Tensor, normed: torch.Tensor, rope_rows: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor:
        """All layers on the residual stream, without what the last one adds: that is returned."""
        delta = None
        for layer_idx, layer in enumerate(self.layers.values()):
            assert isinstance(layer, DecoderLayer)
            self.layer_begins(layer_idx)
            x = _add_norm(layer.input_norm, residual, delta, normed)
            delta = scale_(layer.attention(x, rope_rows, ctx), self.config.residual_scale)
            x = _add_norm(layer.post_attention_norm, residual, delta, normed)
            delta = scale_(layer.mlp(x), self.config.residual_scale)
        assert delta is not None
        return delta

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n, vocab_size] float32 on all TP ranks of the last stage, which must
        all call this."""
        assert self.head is not None, "only the last stage has a head"
        return self.head.logits(hidden)

    def weights(self, names: Container[str]) -> Iterator[Weight]:
        """Every checkpoint tensor this rank needs; `names` are those the checkpoint has."""
        if self.embedding is not None:
            yield from self.embedding.weights(EMBEDDING)
        for number, layer in self.layers.items():
            assert isinstance(layer, DecoderLayer)
            yield from layer.weights(f"model.layers.{number}", names)
        if self.norm is not None:
            yield from self.norm.weights(NORM)
        if self.head is not None and self.head is not self.embedding:
            yield from self.head.weights(EMBEDDING if self.config.tie_word_embeddings else HEAD)

    def ignorable(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is knowingly left aside: nobody needs it, or another stage
        does. That stage insists on the tensors of its layers being complete and no more."""
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        if name in (f"{EMBEDDING}.weight", f"{NORM}.weight", f"{HEAD}.weight"):
            return True
        layer = LAYER_NAME.match(name)
        # The multi-token-prediction layers come after the last one.
        num_layers = self.config.num_layers + self.config.num_nextn_predict_layers
        return layer is not None and layer[1] not in self.layers and int(layer[1]) < num_layers


def _add_norm(
    norm: RMSNorm, residual: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """residual += delta, then its norm into `out`."""
    return norm(residual, out=out) if delta is None else norm(delta, out=out, residual=residual)
