"""Samples of one prompt share its blocks, and nobody ever writes to a block that somebody else can read."""

import pytest
from fake_requests import Request, compute, make, numbers

from octavo.kvcache.manager import KVCacheManager


def held(num_tokens: int, **options) -> tuple[KVCacheManager, Request, object]:
    """A request whose prompt of `num_tokens` tokens, in blocks of 4, is computed and held."""
    manager = make(**{"num_blocks": 20, **options})
    parent = Request("parent", list(range(num_tokens)))
    compute(manager, parent)
    return manager, parent, manager.hold_prompt(parent, num_tokens)


def fork(manager: KVCacheManager, hold: object, name: str, num_tokens: int, last: bool = False) -> Request:
    child = Request(name, list(range(num_tokens)), num_computed_tokens=num_tokens - 1)
    manager.fork(hold, child, last)
    return child


def end(manager: KVCacheManager, *requests: Request) -> None:
    for request in requests:
        manager.free(request)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 10])
def test_a_child_shares_all_blocks_but_the_one_it_computes_its_last_token_in(num_tokens, caching):
    manager, parent, hold = held(num_tokens, caching=caching)
    child = fork(manager, hold, "child", num_tokens)
    ours, theirs = manager.block_ids("child"), manager.block_ids("parent")
    assert ours[:-1] == theirs[:-1] and ours[-1] not in theirs
    assert manager.take_block_copies() == [(theirs[-1], ours[-1])]
    assert manager.take_block_copies() == [], "each is named once"
    manager.audit([parent, child], [hold])
    end(manager, parent, child)
    manager.release(hold)
    manager.audit([])
    assert numbers(manager)[2] == 0


def test_the_hold_gets_a_copy_of_a_partly_filled_block_so_that_the_parent_may_write_on():
    manager, parent, hold = held(6)
    tail = manager.block_ids("parent")[-1]
    assert manager.must_detach(hold)
    manager.detach(hold)
    assert not manager.must_detach(hold)
    assert manager.block_ids("parent")[-1] == tail, "the runner knows the parent's table"
    copy = hold.blocks[-1].block_id
    child = fork(manager, hold, "child", 6)
    assert manager.take_block_copies() == [(tail, copy), (copy, manager.block_ids("child")[-1])]
    manager.audit([parent, child], [hold])


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_the_hold_of_whole_blocks_needs_no_copy_since_the_parent_writes_to_the_next(num_tokens):
    manager, _, hold = held(num_tokens)
    assert not manager.must_detach(hold)


def test_the_last_child_takes_over_a_block_that_nobody_else_owns():
    manager, parent, hold = held(6)
    blocks = manager.block_ids("parent")
    end(manager, parent)
    assert not manager.must_detach(hold) and not manager.needs_copy(hold, last=True)
    child = fork(manager, hold, "child", 6, last=True)
    assert manager.block_ids("child") == blocks and manager.take_block_copies() == []
    manager.audit([child])


def test_the_last_child_copies_a_block_that_is_published_or_that_the_parent_still_owns():
    manager, parent, hold = held(6)
    assert manager.needs_copy(hold, last=True)
    fork(manager, hold, "child", 6, last=True)
    assert len(manager.take_block_copies()) == 1
    manager, parent, hold = held(8)
    end(manager, parent)
    assert manager.needs_copy(hold, last=True)
    child = fork(manager, hold, "child", 8, last=True)
    ((_, target),) = manager.take_block_copies()
    assert manager.block_ids("child")[-1] == target
    assert numbers(manager) == (17, 1, 2), "what was copied stays findable"
    manager.audit([child])


def test_a_held_prompt_outlives_the_request_that_computed_it():
    manager, parent, hold = held(10, caching=False)
    blocks = manager.block_ids("parent")
    end(manager, parent)
    assert numbers(manager) == (17, 0, 3)
    child = fork(manager, hold, "child", 10)
    assert manager.block_ids("child")[:-1] == blocks[:-1]
    manager.release(hold)
    manager.audit([child])


def test_a_child_publishes_what_it_computes_and_not_the_copy_of_what_is_published():
    manager, parent, hold = held(8)
    child = fork(manager, hold, "child", 8)
    child.token_ids += [50, 51, 52, 53]
    manager.allocate(child, 12)
    child.num_computed_tokens = 12
    manager.publish(child)
    manager.audit([parent, child], [hold])
    end(manager, parent, child)
    manager.release(hold)
    assert len(manager.find_cached_prefix(Request("again", [*range(8), 50, 51, 52, 53, 9]))) == 3
    manager.audit([])


