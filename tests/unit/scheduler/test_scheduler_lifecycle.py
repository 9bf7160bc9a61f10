"""Ends of requests: aborts in every phase, ids used again, timings, and answers that do not belong to the step."""

import pytest
from scheduler_world import make_world

from octavo.protocol.messages import FinishReason, TokenLogprobs
from octavo.protocol.scheduler_output import ModelRunnerOutput

PROMPT = list(range(40))


def test_an_abort_frees_the_blocks_at_once_in_every_phase():
    world = make_world(num_blocks=30, budget=16, max_num_seqs=2)
    for name in ("decoding", "prefilling", "waiting"):
        world.add(name, PROMPT if name == "prefilling" else [1, 2, 3], max_tokens=30)
    world.step()
    assert [k for k in ("decoding", "prefilling") if world.scheduler._kv.block_ids(k)] == ["decoding", "prefilling"]
    for name in ("waiting", "prefilling", "decoding"):
        world.abort([name])
        assert world.scheduler._kv.block_ids(name) == []
    assert world.scheduler.stats().kv_blocks_in_use == 0
    assert not world.scheduler.has_unfinished_requests()
    assert world.scheduler.schedule().released_request_ids == ["prefilling", "decoding"], (
        "the one that had no row is not"
    )


def test_aborting_unknown_or_ended_ids_does_nothing():
    world = make_world(num_blocks=30)
    world.add("a", PROMPT, max_tokens=1)
    world.drain()
    assert world.scheduler.abort_requests(["a", "nobody"]) == []


def test_an_id_named_twice_in_one_abort_is_ended_once():
    world = make_world(num_blocks=30)
    world.add("a", PROMPT)
    assert len(world.scheduler.abort_requests(["a", "a"])) == 1


def test_a_request_aborted_while_its_step_is_computed_gets_no_token():
    world = make_world(num_blocks=30)
    known = world.add("a", PROMPT)
    other = world.add("b", PROMPT[:5])
    assert [out.request_id for out in world.step(abort_in_flight=["a"])] == ["b"]
    assert known.output == [] and known.finish_reason is FinishReason.ABORT
    world.drain()
    assert len(other.output) == 8


def test_an_id_may_be_used_again_right_after_its_request_has_ended():
    world = make_world(num_blocks=30)
    for length in (5, 9, 20):
        known = world.add("a", PROMPT[:length], max_tokens=3)
        world.drain()
        assert known.finish_reason is FinishReason.LENGTH
    assert world.scheduler.stats().kv_blocks_in_use == 0


def test_an_id_used_again_while_the_old_request_is_in_flight_gets_only_its_own_tokens():
    world = make_world(num_blocks=30)
    world.add("a", PROMPT)
    step = world.scheduler.schedule()
    result = world.runner.execute(step)
    world.abort(["a"])
    new = world.add("a", PROMPT[:7])
    assert world.scheduler.update(step, result) == []
    world.step()
    assert world.last_step.released_request_ids == ["a"]
    assert world.last_step.new_requests[0].token_ids == PROMPT[:7]
    world.drain()
    assert len(new.output) == 8


def test_every_output_carries_timings_in_order():
    world = make_world(num_blocks=30, budget=16)
    known = world.add("a", PROMPT, max_tokens=3)
    timings = []
    while world.live:
        timings += [out.timings for out in world.step()]
    assert len(timings) == 3
    first, last = timings[0], timings[-1]
    assert known.message.arrival_time == first.arrival <= first.scheduled <= first.first_token == first.last_token
    assert (last.scheduled, last.first_token) == (first.scheduled, first.first_token)
    assert last.last_token > first.last_token


def test_a_request_aborted_before_it_ran_has_no_later_times():
    world = make_world(num_blocks=30)
    world.add("a", PROMPT)
    (out,) = world.scheduler.abort_requests(["a"])
    assert (out.timings.scheduled, out.timings.first_token, out.timings.last_token) == (0, 0, 0)


