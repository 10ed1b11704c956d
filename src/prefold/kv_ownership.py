"""Which rank of a DCP group holds which token's KV, and where. One home for the formula.

A sequence is cut into virtual blocks of `V = B * D` tokens (B: block size of a rank, D: DCP size).
Inside a virtual block, runs of I tokens (the interleave) go to the ranks in turn, so that each of the D
ranks holds B tokens of it, in a block that has the same number on all of them:

    B = 4, D = 2, I = 2:   position   0 1 2 3 4 5 6 7 | 8 9 ...
                           rank       0 0 1 1 0 0 1 1 | 0 0 ...
                           offset     0 1 0 1 2 3 2 3 | 0 1 ...

I divides B, so the pattern repeats every I * D tokens through the whole sequence, and the tokens that
a rank holds are consecutive in its own blocks: its n-th token is at offset n % B of its block n // B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class KVOwnership:
    """The formula for one layout. D = 1: one rank holds everything, in ordinary blocks.

    Attributes:
        block_size: tokens of a block on one rank (B).
        dcp_size: ranks that share a sequence (D).
        interleave: consecutive tokens on one rank (I); divides B.
    """

    block_size: int
    dcp_size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if min(self.block_size, self.dcp_size, self.interleave) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        if self.block_size % self.interleave:
            raise ValueError(
                f"cp_kv_cache_interleave_size={self.interleave} does not divide block_size={self.block_size}"
            )

    @property
    def virtual_block_size(self) -> int:
        """Tokens of a block over all D ranks."""
        return self.block_size * self.dcp_size

    def owner(self, positions: ArrayLike) -> IntArray:
        """DCP rank that holds each position, any shape.

        >>> KVOwnership(block_size=4, dcp_size=2, interleave=2).owner(range(10)).tolist()
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
        """
        return np.asarray(positions, np.int64) // self.interleave % self.dcp_size

    def local_index(self, positions: ArrayLike) -> IntArray:
        """How many earlier tokens of the sequence the owner of each position holds.

        >>> KVOwnership(block_size=4, dcp_size=2, interleave=2).local_index(range(10)).tolist()
        [0, 1, 0, 1, 2, 3, 2, 3, 4, 5]
        """
        positions = np.asarray(positions, np.int64)
        if self.dcp_size == 1:
            return positions
        turn = self.interleave * self.dcp_size
        return positions // turn * self.interleave + positions % self.interleave

    def slots(self, positions: ArrayLike, virtual_blocks: ArrayLike, rank: int) -> IntArray:
        """Cache slots on DCP rank `rank`, -1 for positions that another rank holds.

        Args:
            positions: any shape.
            virtual_blocks: of the same shape: number of the block that holds each position, that is
                entry `position // virtual_block_size` of its request's block table.

        Position 9 is in the request's second virtual block, here number 7, on rank 0:

        >>> KVOwnership(block_size=4, dcp_size=2, interleave=2).slots([1, 2, 9], [3, 3, 7], rank=0).tolist()
        [13, -1, 29]
        """
        slots = np.asarray(virtual_blocks, np.int64) * self.block_size
        slots = slots + self.local_index(positions) % self.block_size
        return slots if self.dcp_size == 1 else np.where(self.owner(positions) == rank, slots, -1)

    def local_lengths(self, seq_lens: ArrayLike) -> IntArray:
        """[...] -> [..., D]: how many of the first `seq_len` tokens each rank holds.

        >>> KVOwnership(block_size=4, dcp_size=4).local_lengths([3, 25]).tolist()
        [[1, 1, 1, 0], [7, 6, 6, 6]]

        A row of several tokens is expanded to one length per token first. Three tokens that end at 10:

        >>> KVOwnership(block_size=4, dcp_size=2).local_lengths([8, 9, 10]).T.tolist()
        [[4, 5, 5], [4, 4, 5]]
        """
        seq_lens = np.asarray(seq_lens, np.int64)[..., None]
        whole_turns, rest = np.divmod(seq_lens, self.interleave * self.dcp_size)
        own_rest = np.clip(rest - np.arange(self.dcp_size) * self.interleave, 0, self.interleave)
        return whole_turns * self.interleave + own_rest
