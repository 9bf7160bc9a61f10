"""The order requests are served in. A policy is one key function: lowest key first, and the highest is preempted first.

Keys are unique and never change, so a preempted request takes its old place in the queue again. Samples of one request
stand together.
"""

from collections.abc import Callable

from octavo.errors import InvalidInput
from octavo.scheduler.request import Request

PolicyKey = Callable[[Request], tuple[int, ...]]


def fcfs(request: Request) -> tuple[int, ...]:
    """First come, first served."""
    return (request.arrival_number, request.sample_index)


def priority(request: Request) -> tuple[int, ...]:
    """Lower priority value first; first come among equals."""
    return (request.priority, request.arrival_number, request.sample_index)


POLICIES: dict[str, PolicyKey] = {"fcfs": fcfs, "priority": priority}


def get_policy(name: str) -> PolicyKey:
    """The key function of a policy.

    Raises:
        InvalidInput: there is no such policy.
    """
    if name not in POLICIES:
        raise InvalidInput(f"scheduling_policy={name!r} is not known; use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
