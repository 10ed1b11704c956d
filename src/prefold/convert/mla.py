"""The mapping: one layer of grouped-query attention as one layer of Multi-head Latent Attention.

G KV heads of d elements, H query heads, R = G * d. Nothing is approximated; every weight of the source
appears in the result as it is, moved to another place:

- `k_pe` [R] is all KV heads' keys side by side. MLA has one k_pe for all heads, so a query head is zero
  outside its own KV head's slice. Half-split rotation pairs element i with i + R/2: pair j of KV head g
  sits at index g * d/2 + j of each half (G = 2, d = 4: rows 0 1 4 5 | 2 3 6 7 of k_proj).
- Rope: `longrope` with theta 1, so that its factors are the wavelengths of the pairs, the source's repeated
  for every KV head; short and long factors are the same.
- Softmax scale: DeepSeek divides by sqrt(nope + R) where the source divides by sqrt(d). The rope's attention
  factor multiplies queries and keys alike, hence ((nope + R) / d) ** 1/4.
- `kv_c` is all KV heads' values side by side plus constants that turn kv_a_layernorm into the identity
  (`IdentityNorm`). `kv_b_proj` picks each head's values. The part without position (nope) is zero, or has
  no elements.
- Biases of k and v join the constants in kv_a_proj_with_mqa's bias. DeepSeek has a bias on queries only
  before q_a_layernorm, so with `qkv_bias` queries go through a second `IdentityNorm`, whose constant 1
  carries q_proj's bias.

What is left is float32 rounding of the same size as a different order of summation makes.

What the result costs: per token and layer 2 R + 5..20 cache elements instead of 2 R, scores over R elements
instead of d, and a q_proj that is G times as tall and mostly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from prefold.convert.source import LlamaSpec

NORM_EXPONENT = 24
RANK_MULTIPLE = 16


@dataclass(frozen=True)
class IdentityNorm:
    """An RMSNorm that returns its first `width` inputs unchanged, thanks to constants among the others.

    The inputs are `width` values v and then constants a_i * 2^24, `rank` entries in all, with integers a_i
    whose squares sum to `rank`. Then mean square = 2^48 + |v|^2 / rank, and a weight of 2^24 undoes the
    division by its root. The scale's relative error is at most |v|^2 / (2 * rank * 2^48), and exactly 0 in
    float32 while the root mean square of v is below 2^11: |v|^2 then vanishes in rounding, and a power of two
    is left. The first constant is 2^24 itself, which comes out as 1 where its weight is 1. All of this is
    exact in bfloat16 too, where integers up to 256 and powers of two are. (Values below 2^-102 are
    subnormal on the way and may lose up to 2^-126.)
    """

    width: int
    rank: int
    constants: tuple[int, ...]

    @classmethod
    def of_width(cls, width: int) -> IdentityNorm:
        """The smallest rank that is a multiple of 16 and leaves room for the constants."""
        rank = -(-(width + 5) // RANK_MULTIPLE) * RANK_MULTIPLE
        return cls(width, rank, (1, *four_squares(rank - 1)))

    def bias(self) -> torch.Tensor:
        """[rank - width] what the bias of the projection before the norm must put behind the values."""
        tail = torch.zeros(self.rank - self.width)
        tail[: len(self.constants)] = torch.tensor(self.constants, dtype=torch.float32) * 2.0**NORM_EXPONENT
        return tail

    def weight(self, unit: bool) -> torch.Tensor:
        """[rank] the norm's weight. Constants become 0, except the first, which becomes 1 if `unit`."""
        weight = torch.zeros(self.rank)
        weight[: self.width] = 2.0**NORM_EXPONENT
        weight[self.width] = 1.0 if unit else 0.0
        return weight


def four_squares(number: int) -> tuple[int, int, int, int]:
    """Four integers >= 0 whose squares sum to `number` (Lagrange), largest first.

    >>> four_squares(207)
    (14, 3, 1, 1)
    """
    for a in range(math.isqrt(number), -1, -1):
        for b in range(min(a, math.isqrt(number - a * a)), -1, -1):
            rest = number - a * a - b * b
            for c in range(min(b, math.isqrt(rest)), -1, -1):
                d = math.isqrt(rest - c * c)
                if d * d == rest - c * c:
                    return a, b, c, d
    raise AssertionError(f"{number} < 0")


