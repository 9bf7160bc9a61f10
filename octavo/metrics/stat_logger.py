"""StatLogger: one line every few seconds under load, from the core's statistics. Knows nothing of the engine."""

import math
import time
from collections.abc import Callable

from octavo.errors import InvalidInput
from octavo.logging import get_logger
from octavo.protocol.stats import EngineStats

logger = get_logger(__name__)


class StatLogger:
    """Logs load and throughput at INFO at most once in `interval` seconds; says nothing while the engine is idle.

    Rates are over the time since the last line. A pause longer than the interval is no load: the next line then counts
    from the first step after it.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 <= interval < math.inf:
            raise InvalidInput(f"log interval {interval!r} must be a finite number of seconds >= 0")
        self._interval = interval
        self._clock = clock
        self._last = self._base = EngineStats()
        self._last_time = self._base_time = clock()

    def record(self, stats: EngineStats) -> None:
        """To be called after every step."""
        now = self._clock()
        if not _is_loaded(self._last) and now - self._last_time > self._interval:
            self._base, self._base_time = self._last, now
        self._last, self._last_time = stats, now
        if not _is_loaded(stats) and _num_tokens(stats) == _num_tokens(self._base):
            self._base, self._base_time = stats, now
        elif now > self._base_time and now - self._base_time >= self._interval:
            logger.info("%s", _line(self._base, stats, now - self._base_time))
            self._base, self._base_time = stats, now


def _is_loaded(stats: EngineStats) -> bool:
    return stats.num_running > 0 or stats.num_waiting > 0


def _num_tokens(stats: EngineStats) -> int:
    return stats.prompt_tokens + stats.generation_tokens


def _line(before: EngineStats, after: EngineStats, seconds: float) -> str:
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    kv_usage = after.kv_blocks_in_use / after.kv_blocks_total if after.kv_blocks_total else 0.0
    return (
        f"running {after.num_running}, waiting {after.num_waiting}, "
        f"prompt {(after.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, "
        f"generation {(after.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
        f"KV cache usage {kv_usage:.1%}, prefix cache hit rate {f'{hits / queries:.1%}' if queries else '-'}"
    )
