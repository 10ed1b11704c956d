"""Bytes of the KV cache: one home for what scheduler, worker and planner must agree on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVSpec:
    """What one rank stores per token in every layer that it computes: `kv_c | k_pe` (with
    sparse attention an index key too), or `keys | values`.

    Attributes:
        num_layers: layers on this rank.
        token_dim: elements per token and layer (`cache_dim` of the model's attention).
        itemsize: bytes per element.
        block_size: tokens per block.
    """

    num_layers: int
    token_dim: int
    itemsize: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.token_dim * self.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def num_blocks_in(self, num_bytes: int) -> int:
        """Whole blocks that fit into `num_bytes`.

        >>> KVSpec(2, 8, 4, block_size=16).num_blocks_in(5000)
        4
        """
        return num_bytes // self.bytes_per_block
