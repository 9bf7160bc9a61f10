"""n > 1: the prompt is computed once, samples start from its blocks, and each is a request of its own."""

import pytest
from fake_runner import digests, sample
from scheduler_world import World, make_world

from octavo.errors import InvalidInput
from octavo.protocol.messages import FinishReason


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 97 for i in range(length)]


def starts(world: World) -> dict[str, int]:
    """Where the requests begin that get a row in the last step."""
    step = world.last_step
    first = dict(zip(step.request_ids, step.num_computed_tokens, strict=True))
    return {new.request_id: first[new.request_id] for new in step.new_requests}


def peak(n: int, num_requests: int, caching: bool) -> int:
    world = make_world(num_blocks=800, caching=caching, budget=512)
    for i in range(num_requests):
        world.add_samples(str(i), prompt(1000), n, max_tokens=48)
    world.drain()
    assert world.scheduler.stats().num_preemptions == 0
    return world.scheduler.stats().kv_blocks_peak_in_use


# Memory


@pytest.mark.parametrize("caching", [True, False])
def test_ten_samples_of_a_thousand_tokens_take_less_than_twice_the_blocks_of_one(caching):
    one, ten = peak(1, 1, caching), peak(10, 1, caching)
    assert one == 66
    assert ten < 2 * one, f"{ten} blocks against {one}"
    if not caching:
        assert peak(1, 10, caching) > 9 * one


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40])
def test_the_prompt_is_computed_once_and_its_last_token_by_each_sample(length, caching):
    world = make_world(num_blocks=60, caching=caching, budget=24)
    world.add_samples("a", prompt(length), 5, max_tokens=3)
    num_prompt_tokens, begins = 0, {}
    while world.live:
        world.step()
        step = world.last_step
        begins |= starts(world)
        for start, num_tokens in zip(step.num_computed_tokens, step.num_scheduled_tokens, strict=True):
            num_prompt_tokens += max(0, min(start + num_tokens, length) - start)
    world.drain()
    assert num_prompt_tokens == length + 4
    assert begins == {"0_a": 0, **{f"{i}_a": length - 1 for i in range(1, 5)}}


def test_copies_are_made_only_of_the_block_in_which_samples_part():
    world = make_world(num_blocks=30, max_num_seqs=3)
    world.add_samples("a", prompt(20), 4, max_tokens=6)
    world.step()
    tail = world.scheduler._kv.block_ids("0_a")[-1]
    world.step()
    copies = world.last_step.block_copies
    assert [source for source, _ in copies] == [tail] * 3, "for samples 1 and 2, and for the hold"
    assert world.scheduler._kv.block_ids("0_a")[-1] == tail
    world.step()
    world.step_until(lambda: world.last_step.new_requests)
    assert world.last_step.block_copies == [], "the last sample takes over the block of the hold"
    world.drain()


def test_a_request_with_one_sample_copies_nothing_and_keeps_its_id():
    world = make_world(num_blocks=12, block_size=8)
    for i in range(3):
        world.add(str(i), prompt(13, i % 2), max_tokens=30)
    while world.live:
        world.step()
        assert world.last_step.block_copies == [] and set(world.last_step.request_ids) <= set("012")
    assert world.scheduler.stats().num_preemptions > 0


def test_a_hold_is_given_up_before_anybody_is_preempted():
    world = make_world(num_blocks=12, block_size=8, max_num_seqs=2, caching=False)
    world.add_samples("a", prompt(52), 4, max_tokens=40)
    world.step_until(lambda: world.scheduler._groups.holds)
    held = [block.block_id for block in world.scheduler._groups.holds[0].blocks]
    assert len(held) == 7
    world.step_until(lambda: not world.scheduler._groups.holds)
    stats = world.scheduler.stats()
    assert stats.num_preemptions == 0 and stats.kv_blocks_free == 0, "the block of the hold was the last one"
    world.drain()


