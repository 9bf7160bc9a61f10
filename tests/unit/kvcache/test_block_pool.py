"""Reference counts, eviction order and accounting of the block pool."""

import pytest

from octavo.kvcache.block_hash import make_content
from octavo.kvcache.block_pool import BlockPool


def numbers(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_in_use


def filled(pool: BlockPool, *first_tokens: int) -> list:
    """One published chain of one-token blocks, held once."""
    blocks, content = pool.allocate(len(first_tokens)), None
    for block, token_id in zip(blocks, first_tokens, strict=True):
        content = make_content(content, [token_id])
        pool.publish(block, content)
    return blocks


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_are_first_handed_out_in_the_given_order():
    pool = BlockPool(4, True, free_order=[2, 0, 3, 1])
    assert ids(pool.allocate(4)) == [2, 0, 3, 1]


def test_free_order_must_name_every_block_once():
    with pytest.raises(AssertionError):
        BlockPool(3, True, free_order=[0, 1, 1])


def test_asking_for_more_than_is_available_raises_and_changes_nothing():
    pool = BlockPool(3, True)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="3 blocks asked of a pool that has 2"):
        pool.allocate(3)
    assert numbers(pool) == (2, 0, 1)
    pool.audit({0: 1})


def test_a_block_is_in_exactly_one_state_all_the_way():
    pool = BlockPool(4, True)
    assert numbers(pool) == (4, 0, 0)
    blocks = filled(pool, 1, 2)
    assert numbers(pool) == (2, 0, 2)
    pool.touch(blocks[:1])
    assert numbers(pool) == (2, 0, 2), "a shared block counts once"
    pool.free(reversed(blocks))
    assert numbers(pool) == (2, 1, 1)
    pool.free(blocks[:1])
    assert numbers(pool) == (2, 2, 0)
    pool.allocate(3)
    assert numbers(pool) == (0, 1, 3), "uncached blocks are taken first"
    assert pool.peak_in_use == 3


def test_the_least_recently_used_chain_is_evicted_first_and_its_tail_before_its_head():
    pool = BlockPool(6, True)
    old, new = filled(pool, 1, 2, 3), filled(pool, 7, 8, 9)
    pool.free(reversed(old))
    pool.free(reversed(new))
    assert ids(pool.allocate(6)) == ids([*reversed(old), *reversed(new)])


def test_using_a_cached_block_makes_it_the_last_to_be_evicted():
    pool = BlockPool(2, True)
    first, second = filled(pool, 1), filled(pool, 2)
    pool.free(first)
    pool.free(second)
    pool.touch(first)
    pool.free(first)
    assert ids(pool.allocate(2)) == ids([*second, *first])


def test_an_evicted_block_is_found_no_more():
    pool = BlockPool(1, True)
    content = make_content(None, [1])
    block = filled(pool, 1)
    assert pool.lookup(content) is block[0]
    pool.free(block)
    assert pool.lookup(content) is block[0]
    pool.allocate(1)
    assert pool.lookup(content) is None


def test_a_second_block_of_the_same_content_stays_private_and_is_free_after_use():
    pool = BlockPool(3, True)
    (first,), (second,) = filled(pool, 1), pool.allocate(1)
    assert pool.publish(second, make_content(None, [1])) is first
    pool.free([second])
    assert numbers(pool) == (2, 0, 1)
    pool.audit({first.block_id: 1})


def test_a_block_whose_digest_collides_is_not_found_for_the_other_content(monkeypatch):
    monkeypatch.setattr("octavo.kvcache.block_hash.hash_block", lambda *parts: b"same")
    pool = BlockPool(2, True)
    (block,) = filled(pool, 1)
    assert pool.lookup(make_content(None, [1])) is block
    assert pool.lookup(make_content(None, [2])) is None
    assert pool.lookup(make_content(None, [1], ("cache_salt", "a"))) is None
    assert pool.lookup(make_content(make_content(None, [2]), [1])) is None


def test_reset_forgets_every_cached_block_but_only_when_none_is_in_use():
    pool = BlockPool(3, True)
    blocks = filled(pool, 1, 2)
    pool.free(blocks[1:])
    assert not pool.reset_cache()
    assert numbers(pool) == (1, 1, 1)
    assert pool.lookup(make_content(None, [1])) is blocks[0]
    pool.free(blocks[:1])
    assert pool.reset_cache()
    assert numbers(pool) == (3, 0, 0)
    assert pool.lookup(make_content(None, [1])) is None
    pool.audit({})


def test_a_block_that_has_an_owner_may_get_another_before_it_is_published():
    pool = BlockPool(2, True)
    (block,) = pool.allocate(1)
    pool.touch([block])
    pool.audit({block.block_id: 2})
    pool.free([block])
    assert numbers(pool) == (1, 0, 1)
    pool.free([block])
    assert numbers(pool) == (2, 0, 0)


def test_a_free_block_can_be_neither_freed_nor_shared():
    pool = BlockPool(2, True)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="could be shared"):
        pool.touch([block])
    with pytest.raises(AssertionError, match="no owner"):
        pool.free([block])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool, held, cached: setattr(held, "ref_count", 2),
        lambda pool, held, cached: setattr(held, "ref_count", 0),
        lambda pool, held, cached: setattr(cached, "ref_count", 1),
        lambda pool, held, cached: setattr(cached, "content", None),
        lambda pool, held, cached: pool._published.clear(),
        lambda pool, held, cached: pool._free.remove(cached),
        lambda pool, held, cached: pool._free.prepend(held),
        lambda pool, held, cached: (pool._free.remove(cached), pool._free.prepend(cached)),
        lambda pool, held, cached: setattr(pool, "_num_cached", 0),
        lambda pool, held, cached: setattr(pool, "enable_caching", False),
    ],
)
def test_audit_finds_whatever_is_broken(break_it):
    pool = BlockPool(3, True)
    (held,), (cached,) = pool.allocate(1), filled(pool, 1)
    pool.free([cached])
    pool.audit({held.block_id: 1})
    break_it(pool, held, cached)
    with pytest.raises(AssertionError):
        pool.audit({held.block_id: 1})
