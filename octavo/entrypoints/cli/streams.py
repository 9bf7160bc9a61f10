"""Standard streams and the signal to end, so that a command need not think of them. Light imports only.

What holds after `mend_streams`: stdin, stdout and stderr are there, and text of any kind can be written to them.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType

from octavo.errors import printable

EXIT_TERMINATED = 128 + signal.SIGTERM
_LONGEST_COMPLAINT = 4000


def mend_streams() -> None:
    """Put the null device where a stream was closed, before a file that is opened later takes its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, _open_null(number, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            # file names need not be Unicode; in a narrower encoding one odd character must not end the run
            stream.reconfigure(errors="surrogateescape" if stream.encoding.lower() == "utf-8" else "replace")


def _open_null(number: int, mode: str) -> TextIOWrapper:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number and not _is_open(number):
        os.dup2(null, number)
        os.close(null)
        null = number
    os.set_inheritable(null, True)
    return open(null, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def discard_unwritten() -> None:
    """Let what cannot be written go, so that the interpreter does not try again at its end and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):  # a stream of the caller's own has no number
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
        except ValueError:  # closed
            pass


def complain(message: str) -> None:
    """One paragraph on stderr; nowhere if that cannot be written to."""
    with suppress(OSError):
        print(f"octavo: {printable(' '.join(message.split()), _LONGEST_COMPLAINT)}", file=sys.stderr)


@contextmanager
def terminable() -> Iterator[None]:
    """Within, the signal to end (SIGTERM) raises SystemExit, so that files are closed and the engine is shut down.

    Only where nobody else handles it, and in the main thread.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_TERMINATED)
