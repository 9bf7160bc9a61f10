"""Situations users really meet, played through with a fake model. `World` checks budgets, order and blocks as well."""

import pytest
from scheduler_world import make_world

from octavo.errors import InvalidInput
from octavo.kvcache import block_hash
from octavo.protocol.messages import FinishReason


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 97 for i in range(length)]


def scheduled(world) -> dict[str, int]:
    step = world.last_step
    return dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))


# Memory


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_preempted_many_times_say_what_they_say_alone(caching, policy):
    world = make_world(num_blocks=14, caching=caching, policy=policy)
    known = [world.add(str(i), prompt(3, i), max_tokens=200, priority=-i) for i in range(4)]
    world.drain()
    assert sum(k.num_preemptions for k in known) >= 3
    assert max(k.num_preemptions for k in known) >= 2
    assert all(len(k.output) == 200 for k in known)


@pytest.mark.parametrize("long_first", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_a_long_request_in_a_pool_barely_larger_than_it_does_not_thrash(long_first, caching):
    world = make_world(num_blocks=42, caching=caching, budget=64)
    order = ["long", *"abcdefgh"] if long_first else [*"abcdefgh", "long"]
    for seed, name in enumerate(order):
        world.add(name, prompt(600 if name == "long" else 10, seed), max_tokens=60)
    world.drain(max_steps=600)
    preemptions = world.scheduler.stats().num_preemptions
    assert preemptions <= 8, f"{preemptions} preemptions"


def test_short_decoders_that_keep_coming_neither_starve_a_long_request_nor_thrash_it():
    world = make_world(num_blocks=42, budget=64)
    for i in range(6):
        world.add(f"s{i}", prompt(10, i), max_tokens=30 + i)
    long = world.add("long", prompt(600, 50), max_tokens=60)
    for i in range(6, 60):
        world.step()
        world.add(f"s{i}", prompt(10, i), max_tokens=30)
    world.drain(max_steps=1000)
    assert long.num_preemptions <= 3


def test_a_preempted_request_is_not_resumed_before_its_memory_is_there_for_longer_than_a_step():
    world = make_world(num_blocks=8, caching=False)
    for i in range(2):
        world.add(str(i), prompt(40, i), max_tokens=60)
    resumed_at = {}
    while world.live:
        world.step()
        for new in world.last_step.new_requests:
            resumed_at[new.request_id] = world.num_steps
        for request_id in world.last_step.released_request_ids:
            if request_id in world.live:
                assert world.num_steps - resumed_at[request_id] >= 8
    assert world.scheduler.stats().num_preemptions >= 1


def test_a_prompt_that_fills_all_blocks_but_one_is_served():
    world = make_world(num_blocks=50, budget=2048)
    known = world.add("a", prompt(49 * 16), max_tokens=100)
    world.drain()
    assert known.finish_reason is FinishReason.LENGTH
    assert len(known.output) == 16, "clamped to the pool"


def test_the_longest_prompt_that_fits_the_pool_gets_one_token_and_one_more_is_refused_with_both_numbers():
    world = make_world(num_blocks=50, max_model_len=2000, budget=2048)
    known = world.add("a", prompt(799), max_tokens=5)
    for length in (800, 1002):
        with pytest.raises(InvalidInput, match=rf"{length} tokens.* holds 800 \(50 blocks x 16\)"):
            world.add("b", prompt(length))
    world.drain()
    assert len(known.output) == 1 and known.finish_reason is FinishReason.LENGTH


def test_a_refused_prompt_leaves_nothing_behind_and_nobody_waits_for_it():
    world = make_world(num_blocks=50, max_model_len=2000)
    with pytest.raises(InvalidInput):
        world.add("a", prompt(1002))
    assert world.scheduler.num_waiting == 0
    world.add("a", prompt(5))
    assert [out.request_id for out in world.step()] == ["a"]


def test_a_prompt_beyond_max_model_len_is_refused_with_both_numbers():
    world = make_world(num_blocks=50, max_model_len=100)
    world.add("a", prompt(99))
    with pytest.raises(InvalidInput, match=r"has 100 tokens.*max_model_len is 100"):
        world.add("b", prompt(100))


def test_an_empty_prompt_and_a_live_id_are_refused():
    world = make_world(num_blocks=4)
    world.add("a", prompt(5))
    with pytest.raises(InvalidInput, match="0 tokens"):
        world.add("b", [])
    with pytest.raises(InvalidInput, match="'a' is in use"):
        world.add("a", prompt(5))


def test_without_chunks_a_budget_below_the_longest_sequence_is_refused():
    with pytest.raises(InvalidInput, match=r"max_num_batched_tokens=50 .* 64 tokens"):
        make_world(num_blocks=4, budget=50, chunked=False)


def test_a_request_that_outgrows_the_pool_alone_ends_with_length():
    world = make_world(num_blocks=3, block_size=8, max_model_len=500)
    known = world.add("a", prompt(3), max_tokens=300)
    world.drain()
    assert (known.finish_reason, len(known.output), known.num_preemptions) == (FinishReason.LENGTH, 21, 0)


# Preemption


def preempt_one(policy: str, priorities: list[int]) -> list[str]:
    """Three requests fill the pool and one has to go: who?"""
    world = make_world(num_blocks=6, block_size=8, policy=policy, caching=False)
    for i, value in enumerate(priorities):
        world.add(f"r{i}", prompt(9, i), priority=value, max_tokens=14)
    for _ in range(30):
        world.step()
        if world.scheduler.stats().num_preemptions:
            victims = [i for i in world.last_step.released_request_ids if i in world.live]
            world.drain()
            return victims
    raise AssertionError("nobody was preempted")


def test_fcfs_preempts_the_newest_whatever_the_priorities():
    assert preempt_one("fcfs", [5, 0, 0])[0] == "r2"


def test_priority_preempts_the_largest_number_and_the_newest_among_equals():
    assert preempt_one("priority", [5, 0, 0])[0] == "r0"
    assert preempt_one("priority", [1, 7, 3])[0] == "r1"
    assert preempt_one("priority", [4, 4, 4])[0] == "r2"
    assert preempt_one("priority", [4, 4, -1])[0] == "r1"


def test_a_resumed_request_is_not_preempted_before_it_has_come_further_than_it_was():
    world = make_world(num_blocks=12, block_size=8, budget=4, policy="priority", caching=False)
    low = world.add("low", prompt(70, 2), priority=5, max_tokens=3)
    for _ in range(15):
        world.step()
    world.step(lose="unseen")
    lost = low.computed_when_preempted
    second = world.add("second", prompt(14, 3), max_tokens=30)
    world.step_until(lambda: second.num_preemptions)
    computed = next(request.num_computed_tokens for request in world.running() if request.request_id == "low")
    assert 0 < computed <= lost, "the only one of lower priority is protected, so `second` itself gives way"
    world.drain()
    assert low.num_preemptions == 1


def test_nobody_is_admitted_in_a_step_that_preempted_though_there_is_room():
    world = make_world(num_blocks=10, block_size=8, policy="priority", caching=False)
    high = world.add("high", prompt(7, 1), max_tokens=40)
    low = world.add("low", prompt(60, 2), priority=5, max_tokens=8)
    world.step()
    world.add("middle", prompt(20, 3), priority=1)
    world.step_until(lambda: low.num_preemptions)
    assert scheduled(world) == {"high": 1} and high.finish_reason is None
    world.step()
    assert scheduled(world) == {"high": 1, "middle": 20}
    world.drain()


def test_admission_counts_the_block_of_the_first_output_token():
    world = make_world(num_blocks=3, caching=False)
    for name in "ab":
        world.add(name, prompt(16), max_tokens=2)
    world.step()
    assert scheduled(world) == {"a": 16}, "each needs a second block at once, and there are three"
    world.drain()
    assert world.scheduler.stats().num_preemptions == 0


def test_preempting_an_unfinished_prompt_gives_back_the_blocks_promised_to_it_too():
    world = make_world(num_blocks=14, block_size=8, threshold=1, policy="priority", caching=False)
    decoders = [world.add(f"decoder{i}", prompt(3, i), max_tokens=30) for i in range(3)]
    low = world.add("prompt", prompt(60, 2), priority=5)
    world.step_until(lambda: low.num_preemptions)
    assert set(scheduled(world)) == {"decoder0", "decoder1", "decoder2"}, "all need a block now, and it held only two"
    world.drain()
    assert [known.num_preemptions for known in decoders] == [0, 0, 0]


def test_a_preempted_request_comes_back_with_all_its_tokens_and_before_everybody_who_waits():
    world = make_world(num_blocks=4, block_size=8, caching=False)
    world.add("a", prompt(8, 1), max_tokens=20)
    b = world.add("b", prompt(8, 2), max_tokens=20)
    world.step_until(lambda: b.num_preemptions)
    world.add("c", prompt(2, 3))
    so_far = prompt(8, 2) + b.output
    world.step_until(lambda: world.last_step.new_requests)
    new = world.last_step.new_requests[0]
    assert (new.request_id, new.token_ids, new.num_prompt_tokens) == ("b", so_far, 8)
    world.drain()


def test_a_resumed_request_recomputes_only_what_the_cache_lost():
    world = make_world(num_blocks=4, block_size=8)
    world.add("a", prompt(8, 1), max_tokens=11)
    b = world.add("b", prompt(8, 2), max_tokens=20)
    world.drain()
    assert b.num_preemptions == 1
    stats = world.scheduler.stats()
    assert stats.prefix_cache_queries == 24 and stats.prefix_cache_hits == 8
    assert b.last.num_cached_tokens == 0, "what the first admission found"


def test_after_a_failed_step_everything_is_computed_anew_and_the_engine_goes_on():
    world = make_world(num_blocks=20)
    for i in range(4):
        world.add(str(i), prompt(20, i), max_tokens=20)
    for fault in (None, "computed", None, None, "unseen", "unseen", None):
        world.step(lose=fault)
    assert world.scheduler.num_running == 4
    world.drain()


def test_a_row_whose_release_was_lost_with_a_failed_step_is_released_by_the_next():
    world = make_world(num_blocks=20)
    world.add("done", prompt(5), max_tokens=1)
    world.add("other", prompt(5, 1), max_tokens=9)
    world.step()
    world.step(lose="unseen")
    assert "done" in world.runner.rows
    world.step()
    assert set(world.runner.rows) == {"other"}


# Budgets and order


def test_decoders_get_their_token_in_every_step_while_a_long_prompt_is_computed():
    world = make_world(num_blocks=100, budget=40)
    for i in range(8):
        world.add(f"d{i}", prompt(4, i), max_tokens=60)
    world.step()
    long = world.add("long", prompt(900, 9), max_tokens=1)
    while long.finish_reason is None:
        world.step()
        assert scheduled(world).items() >= {f"d{i}": 1 for i in range(8)}.items()
    assert long.num_chunks == 28


def test_the_threshold_leaves_budget_for_the_next_prompt():
    world = make_world(num_blocks=100, budget=100, threshold=30)
    for i in range(3):
        world.add(str(i), prompt(200, i))
    world.step()
    assert scheduled(world) == {"0": 30, "1": 30, "2": 30}
    world.drain()


def test_without_chunks_a_prompt_waits_until_the_budget_holds_all_of_it():
    world = make_world(num_blocks=30, budget=160, chunked=False, max_model_len=160)
    world.add("a", prompt(70, 1), max_tokens=3)
    world.add("b", prompt(80, 2), max_tokens=3)
    world.add("c", prompt(20, 3), max_tokens=3)
    world.add("d", prompt(5, 4), max_tokens=3)
    world.step()
    assert scheduled(world) == {"a": 70, "b": 80}, "and nobody passes the head of the queue"
    world.drain()


def test_max_num_seqs_limits_who_runs():
    world = make_world(num_blocks=50, max_num_seqs=3)
    for i in range(7):
        world.add(str(i), prompt(5, i), max_tokens=4)
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (3, 4)
    world.drain()


def test_a_budget_smaller_than_the_number_of_decoders_still_serves_everybody():
    world = make_world(num_blocks=50, budget=2)
    for i in range(6):
        world.add(str(i), prompt(9, i), max_tokens=9)
    world.drain(max_steps=80)


def test_priority_decides_who_is_admitted_first():
    world = make_world(num_blocks=50, policy="priority", max_num_seqs=1)
    for name, value in (("low", 3), ("high", -1), ("mid", 0), ("mid2", 0)):
        world.add(name, prompt(5), priority=value, max_tokens=2)
    world.drain()
    assert [known.message.request_id for known in world.ended] == ["high", "mid", "mid2", "low"]


def test_admission_promises_the_whole_prompt_not_only_its_first_chunk():
    world = make_world(num_blocks=20, budget=16, caching=False)
    world.add("a", prompt(200, 1), max_tokens=2)
    world.add("b", prompt(200, 2), max_tokens=2)
    world.step()
    assert world.scheduler.num_running == 1
    world.drain()
    assert world.scheduler.stats().num_preemptions == 0


def test_a_newcomer_leaves_a_block_for_each_decoder():
    world = make_world(num_blocks=6, caching=False)
    world.add("a", prompt(15, 1), max_tokens=40)
    world.add("b", prompt(15, 2), max_tokens=40)
    world.step()
    world.add("c", prompt(40, 3), max_tokens=4)
    world.step()
    assert world.scheduler.num_waiting == 1, "3 of the 4 available blocks are left when two are kept for the decoders"
    world.drain()


# Prefix caching


def test_the_same_prompt_of_two_whole_blocks_recomputes_its_last_block():
    world = make_world(num_blocks=10)
    first = world.add("a", prompt(32))
    world.drain()
    second = world.add("b", prompt(32))
    world.step()
    assert scheduled(world) == {"b": 16}
    world.drain()
    assert (first.last.num_cached_tokens, second.last.num_cached_tokens) == (0, 16)
    assert first.output == second.output


def test_two_equal_prompts_in_one_batch_share_only_what_has_been_written():
    world = make_world(num_blocks=40, budget=400)
    first, second = world.add("a", prompt(100)), world.add("b", prompt(100))
    world.step()
    assert scheduled(world) == {"a": 100, "b": 100}
    third = world.add("c", prompt(100))
    world.drain()
    assert [k.last.num_cached_tokens for k in (first, second, third)] == [0, 0, 96]


def test_while_a_prompt_is_computed_in_chunks_another_shares_the_chunks_that_are_done():
    world = make_world(num_blocks=40, budget=64, threshold=48)
    world.add("a", prompt(100))
    world.step()
    second = world.add("b", prompt(100))
    world.drain()
    assert second.last.num_cached_tokens == 48


def test_full_blocks_of_output_are_found_by_the_next_turn():
    world = make_world(num_blocks=40)
    first = world.add("a", prompt(10), max_tokens=40)
    world.drain()
    turn = prompt(10) + first.output + prompt(5)
    second = world.add("b", turn)
    world.drain()
    assert second.last.num_cached_tokens == 48, "50 tokens, of which the last was never computed"


def test_salts_keep_equal_prompts_apart():
    world = make_world(num_blocks=40)
    cached = []
    for number, salt in enumerate([None, "x", "y", "x", None]):
        known = world.add(str(number), prompt(40), salt=salt)
        world.drain()
        cached.append(known.last.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32]


def test_prompts_with_colliding_digests_never_share_kv(monkeypatch):
    monkeypatch.setattr(block_hash, "hash_block", lambda *parts: b"same")
    world = make_world(num_blocks=40)
    for number in range(6):
        known = world.add(str(number), prompt(50, number % 3))
        world.drain()
        assert known.last.num_cached_tokens == (16 if number == 3 else 0), "only the first prompt's first block"


def test_queries_and_hits_count_prompt_tokens_at_each_admission():
    world = make_world(num_blocks=40)
    for number in range(3):
        world.add(str(number), prompt(40), max_tokens=5)
        world.drain()
    stats = world.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (120, 64)
    assert (stats.prompt_tokens, stats.generation_tokens) == (120, 15)


def test_reset_prefix_cache_works_only_when_no_block_is_held():
    world = make_world(num_blocks=40)
    world.add("a", prompt(40))
    world.step()
    assert not world.scheduler.reset_prefix_cache()
    world.drain()
    assert world.scheduler.stats().kv_blocks_cached > 0
    assert world.scheduler.reset_prefix_cache()
    stats = world.scheduler.stats()
    assert (stats.kv_blocks_free, stats.kv_blocks_cached) == (40, 0)
    again = world.add("b", prompt(40))
    world.drain()
    assert again.last.num_cached_tokens == 0


def test_the_oldest_prompt_is_evicted_first_and_its_beginning_last():
    world = make_world(num_blocks=8, caching=True)
    for seed in (1, 2):
        world.add(f"fill{seed}", prompt(49, seed), max_tokens=1)
        world.drain()
    world.add("evict", prompt(49, 3), max_tokens=1)
    world.drain()
    found = {}
    for seed in (2, 1):
        probe = world.add(f"probe{seed}", prompt(49, seed), max_tokens=1)
        world.step()
        found[seed] = probe.last.num_cached_tokens
    assert found == {1: 16, 2: 48}
