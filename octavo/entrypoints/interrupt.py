"""Ctrl-C while the engine computes: heard between two steps instead of tearing one apart."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a second one raises KeyboardInterrupt at once.

    Only where Python's own handler is in force: a handler of the application is left alone, and so is every thread
    but the main one, which are not interrupted anyway.
    """
    event = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield event
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