def test_a_sample_that_finds_the_hold_given_up_computes_the_prompt_for_those_after_it():
    world = make_world(num_blocks=12, block_size=8, max_num_seqs=2, caching=False)
    world.add_samples("a", prompt(52), 4, max_tokens=40)
    first_starts: dict[str, int] = {}
    while world.live:
        world.step()
        first_starts = starts(world) | first_starts
    assert first_starts == {"0_a": 0, "1_a": 51, "2_a": 0, "3_a": 51}
    world.drain()


@pytest.mark.parametrize("length", [31, 32])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_a_prompt_that_fills_the_pool_are_served_one_after_the_other(caching, length):
    world = make_world(num_blocks=4 if length == 31 else 5, block_size=8, caching=caching)
    world.add_samples("a", prompt(length), 3, max_tokens=30)
    world.drain()
    assert world.scheduler.stats().num_preemptions <= 3


def test_a_request_that_goes_first_is_not_kept_waiting_by_a_hold_nobody_uses():
    world = make_world(num_blocks=10, block_size=8, policy="priority", max_num_seqs=1, caching=False)
    world.add_samples("low", prompt(60), 2, priority=5, max_tokens=1)
    world.step()
    assert world.scheduler._groups.holds and world.scheduler.num_running == 0
    world.add("high", prompt(30, 1), priority=1)
    world.step()
    assert world.last_step.request_ids == ["high"] and not world.scheduler._groups.holds
    world.drain()


def test_a_hold_is_kept_if_giving_it_up_would_not_let_the_first_in_the_queue_start():
    world = make_world(num_blocks=13, block_size=8, policy="priority", max_num_seqs=2, caching=False)
    world.add_samples("low", prompt(30), 2, priority=5, max_tokens=1)
    world.step()
    world.add("high", prompt(30, 1), priority=0, max_tokens=20)
    world.add("long", prompt(80, 2), priority=1)
    world.step()
    assert world.last_step.request_ids == ["high"]
    assert world.scheduler._groups.holds, "long waits for high, whatever low does"
    world.drain()


def test_a_sample_that_lacks_a_block_does_not_give_up_the_prompt_it_starts_from():
    world = make_world(num_blocks=8, block_size=8, policy="priority", caching=False)
    world.add_samples("low", prompt(30), 3, priority=5, max_tokens=1)
    world.step()
    world.add("high", prompt(30, 1), priority=0)
    world.step()
    assert world.last_step.request_ids == ["high"], "one block is missing"
    assert world.scheduler._groups.holds
    world.drain()


def test_the_hold_of_the_last_in_the_queue_is_given_up_first():
    world = make_world(num_blocks=40, max_num_seqs=2)
    for name in "ab":
        world.add_samples(name, prompt(20), 3)
    world.step()
    assert world.scheduler._groups.give_up_last()
    assert [group.message.request_id for group in world.scheduler._groups._holding] == ["a"]
    world.check_now()
    world.drain()


def test_a_preempted_sample_resumes_as_any_request_and_leaves_the_hold_to_those_that_have_not_started():
    world = make_world(num_blocks=40, max_num_seqs=2, caching=False)
    world.add_samples("a", prompt(20), 4)
    world.step()
    world.step()
    (victim,) = (request for request in world.running() if request.request_id == "1_a")
    num_computed = victim.num_computed_tokens
    world.scheduler._preempt(victim)
    world._preempted("1_a", num_computed)
    world.step()
    assert starts(world) == {"1_a": 0} and world.scheduler._groups.holds
    world.drain()


# Turns


def test_more_samples_than_may_run_are_served_in_turns_and_count_as_waiting():
    world = make_world(num_blocks=60, max_num_seqs=3)
    samples = world.add_samples("a", prompt(20), 8, max_tokens=4)
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 8)
    assert len(world.scheduler._requests) == 1, "the others cost nothing until it is their turn"
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 7)
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (3, 5)
    world.drain()
    assert [known.index for known in world.ended] == list(range(8))
    assert all(len(known.output) == 4 for known in samples)


def test_samples_stand_together_before_a_request_that_came_later():
    world = make_world(num_blocks=60, max_num_seqs=2)
    world.add_samples("a", prompt(20), 4, max_tokens=4)
    world.add("b", prompt(20, 1), max_tokens=2)
    world.drain()
    order = [(known.message.request_id, known.index) for known in world.ended]
    assert order == [("b", 0), ("a", 0), ("a", 1), ("a", 2), ("a", 3)], "b ran while the prompt was computed"


