"""AdmissionQueue: who may enter the queue of an engine, and how full it is.

A request is queued from the moment it is accepted until the core first computes anything of it, or it ends: while it is
tokenised too, so that what waits for the tokenizer is bounded as well. Counts requests, not samples. Thread-safe, never
waits.

With fair shares a tenant may hold no more of the queue than it leaves free (dynamic thresholds, Choudhury & Hahne
1998): one that floods it holds half, two hold a third each, and there is always room for the next one.

Answers that show the log-probabilities of a large part of the vocabulary take far more memory than all else, for as
long as they live, so they are bounded by themselves.
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


class PromptGroup:
    """Prompts that are asked for together. One object for all of them; the queue keeps it up to date."""

    def __init__(self) -> None:
        self.num_queued = 0
        """Requests that wait now."""
        self.num_tokens = 0
        """Prompt tokens of all that were queued so far, whatever became of them."""
        self.num_logprobs = 0
        """And the log-probabilities of their answers, if these are wide."""


class AdmissionQueue:
    """The accounts of the queue.

    Args:
        max_requests: requests that may be queued; None: no bound.
        max_tokens: prompt tokens that may be queued; None: no bound. A prompt that is longer than that is still taken
            when no other waits: it could never be sent otherwise.
        is_fair: whether a tenant leaves room for others.
        max_logprobs: log-probabilities that wide answers may hold together; None: no bound.

    Raises:
        InvalidInput: a bound is no positive integer.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        is_fair: bool = False,
        max_logprobs: int | None = None,
    ) -> None:
        self._max_requests = _bound("max_queued_requests", max_requests)
        self._max_tokens = _bound("max_queued_tokens", max_tokens)
        self._max_logprobs = _bound("max_wide_logprobs", max_logprobs)
        self._logprobs: dict[str, int] = {}
        """Log-probabilities of each wide answer, until it has ended."""
        self._clock = clock
        self._is_fair = is_fair
        self._lock = threading.Lock()
        self._queued: dict[str, int] = {}
        """Request id -> prompt tokens; 0 while they are not known."""
        self._queued_tokens = 0
        self._tenants: dict[str, str | None] = {}
        """Whose each queued request is."""
        self._groups: dict[str, PromptGroup] = {}
        """The group of each queued request that has one."""
        self._requests_of: Counter[str | None] = Counter()
        self._tokens_of: Counter[str | None] = Counter()
        self._running: set[str] = set()
        self._departures: deque[float] = deque(maxlen=_RATE_WINDOW)

    def enter(self, request_id: str, tenant: str | None = None, group: PromptGroup | None = None) -> None:
        """Take a place. Raises Overloaded if there is none, InvalidInput if the group leaves none."""
        with self._lock:
            waiting, most = len(self._queued), self._max_requests
            if most is not None and waiting >= most:
                raise self._refusal(f"{waiting} requests wait, and max_queued_requests={most}", group)
            own = self._requests_of[tenant]
            if self._is_fair and most is not None and 0 < own >= most - waiting:
                raise self._refusal(
                    f"{own} of your requests wait, and the places left of max_queued_requests={most} "
                    "are kept for others",
                    group,
                )
            if self._max_tokens is not None and self._queued_tokens >= self._max_tokens:
                raise self._token_refusal("this prompt", group)
            self._queued[request_id] = 0
            self._tenants[request_id] = tenant
            self._requests_of[tenant] += 1
            if group is not None:
                self._groups[request_id] = group
                group.num_queued += 1

    def set_tokens(self, request_id: str, num_tokens: int) -> None:
        """Say how many tokens the prompt has, or at least has; a later call replaces an earlier one.

        Raises Overloaded if that is too many, InvalidInput if those of the group alone are. The place is kept until
        `leave`, which must follow.
        """
        with self._lock:
            if request_id not in self._queued:  # left meanwhile
                return
            before, group = self._queued[request_id], self._groups.get(request_id)
            self._check_tokens(request_id, num_tokens, group)
            self._queued[request_id] = num_tokens
            self._queued_tokens += num_tokens - before
            self._tokens_of[self._tenants[request_id]] += num_tokens - before
            if group is not None:
                group.num_tokens += num_tokens - before

    def _check_tokens(self, request_id: str, num_tokens: int, group: PromptGroup | None) -> None:
        most, before = self._max_tokens, self._queued[request_id]
        others = self._queued_tokens - before
        if most is None:
            return
        if group is not None and 0 < group.num_tokens - before > most - num_tokens:
            raise InvalidInput(
                f"prompt has {group.num_tokens - before + num_tokens} tokens or more in its prompts together, but no "
                f"more than max_queued_tokens={most} can wait here; send them in several requests"
            )
        if others and others + num_tokens > most:
            raise self._token_refusal(f"a prompt of {num_tokens} tokens", group)
        own = self._tokens_of[self._tenants[request_id]] - before
        if self._is_fair and own and own + 2 * num_tokens > most - others:
            raise self._refusal(
                f"{own} prompt tokens of yours wait, and with {num_tokens} more too little of "
                f"max_queued_tokens={most} would be left for others",
                group,
            )

    def set_logprobs(self, request_id: str, num_logprobs: int) -> None:
        """Say how many log-probabilities a wide answer may have. Raises InvalidInput, or Overloaded."""
        with self._lock:
            most = self._max_logprobs
            if most is None or request_id not in self._queued:
                return
            group = self._groups.get(request_id) or PromptGroup()
            group.num_logprobs += num_logprobs
            if group.num_logprobs > most:
                raise InvalidInput(
                    f"logprobs or prompt_logprobs ask for up to {group.num_logprobs} numbers (for each token, of each "
                    f"sample), but no more than max_wide_logprobs={most} can be held here; lower them, max_tokens or n"
                )
            held = sum(self._logprobs.values())
            if held + num_logprobs > most:
                raise Overloaded(
                    f"other answers hold up to {held} log-probabilities, and {num_logprobs} more would exceed "
                    f"max_wide_logprobs={most}",
                    self._retry_after(),
                )
            self._logprobs[request_id] = num_logprobs

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
            self._logprobs.pop(request_id, None)

    def load(self) -> Load:
        with self._lock:
            return Load(len(self._running), len(self._queued), self._queued_tokens)

    def _take_out(self, request_id: str) -> bool:
        """Give the place back. False: it has none."""
        num_tokens = self._queued.pop(request_id, None)
        if num_tokens is None:
            return False
        tenant = self._tenants.pop(request_id)
        if (group := self._groups.pop(request_id, None)) is not None:
            group.num_queued -= 1
        self._queued_tokens -= num_tokens
        self._requests_of[tenant] -= 1
        self._tokens_of[tenant] -= num_tokens
        if not self._requests_of[tenant]:
            del self._requests_of[tenant], self._tokens_of[tenant]
        return True

    def _token_refusal(self, what: str, group: PromptGroup | None) -> Exception:
        return self._refusal(
            f"{self._queued_tokens} prompt tokens wait, and {what} would exceed max_queued_tokens={self._max_tokens}",
            group,
        )

    def _refusal(self, why: str, group: PromptGroup | None) -> Exception:
        """Where all that waits is the group's own, waiting for others would not help."""
        if group is not None and group.num_queued == len(self._queued):
            return InvalidInput(f"prompt holds more than can wait here at once: {why}; send it in several requests")
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
