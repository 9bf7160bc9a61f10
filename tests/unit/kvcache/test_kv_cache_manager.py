"""Block tables and prefix reuse, without a scheduler."""

import pytest
from fake_requests import Request, compute, make, numbers

from octavo.kvcache import block_hash


def test_a_table_grows_by_the_blocks_its_tokens_need_and_no_more():
    manager, request = make(), Request("a", list(range(9)))
    assert manager.allocate(request, 1) == [0]
    assert manager.allocate(request, 4) == []
    assert manager.allocate(request, 9) == [1, 2]
    assert manager.block_ids("a") == [0, 1, 2]
    manager.audit([request])
    manager.free(request)
    assert manager.block_ids("a") == []
    manager.audit([])


def test_too_few_blocks_give_none_and_change_nothing():
    manager = make(num_blocks=4)
    first, second = Request("a", list(range(8))), Request("b", [*range(8), 9, 9, 9, 9, 9])
    compute(manager, first)
    manager.free(first)
    other = Request("c", [7] * 8)
    compute(manager, other)
    prefix = manager.find_cached_prefix(second)
    assert len(prefix) == 2
    assert manager.allocate(second, 13, prefix) is None
    assert manager.block_ids("b") == []
    assert numbers(manager) == (0, 2, 2)
    manager.audit([other])
    assert manager.allocate(second, 8, prefix) == [], "the prefix itself is there to be shared"


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_hit_never_covers_the_whole_prompt(block_size, extra):
    manager = make(block_size=block_size)
    prompt = list(range(2 * block_size + extra))
    first, second = Request("a", prompt), Request("b", prompt)
    assert compute(manager, first) == 0
    expected = 2 * block_size if extra > 0 else block_size
    assert compute(manager, second) == expected < len(prompt)
    assert manager.block_ids("b")[: expected // block_size] == manager.block_ids("a")[: expected // block_size]
    manager.audit([first, second])


def test_a_block_is_found_only_after_its_kv_was_written():
    manager = make()
    first, second = Request("a", list(range(9))), Request("b", list(range(9)))
    manager.allocate(first, 9)
    assert manager.find_cached_prefix(second) == []
    first.num_computed_tokens = 7
    manager.publish(first)
    assert [block.block_id for block in manager.find_cached_prefix(second)] == [0]


def test_full_blocks_of_output_tokens_are_cached_too():
    manager, request = make(), Request("a", [1, 2, 3])
    compute(manager, request)
    for token_id in range(10, 16):
        request.token_ids.append(token_id)
        assert manager.allocate(request, len(request.token_ids)) is not None
        request.num_computed_tokens += 1
        manager.publish(request)
    manager.free(request)
    assert compute(manager, Request("b", [*request.token_ids, 5])) == 8


def test_a_prefix_is_shared_only_under_the_same_salt():
    manager, prompt = make(num_blocks=20), list(range(9))
    compute(manager, Request("none", prompt))
    compute(manager, Request("a", prompt, cache_salt="a"))
    assert [len(manager.find_cached_prefix(Request("x", prompt, cache_salt=s))) for s in (None, "a", "b")] == [2, 2, 0]


def test_without_prefix_caching_nothing_is_hashed_or_cached(monkeypatch):
    def never(*parts):
        raise AssertionError("hashed although caching is off")

    monkeypatch.setattr(block_hash, "hash_block", never)
    manager, prompt = make(caching=False), list(range(9))
    first = Request("a", prompt)
    assert compute(manager, first) == 0
    manager.free(first)
    assert numbers(manager) == (8, 0, 0)
    assert compute(manager, Request("b", prompt)) == 0


def test_when_every_digest_collides_nobody_gets_the_kv_of_another_prompt(monkeypatch):
    monkeypatch.setattr(block_hash, "hash_block", lambda *parts: b"same")
    manager = make(num_blocks=20)
    first = Request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(manager, first)
    assert manager.find_cached_prefix(Request("b", [9, 9, 9, 9, 5, 6, 7, 8, 9])) == []
    assert manager.find_cached_prefix(Request("c", [5, 6, 7, 8, 9])) == [], "equal tokens at another place"
    assert manager.find_cached_prefix(Request("d", first.token_ids, cache_salt="s")) == []
    assert len(manager.find_cached_prefix(Request("e", first.token_ids))) == 1, "the one block that is published"
    manager.audit([first])


def test_equal_second_blocks_after_different_first_ones_are_different_contents():
    manager = make()
    compute(manager, Request("a", [1, 1, 1, 1, 5, 5, 5, 5, 0]))
    assert manager.find_cached_prefix(Request("b", [2, 2, 2, 2, 5, 5, 5, 5, 0])) == []


def test_the_tail_of_a_prompt_computed_twice_is_not_kept_longer_than_its_head():
    manager = make(num_blocks=6)
    first, second = Request("a", list(range(5))), Request("b", list(range(9)))
    for request in (first, second):
        manager.allocate(request, len(request.token_ids))
    for request in (first, second):
        request.num_computed_tokens = len(request.token_ids)
        manager.publish(request)
    manager.free(first)
    manager.free(second)
    assert numbers(manager) == (4, 2, 0)
    manager.allocate(Request("c", [50] * 20), 20)
    assert len(manager.find_cached_prefix(Request("d", list(range(9))))) == 1, "the tail was evicted, the head not"


def test_a_duplicate_takes_the_place_of_a_head_that_was_evicted_meanwhile():
    manager = make(num_blocks=6)
    first, second = Request("a", list(range(5))), Request("b", list(range(9)))
    for request in (first, second):
        manager.allocate(request, len(request.token_ids))
    for request in (first, second):
        request.num_computed_tokens = len(request.token_ids)
        manager.publish(request)
    manager.free(first)
    third = Request("c", [50] * 12)
    manager.allocate(third, 12)
    assert manager.find_cached_prefix(Request("d", list(range(9)))) == []
    manager.free(second)
    assert len(manager.find_cached_prefix(Request("d", list(range(9))))) == 2
    manager.audit([third])


def test_equal_prompts_come_to_share_one_chain_of_contents():
    manager, prompt = make(num_blocks=40), list(range(41))
    first, second, third = (Request(name, prompt) for name in "abc")
    for request in (first, second):
        manager.allocate(request, 41)
    for request in (first, second):
        request.num_computed_tokens = 41
        manager.publish(request)
    assert compute(manager, third) == 40
    for a, b, c in zip(first.block_contents, second.block_contents, third.block_contents, strict=True):
        assert a is b is c


def test_utilization_is_written_tokens_over_slots_in_use():
    manager = make(num_blocks=20)
    assert manager.utilization([]) == 0
    first = Request("a", list(range(9)))
    compute(manager, first)
    assert manager.utilization([first]) == 9 / 12
    second = Request("b", [*range(8), 99, 99])
    assert compute(manager, second) == 8
    assert manager.utilization([first, second]) == (8 + 1 + 2) / 16, "shared tokens and slots count once"


def test_audit_names_a_request_that_should_not_hold_blocks_and_one_that_should():
    manager, request = make(), Request("a", [1])
    manager.allocate(request, 1)
    with pytest.raises(AssertionError, match="'a'"):
        manager.audit([])
    manager.free(request)
    with pytest.raises(AssertionError, match="'a'"):
        manager.audit([request])


def test_finding_a_very_long_prefix_again_takes_linear_time(monkeypatch):
    manager = make(num_blocks=6100, block_size=4)
    prompt = [1] * 12_001
    first, second = Request("a", prompt), Request("b", prompt)
    for request in (first, second):
        manager.allocate(request, len(prompt))
    for request in (first, second):
        request.num_computed_tokens = len(prompt)
        manager.publish(request)
    third = Request("c", prompt)
    compared = 0
    real = block_hash.same_content

    def counting(a, b):
        nonlocal compared
        x, y = a, b
        while x is not y and x is not None and y is not None:
            compared += 1
            x, y = x.parent, y.parent
        return real(a, b)

    monkeypatch.setattr("octavo.kvcache.block_pool.same_content", counting)
    assert len(manager.find_cached_prefix(third)) == 3000
    assert compared == 3000
