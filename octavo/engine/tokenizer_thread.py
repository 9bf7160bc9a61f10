"""The thread that prepares requests: checks, templates, tokenisation, in their order of arrival.

Like a `ThreadPoolExecutor` of one worker, but nothing ever waits for it without limit, not even the interpreter's exit:
templates and imports are a user's code and may hang. What always holds: every future that was handed out ends, and
what was cancelled is not kept in memory until its turn comes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from octavo.errors import EngineDeadError
from octavo.logging import get_logger

logger = get_logger(__name__)

CLOSE_SECONDS = 3.0
"""How long `close` waits for a preparation in progress."""


class TokenizerThread:
    """One daemon thread, started when there is something to do. Thread-safe.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "octavo-tokenizer") -> None:
        self._name = name
        self._work: SimpleQueue[tuple[Future[None], list[Callable[[], None]]] | None] = SimpleQueue()
        """Each future with its call, in a list that is emptied when the future has ended."""
        self._lock = threading.Lock()
        self._unfinished: set[Future[None]] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, call: Callable[..., None], *args: Any) -> "Future[None]":
        """Run `call(*args)` after all that was submitted before. Raises EngineDeadError after `close`."""
        future: Future[None] = Future()
        calls = [partial(call, *args)]
        future.add_done_callback(lambda _: calls.clear())
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._unfinished.add(future)
            self._work.put((future, calls))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """Let it finish what it has. After CLOSE_SECONDS it is left to itself and what is unfinished fails."""
        with self._lock:
            self._is_closed = True
            self._work.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "The preparation of a request (its chat template, or the import of a logits processor) has not ended "
                "%g s after the engine was closed; the daemon thread %r is left to it",
                CLOSE_SECONDS,
                self._thread.name,
            )
            self._fail_unfinished()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, calls = work
            _settle(future, calls)
            with self._lock:
                self._unfinished.discard(future)
            del work, future, calls  # while it waits it keeps no request alive

    def _fail_unfinished(self) -> None:
        with self._lock:
            unfinished, self._unfinished = self._unfinished, set()
        with suppress(Empty):  # nothing more is begun, should the thread wake up after all
            while True:
                self._work.get_nowait()
        self._work.put(None)
        for future in unfinished:
            with suppress(InvalidStateError):
                future.set_exception(_closed())


def _settle(future: "Future[None]", calls: list[Callable[[], None]]) -> None:
    """Run the call, unless nobody waits for it any more. Its future may be failed meanwhile."""
    error: BaseException | None = None
    try:
        if not future.set_running_or_notify_cancel():
            return
        call = next(iter(calls), None)
        if call is not None:  # it was not failed meanwhile
            call()
    except BaseException as raised:
        error = raised
    with suppress(InvalidStateError):
        future.set_result(None) if error is None else future.set_exception(error)


def _closed() -> EngineDeadError:
    return EngineDeadError("the engine has been closed")
