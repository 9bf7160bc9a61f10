"""Prompt log-probabilities, prompts as embeddings, and what else passes through to the runner. `World` checks that
prompt_logprobs are whole and right, handed out once, and asked of the runner no longer than needed.
"""

import pytest
from scheduler_world import World, make_world

from octavo.protocol.messages import EngineCoreRequest, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import ModelRunnerOutput


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 97 for i in range(length)]


def outputs(world: World) -> list:
    """Every output until all have ended."""
    collected = []
    while world.live:
        collected += world.step()
    world.drain()
    return collected


@pytest.mark.parametrize("budget", [1, 7, 16, 100])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_prompt_logprobs_come_whole_with_the_first_token_whatever_the_chunks(length, budget):
    world = make_world(num_blocks=20, budget=budget)
    world.add("a", prompt(length), prompt_logprobs=0, max_tokens=3)
    lengths = [None if out.prompt_logprobs is None else len(out.prompt_logprobs) for out in outputs(world)]
    assert lengths == [length - 1, None, None]


def test_a_request_with_prompt_logprobs_computes_what_is_cached_and_leaves_it_to_others():
    world = make_world(num_blocks=40)
    cached = []
    for number, asked in enumerate([None, 0, 0, None]):
        known = world.add(str(number), prompt(40, 1 if number else 0), prompt_logprobs=asked)
        world.drain()
        cached.append(known.last.num_cached_tokens)
    assert cached == [0, 0, 0, 32]
    stats = world.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 32), "it was not looked up"


@pytest.mark.parametrize("lose", ["unseen", "computed"])
def test_chunks_computed_again_after_a_failed_step_take_the_place_of_the_old_ones(lose):
    world = make_world(num_blocks=40, budget=16)
    world.add("a", prompt(60), prompt_logprobs=3)
    for fault in (None, None, lose, None, lose):
        world.step(lose=fault)
    assert len(outputs(world)) == 8


def test_a_request_preempted_after_its_first_token_does_not_compute_them_again_and_may_use_the_cache():
    world = make_world(num_blocks=40, budget=60)
    world.add("before", prompt(60))
    known = world.add("a", prompt(60), prompt_logprobs=3)
    world.step_until(lambda: known.output)
    world.step(lose="unseen")
    world.step()
    world.step()
    (new,) = world.last_step.new_requests
    assert new.sampling_params.prompt_logprobs is None
    assert world.last_step.num_computed_tokens == [60, 48]
    world.drain()
    assert known.message.sampling_params.prompt_logprobs == 3, "what the user gave is left alone"


def test_only_the_sample_that_computes_the_prompt_has_prompt_logprobs():
    world = make_world(num_blocks=40)
    world.add_samples("a", prompt(40), 3, prompt_logprobs=0)
    assert [out.request_id for out in outputs(world) if out.prompt_logprobs is not None] == ["0_a"]


def test_a_sample_that_takes_over_hands_out_the_prompt_logprobs():
    world = make_world(num_blocks=40, budget=16)
    world.add_samples("a", prompt(40), 3, prompt_logprobs=0)
    world.step()
    world.abort(["0_a"])
    assert [out.request_id for out in outputs(world) if out.prompt_logprobs is not None] == ["1_a"]


def test_a_request_aborted_before_its_first_token_has_no_prompt_logprobs():
    world = make_world(num_blocks=40, budget=16)
    world.add("a", prompt(40), prompt_logprobs=0)
    world.step()
    (out,) = world.scheduler.abort_requests(["a"])
    assert out.prompt_logprobs is None


def test_embeddings_and_bad_words_pass_through_whenever_a_request_gets_a_row():
    world = make_world(num_blocks=40)
    known = world.add("a", prompt(20), embeds=True)
    message = EngineCoreRequest(
        request_id="b", prompt_token_ids=[1, 2], sampling_params=SamplingParams(n=2), arrival_time=0.0,
        bad_words_token_ids=[[5], [6, 7]],
    )  # fmt: skip
    world.scheduler.add_request(message)
    steps = [world.scheduler.schedule()]
    world.scheduler.recover()
    steps.append(world.scheduler.schedule())
    for step in steps:
        first, second = step.new_requests
        assert (first.request_id, first.prompt_embeds, first.token_ids) == ("a", known.message.prompt_embeds, [0] * 20)
        assert (second.sample_index, second.prompt_embeds, second.bad_words_token_ids) == (0, None, [[5], [6, 7]])
    result = ModelRunnerOutput(request_ids=["a", "0_b"], sampled_token_ids=[[5], [6]])
    world.scheduler.update(steps[1], result)
    (third,) = world.scheduler.schedule().new_requests
    assert (third.request_id, third.sample_index, third.bad_words_token_ids) == ("1_b", 1, [[5], [6, 7]])


def test_equal_embeddings_are_found_in_the_cache_and_never_taken_for_their_placeholders():
    world = make_world(num_blocks=60)
    zeros, others, cached = [0] * 40, prompt(40), []
    arrivals = [(zeros, False), (zeros, True), (others, True), (others, True), (zeros, True), (zeros, False)]
    for number, (tokens, embeds) in enumerate(arrivals):
        known = world.add(str(number), tokens, embeds=embeds)
        world.drain()
        cached.append(known.last.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32]


def test_a_prompt_of_embeddings_is_resumed_and_sampled_many_times_like_any_other():
    world = make_world(num_blocks=9, block_size=8)
    for i in range(3):
        world.add_samples(str(i), prompt(20, i % 2), 2, embeds=True, max_tokens=30)
    world.drain()
    assert world.scheduler.stats().num_preemptions > 0


def test_a_request_that_fails_ends_with_its_message_and_the_others_go_on():
    world = make_world(num_blocks=40, budget=30)
    failed, other, chunked = (world.add(name, prompt(12, i)) for i, name in enumerate("abc"))
    world.step(failing=["a", "c"])
    assert failed.last.error == "a cannot go on" and failed.finish_reason is FinishReason.ABORT
    assert chunked.last.error == "c cannot go on", "though no token was due"
    world.drain()
    assert len(other.output) == 8 and failed.output == []


def test_a_failure_of_a_request_that_was_aborted_meanwhile_is_nobodys():
    world = make_world(num_blocks=40)
    world.add("a", prompt(12))
    assert world.step(failing=["a"], abort_in_flight=["a"]) == []
    world.drain()
