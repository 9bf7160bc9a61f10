"""Where the server of an engine core runs: in a process of its own or in a thread. Starts it and sees it end.

Both kinds have the same life: `start` once; `stop` waits for an end that was asked for by a message, and forces it if
it can; `on_end` is called once, from another thread, when the server has ended for whatever reason.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from octavo.engine.core_process import CLIENT_SOCKET, CORE_SOCKET
from octavo.engine.core_server import Context, CoreServer
from octavo.errors import InvalidInput
from octavo.logging import get_logger

logger = get_logger(__name__)

_LONGEST_SOCKET_PATH = 100
"""Bytes; a little less than the least any system takes."""
_THREAD_STOP_SECONDS = 60.0


class CoreLauncher(Protocol):
    """One run of a server."""

    inbox: str
    """Address the server receives at."""
    outbox: str
    """Address the server sends to; to be bound before `start`."""

    def start(self, on_end: Callable[[str], None]) -> None:
        """Start the server; once. `on_end` is given a text that says how it ended."""

    def kill(self) -> None:
        """End it now, if that can be done from outside. May be called again."""

    def stop(self, seconds: float) -> bool:
        """Wait for the end, at most this long, then `kill`; free everything. False if it could not be ended."""


class CoreProcess:
    """The server in a process of its own. Its standard error is this process's."""

    def __init__(self) -> None:
        self._socket_dir = _private_dir()
        # for an exit between here and `start`; from then on the child removes it as well
        weakref.finalize(self, _remove_own, self._socket_dir, os.getpid())
        self.inbox = f"ipc://{self._socket_dir}/{CORE_SOCKET}"
        self.outbox = f"ipc://{self._socket_dir}/{CLIENT_SOCKET}"
        self._process: subprocess.Popen[bytes] | None = None
        self._waiter: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, on_end: Callable[[str], None]) -> None:
        if not sys.executable:
            raise InvalidInput('core="process" needs a Python to start, but sys.executable is empty; use core="thread"')
        self._process = subprocess.Popen(
            # -P: the path below is the whole path, as it is here
            [sys.executable, "-P", "-m", "octavo.engine.core_process", self._socket_dir, str(os.getpid())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            stdin=subprocess.PIPE,  # never written to: its end tells the child that this process has died
            start_new_session=True,  # Ctrl-C in the terminal goes to this process alone
        )
        self._waiter = threading.Thread(
            target=_wait, args=(self._process, on_end), name="octavo-core-waiter", daemon=True
        )
        self._waiter.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def stop(self, seconds: float) -> bool:
        if self._process is not None and self._waiter is not None:
            self._waiter.join(seconds)
            if self._waiter.is_alive():
                self.kill()
                self._waiter.join()
            assert self._process.stdin is not None
            self._process.stdin.close()
        shutil.rmtree(self._socket_dir, ignore_errors=True)
        return True


class CoreThread:
    """The server in a thread of this process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.inbox, self.outbox = "inproc://core", "inproc://client"
        self._thread: threading.Thread | None = None

    def start(self, on_end: Callable[[str], None]) -> None:
        def serve() -> None:
            try:
                CoreServer(self._context, self.inbox, self.outbox).run()
            finally:
                on_end("the engine core's thread ended")

        self._thread = threading.Thread(target=serve, name="octavo-core", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Nothing: a thread cannot be ended from outside."""

    def stop(self, seconds: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(max(seconds, _THREAD_STOP_SECONDS))  # it may be loading, and nothing can hurry it
        return not self._thread.is_alive()


def _wait(process: "subprocess.Popen[bytes]", on_end: Callable[[str], None]) -> None:
    status = process.wait()
    if status >= 0:
        how = f"ended with exit status {status}"
    elif -status == signal.SIGKILL:
        how = "was killed (SIGKILL); if nobody did that, the machine had no memory left"
    else:
        how = f"was ended by signal {-status}"
    on_end(f"the engine core's process {process.pid} {how}")


def _remove_own(folder: str, pid: int) -> None:
    """Remove the folder, unless this is a copy of the process that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _private_dir() -> str:
    """A new folder that only this user may enter, with a path short enough for a socket."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + 30 <= _LONGEST_SOCKET_PATH and os.path.isdir(parent):
            return tempfile.mkdtemp(prefix="octavo-", dir=parent)
    raise InvalidInput(
        f"TMPDIR={tempfile.gettempdir()!r} is too long for the path of a socket and there is no /tmp; "
        'set TMPDIR to a shorter path, or use core="thread"'
    )
