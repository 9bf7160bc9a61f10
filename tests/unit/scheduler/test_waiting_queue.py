"""The waiting queue is always in the order of the keys."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from octavo.errors import InvalidInput
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.scheduler.policy import get_policy
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request import Request


def make(number: int, priority: int = 0, policy: str = "fcfs") -> Request:
    message = EngineCoreRequest(
        request_id=str(number),
        prompt_token_ids=[1],
        sampling_params=SamplingParams(),
        arrival_time=0.0,
        priority=priority,
    )
    request = Request(message, number, 10)
    request.key = get_policy(policy)(request)
    return request


@given(
    st.sampled_from(["fcfs", "priority"]),
    st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "remove"]), st.integers(-3, 3)), max_size=40),
)
def test_it_behaves_like_a_list_sorted_after_every_change(policy, operations):
    queue, model = WaitingQueue(), []
    for number, (operation, value) in enumerate(operations):
        if operation == "add":
            request = make(number, value, policy)
            queue.add(request)
            model.append(request)
            model.sort(key=lambda r: (r.priority if policy == "priority" else 0, r.arrival_number))
        elif model and operation == "pop":
            assert queue.peek() is model[0]
            assert queue.pop() is model.pop(0)
        elif model:
            queue.remove(model.pop(value % len(model)))
        assert list(queue) == model
        assert len(queue) == len(model)


def test_a_request_that_returns_is_at_the_head_again():
    queue, requests = WaitingQueue(), [make(number) for number in range(4)]
    for request in requests:
        queue.add(request)
    first = queue.pop()
    queue.add(first)
    assert queue.peek() is first


def test_removing_one_that_does_not_wait_is_noticed():
    queue, (first, second) = WaitingQueue(), (make(0), make(1))
    queue.add(second)
    with pytest.raises(AssertionError, match="0 is not waiting"):
        queue.remove(first)


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(InvalidInput, match="'lottery' is not known; use one of fcfs, priority"):
        get_policy("lottery")
