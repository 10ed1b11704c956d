"""BlockPool: order of eviction, reference counts, content hashes."""

import pytest

from prefold.engine.block_pool import ROOT_HASH, BlockPool, hash_block


def pool(num_blocks: int = 4, caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, 2, caching)


def register_chain(p: BlockPool, block_ids: list[int], salt: int = 0) -> list[bytes]:
    """Register blocks as the full blocks of one request; their hashes."""
    hashes, parent = [], ROOT_HASH
    for i, block_id in enumerate(block_ids):
        parent = hash_block(parent, [salt, i])
        p.register(block_id, parent)
        hashes.append(parent)
    return hashes


def test_allocation_hands_out_each_block_once():
    p = pool()
    assert sorted(p.allocate(3) + p.allocate(1)) == [0, 1, 2, 3]
    assert p.num_free_blocks == 0
    p.check_integrity(dict.fromkeys(range(4), 1))


def test_allocating_too_many_or_freeing_twice_is_an_error_of_ours():
    p = pool()
    with pytest.raises(AssertionError, match="5 blocks wanted, 4 are free"):
        p.allocate(5)
    block_ids = p.allocate(1)
    p.free(block_ids)
    with pytest.raises(AssertionError, match="freed twice"):
        p.free(block_ids)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int):
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} and block_size={block_size}"):
        BlockPool(num_blocks, block_size, True)


def test_hash_depends_on_tokens_their_order_and_all_that_precedes():
    first = hash_block(ROOT_HASH, [1, 2])
    others = [
        hash_block(ROOT_HASH, [2, 1]),
        hash_block(ROOT_HASH, [1, 2, 0]),
        hash_block(ROOT_HASH, [1 + 2**32, 2]),
        hash_block(first, [1, 2]),
        hash_block(hash_block(ROOT_HASH, [3]), [1, 2]),
    ]
    assert len({first, *others}) == 6
    assert hash_block(ROOT_HASH, (1, 2)) == first


def test_free_block_is_found_until_it_is_handed_out_again():
    p = pool(2)
    block_ids = p.allocate(2)
    head, tail = register_chain(p, block_ids)
    p.free(reversed(block_ids))
    assert (p.find(head), p.find(tail)) == (block_ids[0], block_ids[1])
    assert p.allocate(1) == [block_ids[1]], "the tail goes first"
    assert (p.find(head), p.find(tail)) == (block_ids[0], None)
    assert (p.num_evictions, p.num_cached_blocks) == (1, 1)


def test_eviction_is_least_recently_used_and_spares_touched_blocks():
    p = pool(3)
    blocks = [p.allocate(1) for _ in range(3)]
    for salt, block in enumerate(blocks):
        register_chain(p, block, salt)
    for block in (blocks[1], blocks[0], blocks[2]):
        p.free(block)
    p.touch(blocks[1])
    p.free(blocks[1])
    assert p.allocate(3) == [*blocks[0], *blocks[2], *blocks[1]]


def test_blocks_without_content_are_handed_out_before_cached_ones():
    p = pool(3)
    cached, plain = p.allocate(1), p.allocate(1)
    register_chain(p, cached)
    p.allocate(1)
    p.free(cached)
    p.free(plain)
    assert p.allocate(1) == plain


def test_shared_block_is_free_after_its_last_user():
    p = pool(2)
    block = p.allocate(1)
    assert p.num_free_among(block) == 0
    p.touch(block)
    p.free(block)
    assert p.num_free_blocks == 1
    p.free(block)
    assert p.num_free_blocks == 2
    assert p.num_free_among(block) == 1


def test_second_copy_of_a_content_stays_anonymous():
    p = pool(2)
    a, b = p.allocate(2)
    (content,) = register_chain(p, [a])
    p.register(b, content)
    assert p.find(content) == a
    p.free([a, b])
    p.check_integrity({})
    assert p.allocate(1) == [b]
    assert p.find(content) == a


def test_without_prefix_caching_nothing_is_found():
    p = pool(caching=False)
    (content,) = register_chain(p, p.allocate(1))
    assert p.find(content) is None


def test_reset_forgets_contents_and_keeps_references():
    p = pool()
    block = p.allocate(1)
    (content,) = register_chain(p, block)
    p.reset_prefix_cache()
    assert p.find(content) is None
    p.check_integrity({block[0]: 1})


def test_check_integrity_finds_wrong_counts_and_maps():
    p = pool()
    (block,) = p.allocate(1)
    with pytest.raises(AssertionError, match="ref count 1, but 0 uses"):
        p.check_integrity({})
    with pytest.raises(AssertionError, match="ref count 1, but 2 uses"):
        p.check_integrity({block: 2})
    with pytest.raises(AssertionError, match="outside"):
        p.check_integrity({block: 1, 4: 1})
    (content,) = register_chain(p, [block])
    p._block_of_hash[content] = 3
    with pytest.raises(AssertionError, match="leads to block 3"):
        p.check_integrity({block: 1})
    p._block_of_hash[content] = block
    p._free[block] = None
    with pytest.raises(AssertionError, match="free: True"):
        p.check_integrity({block: 1})
