"""The pool of threads, as Python sees it. native/thread_pool_test.cpp drives it harder, and under ThreadSanitizer."""

import os
import subprocess
import sys
import threading

import pytest


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3, 64, 1000])
def test_every_chunk_is_run_once_a_job(native, num_threads, num_chunks):
    native.set_num_threads(num_threads)
    assert native.num_threads() == num_threads
    assert native.count_chunks(num_chunks, 100) == [100] * num_chunks


def test_the_number_of_threads_may_change_between_jobs(native):
    for num_threads in [2, 5, 1, 3, 2, 2, 9, 1] * 5:
        native.set_num_threads(num_threads)
        assert native.count_chunks(7, 10) == [10] * 7


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_an_impossible_number_of_threads_is_refused(native, count):
    before = native.num_threads()
    with pytest.raises(ValueError, match=str(count)):
        native.set_num_threads(count)
    assert native.num_threads() == before


def test_several_python_threads_may_call_at_once(native):
    native.set_num_threads(2)
    counts = []
    callers = [threading.Thread(target=lambda: counts.append(native.count_chunks(16, 500))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts == [[500] * 16] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_with_threads_of_its_own(native):
    native.set_num_threads(3)
    assert native.count_chunks(16, 100) == [100] * 16
    child = os.fork()
    if child == 0:
        os._exit(0 if native.count_chunks(16, 100) == [100] * 16 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert native.count_chunks(16, 100) == [100] * 16


def test_a_process_ends_while_a_thread_computes(native):
    """At exit other threads may still be in the pool: it must stay whole under them."""
    code = (
        "import threading, time\n"
        "from octavo.ops.cpu import _native\n"
        "_native.set_num_threads(3)\n"
        "threading.Thread(target=_native.count_chunks, args=(64, 10**9), daemon=True).start()\n"
        "time.sleep(0.1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True, timeout=60)
