"""AdmissionQueue: who may enter the queue of an engine, and how full it is.

A request is queued from the moment it is accepted until the core first computes anything of it, or it ends: while it is
tokenised too, so that what waits for the tokenizer is bounded as well. Counts requests, not samples. Thread-safe, never
waits.

With fair shares a tenant may hold no more of the queue than it leaves free (dynamic thresholds, Choudhury & Hahne
1998): one that floods it holds half, two hold a third each, and there is always room for the next one.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.errors import InvalidInput, Overloaded, short_repr
from octavo.protocol.checks import as_int

SHORTEST_RETRY, LONGEST_RETRY = 1.0, 60.0
"""Seconds; what a refused request is told lies between them."""
_RETRY_WITHOUT_HISTORY = 5.0
_RATE_WINDOW = 64
"""The rate is that of so many last departures from the queue."""


class Load(NamedTuple):
    """How busy an engine is."""

    num_running: int
    """Requests that the core has begun and not ended."""
    num_queued: int
    """Requests that were accepted and not begun."""
    queued_tokens: int
    """Prompt tokens of those, as far as they are known."""


class AdmissionQueue:
    """The accounts of the queue.

    Args:
        max_requests: requests that may be queued; None: no bound.
        max_tokens: prompt tokens that may be queued; None: no bound. A prompt that is longer than that is still taken
            when no other waits: it could never be sent otherwise.
        is_fair: whether a tenant leaves room for others.

    Raises:
        InvalidInput: a bound is no positive integer.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        is_fair: bool = False,
    ) -> None:
        self._max_requests = _bound("max_queued_requests", max_requests)
        self._max_tokens = _bound("max_queued_tokens", max_tokens)
        self._clock = clock
        self._is_fair = is_fair
        self._lock = threading.Lock()
        self._queued: dict[str, int] = {}
        """Request id -> prompt tokens; 0 while they are not known."""
        self._queued_tokens = 0
        self._tenants: dict[str, str | None] = {}
        """Whose each queued request is."""
        self._requests_of: Counter[str | None] = Counter()
        self._tokens_of: Counter[str | None] = Counter()
        self._running: set[str] = set()
        self._departures: deque[float] = deque(maxlen=_RATE_WINDOW)

    def enter(self, request_id: str, tenant: str | None = None) -> None:
        """Take a place. Raises Overloaded if there is none."""
        with self._lock:
            if self._max_requests is not None and len(self._queued) >= self._max_requests:
                raise self._refusal(f"{len(self._queued)} requests wait, and max_queued_requests={self._max_requests}")
            own = self._requests_of[tenant]
            if self._is_fair and self._max_requests is not None and 0 < own >= self._max_requests - len(self._queued):
                raise self._refusal(
                    f"{own} of your requests wait, and the places left of max_queued_requests={self._max_requests} "
                    "are kept for others"
                )
            if self._max_tokens is not None and self._queued_tokens >= self._max_tokens:
                raise self._token_refusal("this prompt")
            self._queued[request_id] = 0
            self._tenants[request_id] = tenant
            self._requests_of[tenant] += 1

    def set_tokens(self, request_id: str, num_tokens: int) -> None:
        """Say how many tokens the prompt has, or at least has; a later call replaces an earlier one.

        Raises Overloaded if that is too many. The place is kept until `leave`, which must follow.
        """
        with self._lock:
            if request_id not in self._queued:  # left meanwhile
                return
            others = self._queued_tokens - self._queued[request_id]
            if self._max_tokens is not None and others and others + num_tokens > self._max_tokens:
                raise self._token_refusal(f"a prompt of {num_tokens} tokens")
            tenant, before = self._tenants[request_id], self._queued[request_id]
            own = self._tokens_of[tenant] - before
            if (
                self._is_fair
                and own
                and self._max_tokens is not None
                and own + 2 * num_tokens > self._max_tokens - others
            ):
                raise self._refusal(
                    f"{own} prompt tokens of yours wait, and with {num_tokens} more too little of "
                    f"max_queued_tokens={self._max_tokens} would be left for others"
                )
            self._queued[request_id] = num_tokens
            self._queued_tokens = others + num_tokens
            self._tokens_of[tenant] += num_tokens - before

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """The core has begun these. Unknown ids are ignored."""
        now = self._clock()
        with self._lock:
            for request_id in request_ids:
                if self._take_out(request_id):
                    self._running.add(request_id)
                    self._departures.append(now)

    def leave(self, request_id: str) -> None:
        """The request has ended, wherever it was. A second call does nothing."""
        with self._lock:
            self._take_out(request_id)
            self._running.discard(request_id)

    def load(self) -> Load:
        with self._lock:
            return Load(len(self._running), len(self._queued), self._queued_tokens)

    def _take_out(self, request_id: str) -> bool:
        """Give the place back. False: it has none."""
        num_tokens = self._queued.pop(request_id, None)
        if num_tokens is None:
            return False
        tenant = self._tenants.pop(request_id)
        self._queued_tokens -= num_tokens
        self._requests_of[tenant] -= 1
        self._tokens_of[tenant] -= num_tokens
        if not self._requests_of[tenant]:
            del self._requests_of[tenant], self._tokens_of[tenant]
        return True

    def _token_refusal(self, what: str) -> Overloaded:
        return self._refusal(
            f"{self._queued_tokens} prompt tokens wait, and {what} would exceed max_queued_tokens={self._max_tokens}"
        )

    def _refusal(self, why: str) -> Overloaded:
        return Overloaded(f"the queue is full: {why}", self._retry_after())

    def _retry_after(self) -> float:
        """Whole seconds until those who wait now will have been begun, at the rate of the last ones."""
        if not self._departures:
            return _RETRY_WITHOUT_HISTORY
        seconds = max(self._clock() - self._departures[0], 1e-3)
        expected = len(self._queued) * seconds / len(self._departures)
        return float(math.ceil(min(max(expected, SHORTEST_RETRY), LONGEST_RETRY)))


def _bound(name: str, value: int | None) -> int | None:
    number = None if value is None else as_int(value)
    if value is not None and (number is None or number < 1):
        raise InvalidInput(f"{name}={short_repr(value)} must be an integer >= 1; leave it out for no bound")
    return number
