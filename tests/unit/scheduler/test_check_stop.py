"""When a request ends by its tokens, and with which reason."""

import pytest

from octavo.protocol.messages import EngineCoreRequest, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.scheduler.request import Request
from octavo.scheduler.stop import check_stop

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def make(output: list[int], *, max_total_tokens=100, eos=(2, 3), **params) -> Request:
    message = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[2, 7],
        sampling_params=SamplingParams(max_tokens=50, **params),
        eos_token_ids=list(eos),
        arrival_time=0.0,
    )
    request = Request(message, 0, max_total_tokens)
    request.token_ids += output
    return request


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (make([5]), None),
        (make([5, 2]), (STOP, None)),
        (make([5, 3]), (STOP, None)),
        (make([5, 2], eos=()), None),
        (make([7], stop_token_ids=[7]), (STOP, 7)),
        (make([2], stop_token_ids=[2]), (STOP, None)),
        (make([2], eos=(), stop_token_ids=[2]), (STOP, 2)),
        (make([5, 5], max_total_tokens=4), (LENGTH, None)),
        (make([5, 2], max_total_tokens=4), (STOP, None)),
        (make([5, 7], max_total_tokens=4, stop_token_ids=[7]), (STOP, 7)),
        (make([2, 2, 2], min_tokens=4), None),
        (make([2, 2, 2, 2], min_tokens=4), (STOP, None)),
        (make([7, 7, 7], min_tokens=4, stop_token_ids=[7]), None),
        (make([7, 7, 7, 7], min_tokens=4, stop_token_ids=[7]), (STOP, 7)),
        (make([2, 2], min_tokens=4, max_total_tokens=4), (LENGTH, None)),
    ],
)
def test_reason(request_, expected):
    assert check_stop(request_) == expected


def test_ids_are_held_back_only_for_a_request_with_min_tokens():
    assert make([]).held_back_token_ids == []
    assert make([], min_tokens=1, stop_token_ids=[9, 2]).held_back_token_ids == [2, 3, 9]
