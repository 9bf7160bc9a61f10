"""Ctrl-C while the engine computes: heard between two steps instead of tearing one apart."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C has come. No lock: the handler may interrupt itself."""

    def __init__(self) -> None:
        self._came = False

    def is_set(self) -> bool:
        return self._came

    def _set(self, number: int, frame: FrameType | None) -> None:
        self._came = True


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Ctrl-C is noted and does nothing else, however often it comes; the caller looks at it between two steps.

    An exception out of the handler could strike anywhere: in the middle of a clean-up, or between a step and the
    delivery of what it computed for others. Only where Python's own handler is in force: a handler of the application
    is left alone, and so is every thread but the main one, which are not interrupted anyway.
    """
    interrupt = Interrupt()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt._set)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
