"""What the benchmarks of linear layers share: the shapes of a model, and several sides measured in turns."""

import statistics
import time
from collections.abc import Callable

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
"""(N, K) of SmolLM2-135M: hidden 576, 9 heads and 3 KV heads of 64, intermediate 1536, vocabulary 49152."""
SECONDS = 0.4
"""How long the sides of one measurement run together, about."""


def in_turns(sides: list[Callable[[int], object]], min_turns: int) -> list[float]:
    """Median seconds of each side."""
    seconds: list[list[float]] = [[] for _ in sides]
    started, turn = time.perf_counter(), 0
    while turn <= min_turns or time.perf_counter() - started < SECONDS:
        for side, times in zip(sides, seconds, strict=True):
            before = time.perf_counter()
            side(turn)
            times.append(time.perf_counter() - before)
        turn += 1
    return [statistics.median(times[1:]) for times in seconds]  # the first turn warms up
