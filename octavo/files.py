"""Opening files that others wrote. Whatever lies at a path, the answer is its content or one InvalidInput.

A path may name a pipe, a device or a folder, or a file that cannot be read or is far too large: none of these may
hang the reader, fill the memory or end in an OSError. Every error is one readable sentence.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from octavo.errors import InvalidInput, printable

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BinaryIO:
    """`path` opened for reading.

    Raises:
        InvalidInput: it is not there, may not be read, or is no regular file; a pipe is never waited for.
    """
    try:
        # without O_NONBLOCK the opening of a pipe waits for a writer; for a regular file it changes nothing
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = _KINDS.get(stat.S_IFMT(mode), "special")
        raise InvalidInput(f"{path} cannot be read: it is {kind}, not a regular file")
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, limit: int) -> bytes:
    """All bytes of a regular file. Raises InvalidInput as `open_regular`, or if there are more than `limit`."""
    with open_regular(path) as file:
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise unreadable(path, error) from error
    if len(data) > limit:
        raise InvalidInput(f"{path} has more than {limit} bytes, the limit for such a file; get it again")
    return data


def exists(path: Path) -> bool:
    """Whether there is anything at `path`. Raises InvalidInput when that cannot be told."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return True


def unreadable(path: Path, error: Exception) -> InvalidInput:
    """The refusal of a path that the system refused with `error`."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return InvalidInput(f"{printable(str(path), 300)} cannot be read: {reason}")
