"""The blocks of the KV cache: which are free, who uses them, what the full ones contain.

A block is in one of two states: *referenced* (ref count >= 1) or *free*. A free block may still
hold content that a later prompt can reuse; it keeps its hash until it is handed out again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

ROOT_HASH = b""
"""Parent of a request's first block."""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block: its own tokens and, through the parent's hash, every token before them.

    SHA-256, because a collision would hand one user's context to another. Token ids are 64-bit.

    >>> hash_block(ROOT_HASH, [1, 2]) == hash_block(ROOT_HASH, [1, 2])
    True
    >>> hash_block(hash_block(ROOT_HASH, [0, 0]), [1, 2]) == hash_block(ROOT_HASH, [1, 2])
    False
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; every operation is O(1) per block.

    Free blocks are handed out in a fixed order: first those without reusable content, then the
    least recently freed. A caller that frees a request's blocks last to first thus loses the tail
    of a cached prefix before its head; a tail without its head could not be found.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content a new request could reuse, free or referenced."""
        return len(self._block_of_hash)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take that many free blocks, each with ref count 1; their old content is forgotten."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks wanted, {len(self._free)} are free"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            block_hash = self._hash_of_block[block_id]
            if block_hash is not None:
                del self._block_of_hash[block_hash]
                self._hash_of_block[block_id] = None
                self.num_evictions += 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each; a free block is free no longer."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each. Of those that become free, the first given is evicted first."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hash_of_block[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free: `touch` would take them from `num_free_blocks`."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._block_of_hash.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a referenced block's content findable. The first block with a content keeps the hash:
        a second copy stays anonymous, so that hash and block determine each other."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is registered while free"
        assert self._hash_of_block[block_id] is None, f"block {block_id} is registered twice"
        if self.enable_prefix_caching and block_hash not in self._block_of_hash:
            self._block_of_hash[block_hash] = block_id
            self._hash_of_block[block_id] = block_hash

    def forget_contents(self, block_ids: Iterable[int]) -> None:
        """Make what these blocks hold unfindable; references stay."""
        for block_id in block_ids:
            block_hash = self._hash_of_block[block_id]
            if block_hash is not None:
                del self._block_of_hash[block_hash]
                self._hash_of_block[block_id] = None

    def reset_prefix_cache(self) -> None:
        """Forget every content; references stay."""
        self._block_of_hash.clear()
        self._hash_of_block = [None] * self.num_blocks

    def check_integrity(self, uses: Mapping[int, int]) -> None:
        """AssertionError unless the books agree with `uses`: block id -> tables that contain it."""
        for block_id, ref_count in enumerate(self._ref_counts):
            used = uses.get(block_id, 0)
            assert ref_count == used, f"block {block_id}: ref count {ref_count}, but {used} uses"
            is_free = block_id in self._free
            assert is_free == (ref_count == 0), f"block {block_id}: ref count {ref_count}, free: {is_free}"
        outside = [block_id for block_id in (*uses, *self._free) if not 0 <= block_id < self.num_blocks]
        assert not outside, f"blocks {outside} are outside [0, {self.num_blocks})"
        for block_id, block_hash in enumerate(self._hash_of_block):
            if block_hash is not None:
                found = self._block_of_hash.get(block_hash)
                assert found == block_id, f"block {block_id}'s hash leads to block {found}"
        hashed, found = self.num_blocks - self._hash_of_block.count(None), len(self._block_of_hash)
        assert hashed == found, f"{hashed} blocks have a hash, {found} hashes have a block"