def test_a_prompt_computed_twice_at_once_is_held_and_freed_so_that_its_tail_is_evicted_first():
    manager = make(num_blocks=7)
    first, second = Request("a", list(range(5))), Request("b", list(range(9)))
    for request in (first, second):
        manager.allocate(request, len(request.token_ids))
    for request in (first, second):
        request.num_computed_tokens = len(request.token_ids)
        manager.publish(request)
    hold = manager.hold_prompt(second, 9)
    end(manager, second, first)
    manager.release(hold)
    manager.allocate(Request("c", [50] * 24), 24)
    assert len(manager.find_cached_prefix(Request("d", list(range(9))))) == 1, "the tail was evicted, the head not"


def test_a_fork_shares_the_contents_of_the_prompt_instead_of_hashing_it_again(monkeypatch):
    manager, parent, hold = held(9)
    monkeypatch.setattr("octavo.kvcache.manager.make_content", lambda *parts: pytest.fail("hashed again"))
    child = fork(manager, hold, "child", 9)
    child.num_computed_tokens = 9
    manager.publish(child)
    assert all(a is b for a, b in zip(parent.block_contents, child.block_contents, strict=True))


def test_a_tail_let_go_by_the_last_child_is_evicted_before_the_head_though_the_child_has_a_duplicate_of_that():
    manager = make(num_blocks=7)
    first, parent = Request("first", list(range(5))), Request("parent", list(range(8)))
    for request in (first, parent):
        manager.allocate(request, len(request.token_ids))
    for request in (first, parent):
        request.num_computed_tokens = len(request.token_ids)
        manager.publish(request)
    hold = manager.hold_prompt(parent, 8)
    end(manager, first, parent)
    child = fork(manager, hold, "child", 8, last=True)
    manager.allocate(Request("evicting", [50] * 16), 16)
    assert numbers(manager) == (0, 1, 6)
    assert len(manager.find_cached_prefix(Request("again", list(range(9))))) == 1, "the tail was evicted, the head not"
    end(manager, child)


def test_a_copy_that_its_owner_never_computed_in_is_not_published_when_it_is_freed():
    manager, prompt = make(num_blocks=8), list(range(8))
    first, parent = Request("first", prompt), Request("parent", prompt)
    for request in (first, parent):
        manager.allocate(request, 8)
    for request in (first, parent):
        request.num_computed_tokens = 8
        manager.publish(request)
    manager.free(first)
    hold = manager.hold_prompt(parent, 8)
    evicting = Request("evicting", [50] * 24)
    manager.allocate(evicting, 24)
    manager.free(evicting)
    fork(manager, hold, "child", 8)
    copy = manager.block_ids("child")[-1]
    manager.free(Request("child", prompt, block_contents=hold.contents))
    assert manager.pool.blocks[copy].content is None
    manager.audit([parent], [hold])


def test_shared_slots_and_tokens_count_once_in_the_utilization():
    manager, parent, hold = held(6)
    assert manager.utilization([parent]) == 6 / 8
    manager.detach(hold)
    assert manager.utilization([parent]) == (6 + 2) / 12
    child = fork(manager, hold, "child", 6)
    assert manager.utilization([parent, child]) == (6 + 2 + 1) / 16
    end(manager, parent)
    assert manager.utilization([child]) == (4 + 2 + 1) / 12


def test_audit_names_a_hold_that_should_not_be_and_a_block_that_would_be_overwritten():
    manager, parent, hold = held(6)
    with pytest.raises(AssertionError, match="1 holds, 0 are known"):
        manager.audit([parent])
    child = fork(manager, hold, "child", 6)
    manager.detach(hold)
    manager.audit([parent, child], [hold])
    child.num_computed_tokens = 3
    with pytest.raises(AssertionError, match="child will write to"):
        manager.audit([parent, child], [hold])


def test_a_request_that_has_blocks_cannot_be_forked_into():
    manager, parent, hold = held(6)
    with pytest.raises(AssertionError, match="parent has a block table"):
        manager.fork(hold, parent, last=False)
