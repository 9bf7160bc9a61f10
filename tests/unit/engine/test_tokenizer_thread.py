"""TokenizerThread: in order, and every future ends, whatever a preparation does."""

import threading
import time
import weakref

import pytest

from octavo.engine import tokenizer_thread
from octavo.engine.tokenizer_thread import TokenizerThread
from octavo.errors import EngineDeadError


def test_calls_run_in_their_order_and_close_lets_them_finish(monkeypatch):
    monkeypatch.setattr(tokenizer_thread, "CLOSE_SECONDS", 60)
    thread, seen = TokenizerThread(), []
    first = threading.Event()
    futures = [thread.submit(first.wait, 10), *(thread.submit(seen.append, number) for number in range(50))]
    first.set()
    thread.close()
    assert all(future.done() for future in futures)
    assert seen == list(range(50))
    with pytest.raises(EngineDeadError):
        thread.submit(seen.append, 50)


def test_what_a_call_raises_is_in_its_future_and_the_next_one_runs():
    thread, seen = TokenizerThread(), []

    def leave() -> None:
        raise SystemExit(3)

    failed, after = thread.submit(leave), thread.submit(seen.append, 1)
    assert isinstance(failed.exception(10), SystemExit)
    assert after.result(10) is None and seen == [1]
    thread.close()


def test_a_call_that_was_cancelled_does_not_run():
    thread, seen, blocked = TokenizerThread(), [], threading.Event()
    thread.submit(blocked.wait, 10)
    waiting = thread.submit(seen.append, 1)
    assert waiting.cancel()
    blocked.set()
    thread.close()
    assert seen == []


def test_close_gives_up_a_call_that_hangs_and_fails_all_that_wait(monkeypatch, caplog):
    monkeypatch.setattr(tokenizer_thread, "CLOSE_SECONDS", 0.1)
    thread, seen, hang = TokenizerThread(), [], threading.Event()
    futures = [thread.submit(hang.wait, 30), thread.submit(seen.append, 1)]
    started = time.monotonic()
    thread.close()
    thread.close()
    assert time.monotonic() - started < 5
    for future in futures:
        assert isinstance(future.exception(0), EngineDeadError)
    worker = thread._thread
    assert worker is not None and worker.daemon
    hang.set()
    worker.join(10)
    assert not worker.is_alive() and seen == []


def test_what_was_cancelled_is_not_kept_until_its_turn_comes():
    class Prompt:
        pass

    thread, blocked, prompt = TokenizerThread(), threading.Event(), Prompt()
    thread.submit(blocked.wait, 10)
    known, waiting = weakref.ref(prompt), thread.submit(print, prompt)
    del prompt
    assert known() is not None
    waiting.cancel()
    assert known() is None
    blocked.set()
    thread.close()


def test_what_has_run_is_not_kept_either():
    class Prompt:
        pass

    thread, prompt = TokenizerThread(), Prompt()
    known, future = weakref.ref(prompt), thread.submit(id, prompt)
    del prompt
    future.result(10)
    deadline = time.monotonic() + 10
    while known() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert known() is None
    thread.close()