def test_the_first_token_of_sample_0_may_be_its_last():
    world = make_world(num_blocks=30)
    samples = world.add_samples("a", prompt(20), 3, max_tokens=1)
    assert [out.request_id for out in world.step()] == ["0_a"]
    assert [out.request_id for out in world.step()] == ["1_a", "2_a"]
    assert starts(world) == {"1_a": 19, "2_a": 19}
    world.drain()
    assert all(known.finish_reason is FinishReason.LENGTH for known in samples)


def test_sample_0_may_end_with_an_end_of_sequence_token_at_once():
    world = make_world(num_blocks=30)
    eos = sample(digests(prompt(20))[-1], 0, [])
    first, *others = world.add_samples("a", prompt(20), 3, eos=(eos,))
    world.drain()
    assert (first.output, first.finish_reason) == ([eos], FinishReason.STOP)
    assert all(len(known.output) > 1 for known in others)


def test_each_sample_is_preempted_by_itself_the_last_first():
    world = make_world(num_blocks=9, block_size=8, caching=False)
    samples = world.add_samples("a", prompt(20), 3, max_tokens=40)
    world.step_until(lambda: world.scheduler.stats().num_preemptions)
    assert [known.num_preemptions for known in samples] == [0, 0, 1]
    world.drain()


# Ends


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_when_the_sample_that_computes_the_prompt_is_aborted_the_next_takes_over(num_steps):
    world = make_world(num_blocks=30, budget=16)
    world.add_samples("a", prompt(60), 3)
    for _ in range(num_steps):
        world.step()
    world.abort(["0_a"])
    world.step_until(lambda: world.last_step is not None and "1_a" in world.last_step.request_ids)
    world.drain()
    assert [len(known.output) for known in world.ended] == [0, 8, 8]


def test_when_sample_0_is_aborted_while_its_step_is_computed_the_next_takes_over():
    world = make_world(num_blocks=30)
    world.add_samples("a", prompt(20), 3)
    assert world.step(abort_in_flight=["0_a"]) == []
    world.drain()
    assert [len(known.output) for known in world.ended] == [0, 8, 8]


def test_when_sample_0_fails_the_next_takes_over():
    world = make_world(num_blocks=30)
    first, *others = world.add_samples("a", prompt(20), 3)
    world.step(failing=["0_a"])
    assert first.last.error == "0_a cannot go on"
    world.drain()
    assert all(known.finish_reason is FinishReason.LENGTH and known.last.error is None for known in others)


@pytest.mark.parametrize("num_steps", range(6))
def test_aborting_a_request_ends_all_its_samples_whatever_they_do(num_steps):
    world = make_world(num_blocks=30, budget=16, max_num_seqs=2)
    world.add_samples("a", prompt(40), 4)
    for _ in range(num_steps):
        world.step()
    world.abort(["a"])
    assert [known.index for known in world.ended] == [0, 1, 2, 3]
    assert not world.scheduler.has_unfinished_requests()
    assert world.scheduler.stats().kv_blocks_in_use == world.scheduler.num_waiting == 0
    world.drain()


@pytest.mark.parametrize("index", [1, 3])
def test_a_sample_aborted_before_its_turn_is_left_out(index):
    world = make_world(num_blocks=30, max_num_seqs=1)
    world.add_samples("a", prompt(20), 4)
    world.step()
    world.abort([f"{index}_a"])
    assert world.scheduler.num_waiting == 2
    world.abort([f"{index}_a"])
    world.drain()
    assert sorted(known.index for known in world.ended if known.output) == sorted({0, 1, 2, 3} - {index})


def test_when_the_samples_that_wait_are_aborted_their_prompt_is_let_go():
    world = make_world(num_blocks=30, max_num_seqs=1, caching=False)
    world.add_samples("a", prompt(20), 3, max_tokens=1)
    world.step()
    assert world.scheduler.stats().kv_blocks_in_use == 2
    world.abort(["1_a"])
    assert world.scheduler.stats().kv_blocks_in_use == 2
    world.abort(["2_a"])
    assert world.scheduler.stats().kv_blocks_in_use == 0
    assert not world.scheduler.has_unfinished_requests()


