"""Weights and floating-point operations of a prefill, counted from the model's dimensions. No torch.

The count is of what the mathematics needs, not of what an implementation does: work that is
repeated (an up-projection of the same context in several chunks, a padded row) does not count, so
"achieved FLOP/s" made from it cannot be raised by wasting work.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefold.causal import causal_pairs, limited_pairs
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
    values with the latent up-projected, where the token at position p sees p + 1 keys, or a window. Softmax,
    norms, activations and rotations are left out: they are no matrix multiplications.

    Under sparse attention that holds for the first index_topk tokens. A later one attends to index_topk keys
    of its own, in absorbed form: 2 * layers * heads * (2 * kv_lora_rank + qk_rope_head_dim) per pair, which
    serves all heads with one row, where up-projected keys would be read per head, for each query anew. Or it
    attends to all keys before it, as without sparse attention, and those that it has not selected are masked:
    whichever needs fewer multiplications. Layers with an indexer score all keys: 2 * index_n_heads *
    (index_head_dim + 1) per causal pair.
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
    per_token = weights.whole + weights.split + weights.kv
    per_token += model.moe.top_k * weights.expert if model.moe else 0
    end = num_computed + num_tokens
    if model.dsa is not None:
        multiplications = _sparse_multiplications(model, layer, num_computed, end)
    else:
        limit = model.gqa.windows[layer] if model.gqa is not None else None
        pairs = limited_pairs(num_computed, end, limit)
        per_pair = model.attention.qk_head_dim + model.attention.v_head_dim
        multiplications = pairs * model.num_heads * per_pair
    return PrefillFlops(matmul=2 * num_tokens * per_token, attention=2 * multiplications)


def _sparse_multiplications(model: ModelConfig, layer: int, start: int, end: int) -> int:
    """Of sparse attention of the tokens [start, end), the indexer's included."""
    attention, dsa = model.attention, model.dsa
    assert dsa is not None
    per_pair = attention.qk_head_dim + attention.v_head_dim
    of_selected = dsa.index_topk * sum(attention.absorbed_dims)
    masked = max(dsa.index_topk, of_selected // per_pair)  # the first tokens: those that attend to all keys
    pairs = causal_pairs(min(start, masked), min(end, masked))
    others = max(end, masked) - max(start, masked)
    multiplications = model.num_heads * (pairs * per_pair + others * of_selected)
    if dsa.full_layers[layer]:
        multiplications += causal_pairs(start, end) * dsa.num_heads * (dsa.head_dim + 1)
    return multiplications


@dataclass(frozen=True)
class LayerParameters:
    """Weights of one layer's matrices, by how they are spread over ranks.

    Attributes:
        whole: on every rank: projections to the latents, the router, the indexer.
        split: 1/TP on a rank: projections to and from heads, dense MLP, shared experts.
        kv: projections to the KV heads of grouped-query attention, split as far as there are heads.
        expert: of one routed expert; 0 in a dense layer.
    """

    whole: int
    split: int
    kv: int
    expert: int


def layer_parameters(model: ModelConfig, layer: int) -> LayerParameters:
    """Norms and biases are left out."""
    whole, split, kv = _attention_parameters(model)
    whole += _indexer_parameters(model, layer)
    hidden = model.hidden_size
    if not model.moe_layers[layer]:
        return LayerParameters(whole, split + 3 * hidden * model.intermediate_size, kv, expert=0)
    moe = model.moe
    assert moe is not None
    expert = 3 * hidden * moe.intermediate_size  # gate, up, down
    shared = moe.num_shared_experts * expert
    return LayerParameters(whole + hidden * moe.num_experts, split + shared, kv, expert)


def _indexer_parameters(model: ModelConfig, layer: int) -> int:
    mla, dsa = model.mla, model.dsa
    if mla is None or dsa is None or not dsa.full_layers[layer]:
        return 0
    assert mla.q_lora_rank is not None
    queries = mla.q_lora_rank * dsa.num_heads * dsa.head_dim
    return queries + model.hidden_size * (dsa.head_dim + dsa.num_heads)


def _attention_parameters(model: ModelConfig) -> tuple[int, int, int]:
    """whole, split and kv of LayerParameters."""
    hidden, heads = model.hidden_size, model.num_heads
    if model.gqa is not None:
        head_dim = model.gqa.head_dim
        return 0, 2 * hidden * heads * head_dim, 2 * hidden * model.gqa.num_kv_heads * head_dim
    mla = model.mla
    assert mla is not None
    whole = hidden * mla.token_dim
    split = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)  # kv_b
    split += heads * mla.v_head_dim * hidden  # o
    if mla.q_lora_rank is None:
        split += hidden * heads * mla.qk_head_dim
    else:
        whole += hidden * mla.q_lora_rank
        split += mla.q_lora_rank * heads * mla.qk_head_dim
    return whole, split, 0
