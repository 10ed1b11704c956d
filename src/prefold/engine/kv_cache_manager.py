"""Which blocks of the KV cache hold which request's tokens.

One rule keeps the prefix cache honest: **a block can be found only once a step that writes all of it
has been scheduled completely**. The scheduler first admits and allocates for every request of a
step, then calls `cache_full_blocks` for each. So:

- a later step may reuse the block, also while the first is still in flight: every rank runs steps in
  order, so the KV is there before it is read;
- another request of the same step can not: nothing orders a read behind a write inside a step. So the
  scheduler lets a waiting request whose next block is being written wait for the next step
  (`next_block_hash`, `hashes_being_written`), instead of computing the same tokens beside it.

Only whole blocks are shared, and a shared block is never written again. Where D ranks share a sequence
(decode context parallelism) a block here is a virtual one of `B * D` tokens, B of them on each rank; its
number is the same on all of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prefold.engine.block_pool import ROOT_HASH, BlockPool, hash_block
from prefold.request import Request

_NEVER = sys.maxsize


@dataclass
class PrefixCacheStats:
    """Tokens of admitted requests that were looked up, and those found. Resumed requests count again."""

    num_requests: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0


@dataclass(slots=True)
class _Table:
    """Blocks of one request, in order of position. `num_hashed` of them have been offered to the pool."""

    block_ids: list[int]
    num_hashed: int


class KVCacheManager:
    """Tables of all requests that hold blocks, over one `BlockPool`.

    Tables are keyed by the Request object: a new request may carry the id of one just aborted,
    whose blocks are still being written.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.block_size = block_size
        self.prefix_cache_stats = PrefixCacheStats()
        self._tables: dict[Request, _Table] = {}

    @property
    def usage(self) -> float:
        """Referenced share of all blocks, in [0, 1]."""
        return 1.0 - self.pool.num_free_blocks / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request: Request) -> list[int]:
        """A copy of the request's table."""
        table = self._tables.get(request)
        return list(table.block_ids) if table else []

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the request's first tokens, as many as are cached without a gap.

        At least one token is left to compute, since the next token is sampled from the last one's
        logits. A hit that covers every token therefore loses its last block: recomputing a single
        token into a shared block would write it a second time.
        A request with `prompt_logprobs` needs logits at every position, so nothing is reused.
        """
        block_ids: list[int] = []
        for block_hash in self._shareable_hashes(request):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens that the request would not have to compute if it were admitted now."""
        return len(self.find_cached_prefix(request)) * self.block_size

    def admit(self, request: Request) -> int | None:
        """Give a request without blocks its cached prefix and new blocks for all its other tokens.

        Returns the number of tokens that need not be computed, or None, with nothing changed, when
        the blocks do not suffice. All tokens known so far get their blocks now and not chunk by
        chunk: a prefill that has begun can not run out of blocks half-way.
        """
        assert request not in self._tables, f"{request} is admitted twice"
        prefix = self.find_cached_prefix(request)
        num_new = self.blocks_for(request.num_tokens) - len(prefix)
        if num_new > self.pool.num_free_blocks - self.pool.num_free_among(prefix):
            return None
        self.pool.touch(prefix)
        block_ids = prefix + self.pool.allocate(num_new)
        self._tables[request] = _Table(block_ids, num_hashed=len(prefix))
        request.num_slots = len(block_ids) * self.block_size
        request.next_full_block = (len(prefix) + 1) * self.block_size
        num_cached_tokens = len(prefix) * self.block_size
        self.prefix_cache_stats.num_requests += 1
        self.prefix_cache_stats.num_query_tokens += request.num_tokens
        self.prefix_cache_stats.num_hit_tokens += num_cached_tokens
        return num_cached_tokens

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the request's table to `num_tokens` tokens: the new block ids, none while they are at most
        `request.num_slots`.

        None, with nothing changed, when fewer blocks are free than that takes.
        """
        table = self._tables[request]
        num_new = -(-num_tokens // self.block_size) - len(table.block_ids)
        if num_new <= 0:
            return []
        if num_new > self.pool.num_free_blocks:
            return None
        block_ids = self.pool.allocate(num_new)
        table.block_ids += block_ids
        request.num_slots = len(table.block_ids) * self.block_size
        return block_ids

    def cache_full_blocks(self, requests: Iterable[Request]) -> None:
        """Make the blocks that their `num_computed_tokens` fill findable (see the rule of this module).
        Nothing happens to requests that are below their `next_full_block`."""
        for request in requests:
            table = self._tables[request]
            hashes = self.hashes_being_written(request)
            for block_id, block_hash in zip(table.block_ids[table.num_hashed :], hashes):
                self.pool.register(block_id, block_hash)
            if hashes:
                table.num_hashed += len(hashes)
                request.next_full_block = (table.num_hashed + 1) * self.block_size

    def hashes_being_written(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that `cache_full_blocks` will make findable after this step."""
        if request.num_computed_tokens < request.next_full_block or not self.pool.enable_prefix_caching:
            return []
        table = self._tables[request]
        num_full = request.num_computed_tokens // self.block_size
        return self._hashes(request, num_full)[table.num_hashed :]

    def next_block_hash(self, request: Request) -> bytes | None:
        """Hash of the first block that a waiting request could share but does not find, if any."""
        for block_hash in self._shareable_hashes(request):
            if self.pool.find(block_hash) is None:
                return block_hash
        return None

    def free(self, request: Request) -> None:
        """Give the request's blocks back, tail first. It may be admitted again."""
        table = self._tables.pop(request, None)
        if table is not None:
            self.pool.free(reversed(table.block_ids))
            request.num_slots = 0

    def distrust(self, request: Request) -> None:
        """No later request finds what this one's blocks hold, shared ones included."""
        table = self._tables.get(request)
        if table is not None:
            self.pool.forget_contents(table.block_ids)

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is reused. Running requests keep their blocks, but from now on
        register none: these continue a context from before the reset."""
        self.pool.reset_prefix_cache()
        for request in self._tables:
            request.next_full_block = _NEVER

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """AssertionError unless exactly `requests` may hold blocks and all counts agree."""
        allowed = set(requests)
        strangers = [request for request in self._tables if request not in allowed]
        assert not strangers, f"tables of requests that are gone: {strangers}"
        for request, table in self._tables.items():
            assert len(set(table.block_ids)) == len(table.block_ids), f"{request}: a block occurs twice"
            capacity = len(table.block_ids) * self.block_size
            assert request.num_slots == capacity, f"{request}: {request.num_slots} slots, not {capacity}"
            assert request.num_computed_tokens <= capacity, f"{request}: only {capacity} slots"
            assert table.num_hashed <= len(table.block_ids), f"{request}: hashes without blocks"
        self.pool.check_integrity(Counter(b for table in self._tables.values() for b in table.block_ids))

    def _shareable_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that `find_cached_prefix` may return."""
        if not self.pool.enable_prefix_caching or request.sampling_params.prompt_logprobs is not None:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self._hashes(request, max_blocks)

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of the request's first `num_blocks` blocks, each computed once in its life."""
        size, tokens, hashes = self.block_size, request.all_token_ids, request.block_hashes
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(hash_block(parent, tokens[i * size : (i + 1) * size]))
        return hashes[:num_blocks]
