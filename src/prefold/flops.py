"""Weights and floating-point operations of a prefill, counted from the model's dimensions. No torch.

The count is of what the mathematics needs, not of what an implementation does: work that is
repeated (an up-projection of the same context in several chunks, a padded row) does not count, so
"achieved FLOP/s" made from it cannot be raised by wasting work.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefold.config import ModelConfig


@dataclass(frozen=True)
class PrefillFlops:
    """FLOPs of one prompt's prefill; a multiply-add is two."""

    matmul: int
    attention: int

    @property
    def total(self) -> int:
        return self.matmul + self.attention


def prefill_flops(model: ModelConfig, num_tokens: int, num_computed: int = 0) -> PrefillFlops:
    """FLOPs to prefill tokens `[num_computed, num_computed + num_tokens)` of one prompt.

    matmul = 2 * num_tokens * (parameters of the matrices that a token meets) + 2 * hidden * vocab.
    A token meets all projections of attention, the dense MLP or the router, its top_k experts and
    the shared ones. The head is applied to the last token only.

    attention = 2 * layers * heads * (qk_head_dim + v_head_dim) * (causal pairs): scores and weighted
    values with the latent up-projected, where the token at position p sees p + 1 keys. Softmax,
    norms, activations and rotations are left out: they are no matrix multiplications.
    """
    layers = [layer_flops(model, i, num_tokens, num_computed) for i in range(model.num_layers)]
    head = 2 * model.hidden_size * model.vocab_size
    return PrefillFlops(
        matmul=sum(layer.matmul for layer in layers) + head,
        attention=sum(layer.attention for layer in layers),
    )


def layer_flops(model: ModelConfig, layer: int, num_tokens: int, num_computed: int = 0) -> PrefillFlops:
    """The same for one layer, without the head."""
    weights = layer_parameters(model, layer)
    per_token = weights.whole + weights.split + (model.moe.top_k * weights.expert if model.moe else 0)
    end = num_computed + num_tokens
    pairs = (end * (end + 1) - num_computed * (num_computed + 1)) // 2
    per_pair = model.num_heads * (model.mla.qk_head_dim + model.mla.v_head_dim)
    return PrefillFlops(matmul=2 * num_tokens * per_token, attention=2 * per_pair * pairs)


@dataclass(frozen=True)
class LayerParameters:
    """Weights of one layer's matrices, by how they are spread over ranks.

    Attributes:
        whole: on every rank: projections to the latents, the router.
        split: 1/TP on a rank: projections to and from heads, dense MLP, shared experts.
        expert: of one routed expert; 0 in a dense layer.
    """

    whole: int
    split: int
    expert: int


def layer_parameters(model: ModelConfig, layer: int) -> LayerParameters:
    """Norms and biases are left out."""
    mla, hidden, heads = model.mla, model.hidden_size, model.num_heads
    whole = hidden * mla.token_dim
    split = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)  # kv_b
    split += heads * mla.v_head_dim * hidden  # o
    if mla.q_lora_rank is None:
        split += hidden * heads * mla.qk_head_dim
    else:
        whole += hidden * mla.q_lora_rank
        split += mla.q_lora_rank * heads * mla.qk_head_dim
    if not model.moe_layers[layer]:
        return LayerParameters(whole, split + 3 * hidden * model.intermediate_size, expert=0)
    moe = model.moe
    assert moe is not None
    expert = 3 * hidden * moe.intermediate_size  # gate, up, down
    return LayerParameters(whole + hidden * moe.num_experts, split + moe.num_shared_experts * expert, expert)
