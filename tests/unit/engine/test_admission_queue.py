"""The accounts of the queue, without an engine."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.admission import LONGEST_RETRY, SHORTEST_RETRY, AdmissionQueue, PromptGroup
from octavo.errors import InvalidInput, Overloaded


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_request_is_queued_until_it_is_begun_and_runs_until_it_ends():
    queue = AdmissionQueue(2, None)
    queue.enter("a")
    assert queue.load() == (0, 1, 0)
    queue.set_tokens("a", 5)
    queue.set_tokens("a", 7)
    assert queue.load() == (0, 1, 7)
    queue.scheduled(["a", "unknown"])
    assert queue.load() == (1, 0, 0)
    queue.scheduled(["a"])
    queue.leave("a")
    queue.leave("a")
    assert queue.load() == (0, 0, 0)


def test_one_that_left_is_not_begun_any_more():
    queue = AdmissionQueue(None, None)
    queue.enter("a")
    queue.leave("a")
    queue.set_tokens("a", 7)
    queue.scheduled(["a"])
    assert queue.load() == (0, 0, 0)


def test_who_is_begun_makes_room():
    queue = AdmissionQueue(1, None)
    queue.enter("a")
    with pytest.raises(Overloaded):
        queue.enter("b")
    queue.scheduled(["a"])
    queue.enter("b")
    assert queue.load() == (1, 1, 0)


def test_a_prompt_longer_than_the_bound_is_taken_when_nobody_waits_and_no_other_time():
    queue = AdmissionQueue(None, 10)
    queue.enter("a")
    queue.set_tokens("a", 50)
    with pytest.raises(Overloaded, match="50 prompt tokens wait"):
        queue.enter("b")
    queue.scheduled(["a"])
    queue.enter("b")
    queue.set_tokens("b", 4)
    queue.enter("c")
    with pytest.raises(Overloaded, match="a prompt of 7 tokens would exceed max_queued_tokens=10"):
        queue.set_tokens("c", 7)
    queue.leave("c")
    assert queue.load() == (1, 1, 4)


def refusal(queue: AdmissionQueue) -> float:
    with pytest.raises(Overloaded) as raised:
        queue.enter("refused")
    return raised.value.retry_after


def test_retry_after_follows_the_rate_at_which_requests_are_begun():
    clock = Clock()
    queue = AdmissionQueue(20, None, clock)
    for number in range(20):
        queue.enter(str(number))
    without_history = refusal(queue)
    assert SHORTEST_RETRY <= without_history <= LONGEST_RETRY
    for number in range(10):  # two a second
        queue.scheduled([str(number)])
        clock.now += 0.5
        queue.enter(f"next {number}")
    assert refusal(queue) == pytest.approx(10, abs=1), "20 wait"
    clock.now += 5.0  # and then none
    assert refusal(queue) == pytest.approx(20, abs=1)
    clock.now += 10_000
    assert refusal(queue) == LONGEST_RETRY
    fast = AdmissionQueue(1, None, clock)
    for number in range(50):
        fast.enter(str(number))
        fast.scheduled([str(number)])
    fast.enter("last")
    assert refusal(fast) == SHORTEST_RETRY


def test_the_message_says_when_to_try_again():
    error = Overloaded("the queue is full", 7.0)
    assert str(error) == "the queue is full; try again in 7 s"
    assert str(type(error)(*error.args)) == str(error)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    max_requests=st.none() | st.integers(1, 5),
    max_tokens=st.none() | st.integers(1, 40),
)
def test_the_accounts_are_those_of_a_simple_model(seed, max_requests, max_tokens):
    rng, queue = random.Random(seed), AdmissionQueue(max_requests, max_tokens)
    queued: dict[str, int] = {}
    running: set[str] = set()
    for number in range(60):
        names = [*queued, *running, "nobody"]
        name, tokens = rng.choice(names), rng.randint(1, 20)
        match rng.choice(["enter", "tokens", "scheduled", "leave"]):
            case "enter":
                full = len(queued) == max_requests or (max_tokens is not None and sum(queued.values()) >= max_tokens)
                try:
                    queue.enter(str(number))
                    queued[str(number)] = 0
                    assert not full
                except Overloaded:
                    assert full
            case "tokens":
                others = sum(count for other, count in queued.items() if other != name)
                try:
                    queue.set_tokens(name, tokens)
                    if name in queued:
                        queued[name] = tokens
                        assert max_tokens is None or not others or others + tokens <= max_tokens
                except Overloaded:
                    assert others + tokens > max_tokens
            case "scheduled":
                queue.scheduled([name])
                if name in queued:
                    del queued[name]
                    running.add(name)
            case "leave":
                queue.leave(name)
                queued.pop(name, None)
                running.discard(name)
        assert queue.load() == (len(running), len(queued), sum(queued.values()))


def test_threads_never_overfill_it():
    queue, taken = AdmissionQueue(10, None), []

    def enter(first: int) -> None:
        for number in range(first, first + 200):
            try:
                queue.enter(str(number))
                taken.append(number)
            except Overloaded:
                pass

    threads = [threading.Thread(target=enter, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == queue.load().num_queued == 10


def test_with_fair_shares_a_flood_of_one_tenant_leaves_room_for_the_others():
    queue = AdmissionQueue(20, None, is_fair=True)
    taken = flood(queue, "a", 100)
    assert taken == 10
    assert flood(queue, "b", 100) == 5
    queue.enter("first of c", "c")
    queue.leave("first of c")
    for number in range(taken):
        queue.scheduled([f"a {number}"])
    assert flood(queue, "a", 100) == 8  # of the 15 places that are free again


def flood(queue, tenant, count):
    """How many of `count` requests are taken."""
    for number in range(count):
        try:
            queue.enter(f"{tenant} {number}", tenant)
        except Overloaded:
            return number
    return count


def test_with_fair_shares_long_prompts_of_one_tenant_leave_room_for_those_of_others():
    queue = AdmissionQueue(None, 100, is_fair=True)
    for name, tenant, num_tokens in (("a", "a", 40), ("b", "b", 30), ("c", "b", 1)):
        queue.enter(name, tenant)
        if name == "c":
            with pytest.raises(Overloaded, match="30 prompt tokens of yours wait"):
                queue.set_tokens(name, num_tokens)
        else:
            queue.set_tokens(name, num_tokens)
    for name in "abc":
        queue.leave(name)
    queue.enter("long", "a")
    queue.set_tokens("long", 1000)  # nobody else waits


def enter_all(queue: AdmissionQueue, sizes: list[int], group: PromptGroup | None, prefix: str = "g") -> None:
    for index in range(len(sizes)):
        queue.enter(f"{prefix}{index}", None, group)
    for index, size in enumerate(sizes):
        queue.set_tokens(f"{prefix}{index}", size)


def test_prompts_that_are_together_more_than_can_ever_wait_are_refused_for_good():
    queue = AdmissionQueue(None, 100)
    enter_all(queue, [50, 50], PromptGroup(), "fits")
    for index in range(2):
        queue.leave(f"fits{index}")
    with pytest.raises(InvalidInput, match=r"prompt has 101 tokens or more .*max_queued_tokens=100"):
        enter_all(queue, [50, 51], PromptGroup())


def test_so_they_are_when_the_first_of_them_have_begun_or_others_wait():
    for scheduled, other in ((True, 0), (False, 30)):
        queue, group = AdmissionQueue(None, 100), PromptGroup()
        enter_all(queue, [other] if other else [], None, "other")
        queue.enter("a", None, group)
        queue.enter("b", None, group)
        queue.set_tokens("a", 60)
        if scheduled:
            queue.scheduled(["a"])
        with pytest.raises(InvalidInput, match="max_queued_tokens"):
            queue.set_tokens("b", 60)


def test_prompts_that_only_others_leave_no_room_are_told_to_try_again():
    queue = AdmissionQueue(None, 100)
    enter_all(queue, [50], None, "other")
    with pytest.raises(Overloaded):
        enter_all(queue, [30, 30], PromptGroup())


def test_a_corrected_count_replaces_the_earlier_one_in_the_group():
    queue, group = AdmissionQueue(None, 100), PromptGroup()
    enter_all(queue, [10, 10], group)
    queue.set_tokens("g0", 60)
    assert group.num_tokens == 70
    queue.set_tokens("g1", 40)
    with pytest.raises(InvalidInput):
        queue.set_tokens("g1", 41)


def test_where_only_the_group_waits_no_bound_is_told_to_pass_with_time():
    with pytest.raises(InvalidInput, match=r"prompt holds more .*max_queued_requests=2"):
        enter_all(AdmissionQueue(2, None), [1, 1, 1], PromptGroup())
    with pytest.raises(InvalidInput, match=r"prompt holds more .*kept for others"):
        enter_all(AdmissionQueue(4, None, is_fair=True), [1, 1, 1], PromptGroup())
    with pytest.raises(InvalidInput, match=r"prompt holds more .*left for others"):
        enter_all(AdmissionQueue(None, 100, is_fair=True), [30, 40], PromptGroup())


def test_a_lone_prompt_may_be_longer_than_the_queue_with_or_without_a_group():
    for group in (None, PromptGroup()):
        queue = AdmissionQueue(None, 100)
        enter_all(queue, [500], group)
        assert queue.load().queued_tokens == 500


def test_a_group_is_left_with_its_requests():
    queue, group = AdmissionQueue(2, None), PromptGroup()
    enter_all(queue, [1, 1], group)
    queue.scheduled(["g0"])
    queue.leave("g1")
    assert group.num_queued == 0
    enter_all(queue, [1, 1], None, "other")
    with pytest.raises(Overloaded):
        queue.enter("x", None, group)


def test_wide_answers_are_bounded_together_for_as_long_as_they_live():
    queue = AdmissionQueue(None, None, max_logprobs=100)
    for name in "abc":
        queue.enter(name)
    with pytest.raises(InvalidInput, match=r"logprobs or prompt_logprobs .*101 .*max_wide_logprobs=100"):
        queue.set_logprobs("a", 101)
    queue.set_logprobs("a", 60)
    queue.scheduled(["a"])
    queue.set_logprobs("b", 0)
    with pytest.raises(Overloaded, match="max_wide_logprobs=100"):
        queue.set_logprobs("c", 41)
    queue.leave("a")
    queue.set_logprobs("c", 100)
    group = PromptGroup()
    queue = AdmissionQueue(None, None, max_logprobs=100)
    queue.enter("a", None, group)
    queue.enter("b", None, group)
    queue.set_logprobs("a", 60)
    with pytest.raises(InvalidInput, match="120"):
        queue.set_logprobs("b", 60)
