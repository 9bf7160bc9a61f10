"""The free list keeps its order under every operation."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from octavo.kvcache.block import KVCacheBlock
from octavo.kvcache.free_list import FreeList


def ids(free_list: FreeList) -> list[int]:
    return [block.block_id for block in free_list]


def test_blocks_come_out_in_the_order_they_went_in():
    free_list = FreeList(KVCacheBlock(i) for i in (2, 0, 1))
    assert [free_list.popleft().block_id for _ in range(3)] == [2, 0, 1]
    assert len(free_list) == 0


def test_taking_from_an_empty_list_raises():
    with pytest.raises(IndexError):
        FreeList().popleft()


def test_a_block_cannot_be_put_in_twice_or_taken_out_twice():
    block = KVCacheBlock(0)
    free_list = FreeList([block])
    with pytest.raises(AssertionError):
        free_list.append(block)
    free_list.remove(block)
    with pytest.raises(AssertionError):
        free_list.remove(block)


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "popleft", "remove"]), st.integers(0, 7)), max_size=60))
def test_it_behaves_like_a_plain_list(operations):
    blocks = [KVCacheBlock(i) for i in range(8)]
    free_list, model = FreeList(), []
    for operation, block_id in operations:
        if operation == "popleft":
            if model:
                assert free_list.popleft().block_id == model.pop(0)
        elif operation == "remove":
            if block_id in model:
                model.remove(block_id)
                free_list.remove(blocks[block_id])
        elif block_id not in model:
            model.insert(len(model) if operation == "append" else 0, block_id)
            getattr(free_list, operation)(blocks[block_id])
        assert ids(free_list) == model
        assert len(free_list) == len(model)