def test_logprobs_reach_the_output_of_their_request():
    world = make_world(num_blocks=30)
    for name in "ab":
        world.add(name, PROMPT)
    step = world.scheduler.schedule()
    logprobs = [TokenLogprobs(token_ids=[5], logprobs=[-0.5], sampled_rank=1)]
    result = ModelRunnerOutput(request_ids=step.request_ids, sampled_token_ids=[[5], [6]], logprobs={"b": logprobs})
    assert [out.logprobs for out in world.scheduler.update(step, result)] == [None, logprobs]


@pytest.mark.parametrize(
    ("ids", "sampled"),
    [(["a"], [[1]]), (["b", "a"], [[1], []]), (["a", "b"], [[1]]), (["a", "b"], [[], []]), (["a", "b"], [[1], [1]])],
)
def test_an_answer_that_does_not_fit_the_step_is_refused_and_changes_nothing(ids, sampled):
    world = make_world(num_blocks=30, budget=20)
    world.add("a", PROMPT[:5])
    world.add("b", PROMPT)
    step = world.scheduler.schedule()
    with pytest.raises(RuntimeError, match="runner"):
        world.scheduler.update(step, ModelRunnerOutput(request_ids=ids, sampled_token_ids=sampled))
    world.check_now()
    assert len(world.scheduler.update(step, world.runner.execute(step))) == 1


def test_a_step_is_updated_once_and_before_the_next_is_scheduled():
    world = make_world(num_blocks=30)
    world.add("a", PROMPT)
    step = world.scheduler.schedule()
    with pytest.raises(RuntimeError, match="before the last step was updated"):
        world.scheduler.schedule()
    result = world.runner.execute(step)
    world.scheduler.update(step, result)
    with pytest.raises(RuntimeError, match="not the last step's"):
        world.scheduler.update(step, result)


def test_with_nothing_to_do_a_step_is_empty_and_may_follow_another():
    world = make_world(num_blocks=30)
    assert world.scheduler.schedule().request_ids == []
    assert world.scheduler.schedule().released_request_ids == []


@pytest.mark.parametrize(
    "break_it",
    [
        lambda s: s._running.reverse(),
        lambda s: s._running.pop(),
        lambda s: s._requests.pop("0"),
        lambda s: s._waiting._entries.reverse(),
        lambda s: setattr(s._running[0], "status", s._waiting.peek().status),
        lambda s: s._kv._tables.pop("0"),
        lambda s: setattr(s._running[0], "num_computed_tokens", 1000),
        lambda s: setattr(s._running[0], "num_admitted_tokens", 1000),
    ],
)
def test_audit_finds_whatever_is_broken(break_it):
    world = make_world(num_blocks=30, max_num_seqs=2)
    for i in range(4):
        world.add(str(i), [i] * 20)
    world.step()
    break_it(world.scheduler)
    with pytest.raises(AssertionError):
        world.scheduler.audit()


def test_each_request_is_named_once_when_it_is_first_begun_and_by_its_own_id():
    world = make_world(num_blocks=14, budget=16)
    world.add("long", list(range(40)), max_tokens=100)
    world.add_samples("many", [1, 2, 3], 3, max_tokens=80)
    world.add("late", [4, 5], max_tokens=60)
    world.add("aborted", [6])
    world.abort(["aborted"])
    named = []
    for _ in range(400):
        world.step()
        named += world.scheduler.first_scheduled
    assert world.scheduler.stats().num_preemptions > 0
    assert named == ["long", "many", "late"]
    assert not world.live


def test_a_request_whose_first_step_failed_is_not_named_again():
    world = make_world(num_blocks=14)
    world.add("a", [1, 2])
    world.step(lose="unseen")
    assert world.scheduler.first_scheduled == ["a"]
    world.step()
    assert world.scheduler.first_scheduled == []
