"""Bytes of the KV cache: one home for what scheduler, worker and planner must agree on."""

from __future__ import annotations

from dataclasses import dataclass

from prefold.config import DTYPES, GQAConfig, MLAConfig

FP8 = "fp8_e4m3"

CACHE_DTYPES = {
    "auto": "auto",
    **{name: name for name in DTYPES},
    FP8: FP8,
    "bf16": "bfloat16",
    "fp8": FP8,
}
"""What `kv_cache_dtype` may be, and what it means. "auto" is the model's dtype."""

FP8_ALIGNMENT = 16
"""Bytes that a part of a row is padded to a multiple of, in FP8."""


def resolve_cache_dtype(kv_cache_dtype: str, model_dtype: str) -> str:
    """How rows are stored.

    >>> resolve_cache_dtype("auto", "float32"), resolve_cache_dtype("bf16", "float32")
    ('float32', 'bfloat16')
    """
    name = CACHE_DTYPES[kv_cache_dtype]
    return model_dtype if name == "auto" else name


@dataclass(frozen=True)
class RowPart:
    """Elements of a token's row of the cache that are stored together: `num_heads` vectors of `head_dim`,
    then `rotary_dim` more.

    `kv_c | k_pe` is one vector and a rotary part, an index key one vector, `keys | values` a vector per head
    of either.
    """

    num_heads: int
    head_dim: int
    rotary_dim: int = 0

    @property
    def dim(self) -> int:
        """Elements of the part."""
        return self.num_heads * self.head_dim + self.rotary_dim

    def num_bytes(self, cache_dtype: str) -> int:
        """What it is stored in. In FP8 that is a byte per element and one per head for its scale, but
        two bytes per rotary element, which stay bfloat16 (kernels.fp8).

        >>> RowPart(1, 512, 64).num_bytes("bfloat16"), RowPart(1, 512, 64).num_bytes("fp8_e4m3")
        (1152, 656)
        """
        if cache_dtype != FP8:
            return self.dim * DTYPES[cache_dtype]
        used = self.num_heads * (self.head_dim + 1) + 2 * self.rotary_dim
        return -(-used // FP8_ALIGNMENT) * FP8_ALIGNMENT


def row_parts(attention: MLAConfig | GQAConfig, tp: int) -> tuple[RowPart, ...]:
    """The parts of a row on one of `tp` ranks, in their order."""
    if isinstance(attention, GQAConfig):
        return (RowPart(2 * attention.kv_heads_per_rank(tp), attention.head_dim),)
    latent = RowPart(1, attention.kv_lora_rank, attention.qk_rope_head_dim)
    return (latent,) if attention.dsa is None else (latent, RowPart(1, attention.dsa.head_dim))


def row_bytes(attention: MLAConfig | GQAConfig, tp: int, cache_dtype: str) -> int:
    """Bytes per token and layer in the cache of one of `tp` ranks."""
    return sum(part.num_bytes(cache_dtype) for part in row_parts(attention, tp))


def new_row_bytes(attention: MLAConfig | GQAConfig, layer: int, tp: int, cache_dtype: str) -> int:
    """Bytes per token that a layer fills: what travels between ranks. Without an indexer a layer has
    no index key, though the cache has room for it."""
    dsa = attention.dsa if isinstance(attention, MLAConfig) else None
    parts = row_parts(attention, tp)
    filled = parts if dsa is None or dsa.full_layers[layer] else parts[:1]
    return sum(part.num_bytes(cache_dtype) for part in filled)


@dataclass(frozen=True)
class KVSpec:
    """What one rank stores per token in every layer that it computes: `kv_c | k_pe` (with
    sparse attention an index key too), or `keys | values`.

    Attributes:
        num_layers: layers on this rank.
        row_bytes: bytes per token and layer.
        block_size: tokens per block.
    """

    num_layers: int
    row_bytes: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.row_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def num_blocks_in(self, num_bytes: int) -> int:
        """Whole blocks that fit into `num_bytes`.

        >>> KVSpec(num_layers=2, row_bytes=32, block_size=16).num_blocks_in(5000)
        4
        """
        return num_bytes // self.bytes_per_block
