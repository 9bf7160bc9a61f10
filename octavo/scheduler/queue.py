"""Requests that wait, in the order of their keys."""

from bisect import bisect_left
from collections.abc import Iterator

from octavo.scheduler.request import Request


class WaitingQueue:
    """A sorted list, last first, so that the common ends (the head leaves, a preempted request returns) are cheap.

    Finding a place takes O(log n) comparisons.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, ...], Request]] = []
        """(negated key, request), ascending: the head of the queue is the last entry."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Head first."""
        return (request for _, request in reversed(self._entries))

    def add(self, request: Request) -> None:
        """Put `request` in its place."""
        self._entries.insert(self._place(request), (_negated(request.key), request))

    def peek(self) -> Request:
        """The head of the queue, which must not be empty."""
        return self._entries[-1][1]

    def pop(self) -> Request:
        """Take the head of the queue, which must not be empty."""
        return self._entries.pop()[1]

    def remove(self, request: Request) -> None:
        """Take `request` out, wherever it is. It must be in the queue."""
        place = self._place(request)
        found = self._entries[place : place + 1]
        assert found and found[0][1] is request, f"{request.request_id} is not waiting"
        del self._entries[place]

    def audit(self) -> None:
        """Raise AssertionError if the queue is out of order."""
        keys = [request.key for request in self]
        assert keys == sorted(keys), f"waiting requests are out of order: {keys}"

    def _place(self, request: Request) -> int:
        return bisect_left(self._entries, _negated(request.key), key=lambda entry: entry[0])


def _negated(key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-part for part in key)