def test_ids_that_could_be_taken_for_one_another_are_refused():
    world = make_world(num_blocks=30)
    world.add("1_a", prompt(5))
    with pytest.raises(InvalidInput, match=r"'a' \(its sample '1_a'\) is in use"):
        world.add_samples("a", prompt(5), 2)
    world.add_samples("b", prompt(5), 2)
    for request_id in ("b", "0_b", "1_b"):
        with pytest.raises(InvalidInput, match=f"'{request_id}' is in use"):
            world.add(request_id, prompt(5))
    world.add("2_b", prompt(5))
    with pytest.raises(InvalidInput, match="is in use"):
        world.add_samples("b", prompt(5), 3)
    world.check_now()
    world.drain()


def test_the_id_of_an_ended_sample_is_free_when_all_samples_have_ended():
    world = make_world(num_blocks=30)
    world.add_samples("a", prompt(20), 2)
    world.step()
    world.abort(["0_a"])
    with pytest.raises(InvalidInput, match="is in use"):
        world.add("0_a", prompt(5))
    world.abort(["1_a"])
    world.add("0_a", prompt(5))
    world.abort(["0_a"])
    world.add_samples("a", prompt(20), 2)
    world.drain()


def test_after_a_failed_step_nothing_that_it_copied_is_used():
    for lost_step in range(2, 6):
        world = make_world(num_blocks=40, max_num_seqs=3, caching=False)
        world.add_samples("a", prompt(20), 6, max_tokens=4)
        for number in range(lost_step + 1):
            world.step(lose="unseen" if number == lost_step else None)
        assert world.scheduler._groups.holds == []
        world.drain()


# Numbers


def test_tokens_and_lookups_of_a_prompt_are_counted_once_for_all_samples():
    world = make_world(num_blocks=60)
    for name in "ab":
        samples = world.add_samples(name, prompt(40), 4, max_tokens=5)
        world.drain()
    stats = world.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (80, 40)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 32)
    assert [known.last.num_cached_tokens for known in samples] == [32] * 4


def test_a_sample_that_takes_over_does_not_change_what_the_request_found_cached():
    world = make_world(num_blocks=60, budget=16)
    world.add_samples("a", prompt(60), 3)
    world.step()
    world.step()
    world.abort(["0_a"])
    world.drain()
    assert [known.last.num_cached_tokens for known in world.ended] == [0, 0, 0]
    assert world.scheduler.stats().prompt_tokens == 60


def test_samples_share_what_the_cache_holds_and_leave_their_own_tokens_to_it():
    world = make_world(num_blocks=60)
    samples = world.add_samples("a", prompt(20), 3, max_tokens=30)
    world.drain()
    for known in samples:
        again = world.add(f"again {known.index}", prompt(20) + known.output, max_tokens=1)
        world.drain()
        assert again.last.num_cached_tokens == 48


def _hold(scheduler):
    return scheduler._groups._holding[0]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda s: s._kv.release(_hold(s).hold),
        lambda s: s._groups._holding.clear(),
        lambda s: setattr(_hold(s), "hold", None),
        lambda s: setattr(_hold(s), "front", None),
        lambda s: setattr(_hold(s).front, "num_preemptions", 1),
        lambda s: setattr(_hold(s), "num_unfinished", 9),
        lambda s: _hold(s).unstarted.popitem(),
        lambda s: setattr(s._groups, "num_unstarted", 0),
        lambda s: s._groups._by_id.pop("2_a"),
        lambda s: setattr(s._requests["0_a"], "group", None),
        lambda s: setattr(_hold(s).hold.blocks[0], "ref_count", 1),
    ],
)
def test_audit_finds_whatever_is_broken_in_a_group(break_it):
    world = make_world(num_blocks=30, max_num_seqs=2)
    world.add_samples("a", prompt(40), 5)
    world.step()
    world.step()
    break_it(world.scheduler)
    with pytest.raises(AssertionError):
        world.scheduler.audit()
