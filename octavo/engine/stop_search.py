"""Where a growing text must end: the search for stop strings and regular expressions. Pure Python over text.

What always holds:
- of several stops the one that ends first counts; of equal ends the longest;
- text that is not held back is never part of a stop that is found later;
- the work per piece of text depends on the stops and on what is held back, not on the length of the text.
"""

import time
from typing import Any, NamedTuple

import regex

from octavo.errors import printable
from octavo.protocol.sampling_params import SamplingParams

LOOK_BACK = 8192
"""Characters a match of a regular expression may span; a longer one is not found. Bounds work and held-back text."""
TIME_LIMIT = 1.0
"""Seconds of computing that all searches of one request may take together, beyond what is free. Only expressions that
backtrack without end reach it."""
FREE_TIME = 0.001
"""Seconds of computing that are free whenever text is added to a sample: an honest search takes microseconds, and a
long answer has many."""
SHORT_SEARCH = 0.005
"""Seconds after which a search begins anew without keeping every other thread from running."""


class Stop(NamedTuple):
    """A stop that was found: text[start:end] is it. Ordered by end, then by start."""

    end: int
    start: int
    reason: str
    """The stop string, or the pattern of the expression."""


class SearchTimeout(Exception):
    """The regular expressions of a request took longer than TIME_LIMIT."""


class SearchBudget:
    """The time that the searches of one request have left; its samples share it. Once used up, it stays so.

    Counted is the time this thread computes, so that a busy machine ends nobody's request.
    """

    def __init__(self) -> None:
        self._left = TIME_LIMIT
        self._free = 0.0
        self._reason = ""

    def renew_free_time(self) -> None:
        """Text has been added. Raises SearchTimeout if the budget has been used up."""
        if self._reason:
            raise SearchTimeout(self._reason)
        self._free = FREE_TIME

    def search(self, compiled: Any, text: str, start: int, partial: bool) -> Any:
        """The first match from `start` on; with `partial` also one that the end of the text cuts off.

        Raises:
            SearchTimeout: the budget is used up.
        """
        started = time.thread_time()
        try:
            match = self._search(compiled, text, start, partial)
        except (TimeoutError, MemoryError):  # the library's own bound of what backtracking may hold
            self._left = 0.0
        else:
            seconds = time.thread_time() - started
            self._left -= max(0.0, seconds - self._free)
            self._free = max(0.0, self._free - seconds)
        if self._left <= 0:
            shown = printable(repr(compiled.pattern))
            self._reason = f"stop_regex={shown} takes more than {TIME_LIMIT:g} s of the request's time to search"
            raise SearchTimeout(self._reason)
        return match

    def _search(self, compiled: Any, text: str, start: int, partial: bool) -> Any:
        """The library's time limit counts what all threads compute meanwhile; that makes the second try stricter."""
        try:
            return compiled.search(text, start, partial=partial, timeout=min(SHORT_SEARCH, self._left))
        except TimeoutError:
            return compiled.search(text, start, partial=partial, timeout=self._left, concurrent=True)


class StopSearch:
    """The stops of one request. `find` is to be called with the text after every piece that is added to it."""

    def __init__(self, params: SamplingParams, budget: SearchBudget | None = None) -> None:
        """`budget`: of the request this is a sample of. None: one of its own."""
        self._budget = SearchBudget() if budget is None else budget
        self._strings = tuple(params.stop or ())
        self._longest = max(map(len, self._strings), default=0)
        self._expressions = [_Expression(pattern, self._budget) for pattern in params.stop_regex or ()]
        self._keeps_stop = params.include_stop_str_in_output
        self._is_empty = not (self._strings or self._expressions)

    def find(self, text: str, new_from: int, counts: bool) -> Stop | None:
        """The stop that `text` holds since text[new_from:] was added to it, if any.

        Args:
            counts: False while the request may not end yet; what is found then is passed over for good.

        Raises:
            SearchTimeout: the expressions of the request take too long.
        """
        if self._is_empty:
            return None
        if self._expressions:
            self._budget.renew_free_time()
        found = [stop for expression in self._expressions if (stop := expression.find(text, counts)) is not None]
        if counts:
            found += self._find_strings(text, new_from)
        return min(found, default=None)

    def num_held_back(self, text: str) -> int:
        """Length of the longest end of the text that may be the beginning of a stop."""
        if self._keeps_stop or self._is_empty:
            return 0
        tail = text[max(0, len(text) - self._longest + 1) :]
        held_back = [_overlap(tail, string) for string in self._strings]
        held_back += [len(text) - expression.first_start for expression in self._expressions]
        return max(held_back, default=0)

    def _find_strings(self, text: str, new_from: int) -> list[Stop]:
        found = []
        for string in self._strings:
            position = text.find(string, max(0, new_from - len(string) + 1))
            if position >= 0:
                found.append(Stop(position + len(string), position, string))
        return found


class _Expression:
    """One regular expression, and where in the text a match of it may still begin."""

    def __init__(self, pattern: str, budget: SearchBudget) -> None:
        self._pattern = pattern
        self._budget = budget
        self._compiled = regex.compile(pattern)
        self.first_start = 0
        """No match found from now on begins before this position."""

    def find(self, text: str, counts: bool) -> Stop | None:
        while (match := self._search(text, partial=False)) is not None:
            if counts:
                return Stop(match.end(), match.start(), self._pattern)
            if match.start() >= len(text):
                break
            self.first_start = max(match.end(), match.start() + 1)
        begun = self._search(text, partial=True)
        self.first_start = max(len(text) if begun is None else begun.start(), len(text) - LOOK_BACK)
        return None

    def _search(self, text: str, partial: bool) -> Any:
        return self._budget.search(self._compiled, text, self.first_start, partial)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