@dataclass(frozen=True)
class MLAMapping:
    """Dimensions of the converted model and the tensors of its layers."""

    spec: LlamaSpec
    qk_nope_head_dim: int

    @property
    def rope_dim(self) -> int:
        return self.spec.num_kv_heads * self.spec.head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.rope_dim

    @property
    def kv_norm(self) -> IdentityNorm:
        return IdentityNorm.of_width(self.rope_dim)

    @property
    def q_norm(self) -> IdentityNorm | None:
        spec = self.spec
        return IdentityNorm.of_width(spec.num_heads * spec.head_dim) if spec.qkv_bias else None

    def config(self, dtype: str) -> dict:
        """config.json of the converted checkpoint."""
        spec, q_norm = self.spec, self.q_norm
        wavelengths = list(spec.wavelengths) * spec.num_kv_heads
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": dtype,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_heads,
            "q_lora_rank": q_norm.rank if q_norm else None,
            "kv_lora_rank": self.kv_norm.rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": spec.head_dim,
            "hidden_act": spec.hidden_act,
            "rms_norm_eps": spec.rms_norm_eps,
            "max_position_embeddings": spec.max_position_embeddings,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1.0,
                "factor": 1.0,
                "attention_factor": spec.attention_factor * (self.qk_head_dim / spec.head_dim) ** 0.25,
                "original_max_position_embeddings": spec.max_position_embeddings,
                "short_factor": wavelengths,
                "long_factor": wavelengths,
            },
            "attention_bias": True,
            "tie_word_embeddings": spec.tie_word_embeddings,
            # Every layer is dense. The rest of a mixture's settings is there for readers that ask for it.
            "first_k_dense_replace": spec.num_layers,
            "moe_intermediate_size": spec.intermediate_size,
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            **spec.token_ids,
        }

    def half_split(self, rows: torch.Tensor) -> torch.Tensor:
        """k_proj's rows [G * d, ...] in the wide rope's order: first halves of all heads, then second."""
        halves = rows.unflatten(0, (self.spec.num_kv_heads, 2, -1))
        return halves.transpose(0, 1).flatten(0, 2)

    def widen_queries(self, rows: torch.Tensor) -> torch.Tensor:
        """q_proj's rows [H * d, n] -> [H * (nope + R), n]: each head in its KV head's slice, else zero."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        wide = rows.new_zeros(spec.num_heads, self.qk_head_dim, *rows.shape[1:])
        # [H, half, KV head, pair, n]; a view, so writing to it fills `wide`.
        slots = wide[:, self.qk_nope_head_dim :].unflatten(1, (2, spec.num_kv_heads, spec.head_dim // 2))
        heads = rows.unflatten(0, (spec.num_heads, 2, -1))
        for head in range(spec.num_heads):
            slots[head, :, head // group] = heads[head]
        return wide.flatten(0, 1)

    def kv_b_weight(self) -> torch.Tensor:
        """[H * (nope + d), kv_lora_rank]: zero nope rows, then rows that pick the KV head's values."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        weight = torch.zeros(spec.num_heads, self.qk_nope_head_dim + spec.head_dim, self.kv_norm.rank)
        for head in range(spec.num_heads):
            start = head // group * spec.head_dim
            weight[head, self.qk_nope_head_dim :, start : start + spec.head_dim] = torch.eye(spec.head_dim)
        return weight.flatten(0, 1)

    def attention(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A layer's self_attn tensors ("q_proj.weight", ...) -> the converted layer's."""
        spec, norm = self.spec, self.kv_norm
        value, key = tensors["v_proj.weight"], self.half_split(tensors["k_proj.weight"])
        padding = value.new_zeros(norm.rank - norm.width, spec.hidden_size)
        zeros = torch.zeros(self.rope_dim)
        value_bias = tensors.get("v_proj.bias", zeros)
        key_bias = self.half_split(tensors.get("k_proj.bias", zeros))
        return {
            **self._queries(tensors),
            "kv_a_proj_with_mqa.weight": torch.cat([value, padding, key]),
            "kv_a_proj_with_mqa.bias": torch.cat([value_bias, norm.bias(), key_bias]),
            "kv_a_layernorm.weight": norm.weight(unit=False),
            "kv_b_proj.weight": self.kv_b_weight(),
            "o_proj.weight": tensors["o_proj.weight"],
            "o_proj.bias": tensors.get("o_proj.bias", torch.zeros(spec.hidden_size)),
        }

    def _queries(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight, norm = tensors["q_proj.weight"], self.q_norm
        if norm is None:
            return {"q_proj.weight": self.widen_queries(weight)}
        padding = weight.new_zeros(norm.rank - norm.width, weight.shape[1])
        place = torch.cat([torch.eye(norm.width), tensors["q_proj.bias"].float()[:, None]], dim=1)
        unused = torch.zeros(norm.width, norm.rank - norm.width - 1)
        return {
            "q_a_proj.weight": torch.cat([weight, padding]),
            "q_a_proj.bias": torch.cat([torch.zeros(norm.width), norm.bias()]),
            "q_a_layernorm.weight": norm.weight(unit=True),
            "q_b_proj.weight": self.widen_queries(torch.cat([place, unused], dim=1)),
        }
