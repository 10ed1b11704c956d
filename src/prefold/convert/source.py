"""What a Llama-type decoder is, whichever file format it came in, and what we cannot convert."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True)
class LlamaSpec:
    """A decoder of Llama type: RMSNorm, rotary grouped-query attention, gated MLP.

    Attributes:
        wavelengths: [head_dim / 2] tokens per radian of each rotary pair, i.e. 1 / inv_freq.
        attention_factor: what the rope type multiplies cos and sin by (1 except for YaRN).
        qkv_bias: q_proj, k_proj and v_proj have a bias.
        o_bias: o_proj has a bias.
        token_ids: bos_token_id, eos_token_id and pad_token_id as the config spells them.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    wavelengths: tuple[float, ...]
    attention_factor: float
    hidden_act: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    token_ids: dict

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2 or len(self.wavelengths) != self.head_dim // 2:
            raise ValueError(
                f"head_dim {self.head_dim} needs head_dim / 2 rotary frequencies, got {len(self.wavelengths)}"
            )


class Source(Protocol):
    """A checkpoint to read from. Tensors go by their Hugging Face names whatever the format."""

    name: str
    """File or folder name, for messages and the conversion record."""
    spec: LlamaSpec

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype (dequantised to float32 if quantised); KeyError if missing."""
        ...

    def tensor_names(self) -> set[str]: ...

    def save_extras(self, folder: Path) -> None:
        """Write tokenizer, chat template and generation_config.json to `folder`."""
        ...


def expected_shapes(spec: LlamaSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec holds."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        attention = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        for name, rows in attention.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_rows)
        if spec.o_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return shapes


def check_names(source: Source, expected: dict[str, tuple[int, ...]]) -> None:
    """ValueError naming the first tensors that are missing or that the mapping knows nothing of."""
    present = source.tensor_names()
    missing = sorted(set(expected) - present)
    if missing:
        raise ValueError(f"{source.name}: {len(missing)} tensors are missing: {', '.join(missing[:4])}")
    # A tied checkpoint may still carry the head; old ones carry the rotary table, which follows from config.
    unknown = sorted(
        name
        for name in present - set(expected)
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise ValueError(
            f"{source.name} holds {len(unknown)} tensors that no Llama-type decoder has; leaving them out "
            f"would change the model: {', '.join(unknown[:4])}"
        )
