"""The two files of a batch: JSON lines in, JSON lines out. Nothing of a model, and no more than a few lines in memory.

What always holds: an answer names the number and a digest of the line it belongs to, so that a run can be cut off at
any moment and started again; an output file that belongs to another input is refused, never taken for done; no two
runs write to one output file; and until `open_target` nothing of it is changed.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec

from octavo.errors import InvalidInput

STANDARD_STREAM = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_RECORD_START = b'{"line":'


class InputLine(NamedTuple):
    """One line that is to be answered."""

    number: int
    """From 1."""
    data: bytes


class _Answered(msgspec.Struct):
    """What a line of the output must have."""

    line: int
    digest: str
    error: Any = None
    """Of a line that was refused."""


class BatchFiles:
    """Input and output of one run. An output file that exists is locked until `close`.

    Args:
        source: the input file; `-`: stdin.
        target: the output file; `-`: stdout. What it holds already is read. A line that was refused counts as not
            answered, so that it is tried again, corrected or not.

    Raises:
        InvalidInput: a file cannot be used, another run writes to the output, or it answers other lines than those of
            the input.
    """

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        self._digests = array("Q")
        """By line number - 1; 0: not answered yet."""
        self.num_answered = 0
        """Lines that the output file answered already."""
        self.num_lines: int | None = None
        """Lines that are not blank; None for a stream."""
        self._held: BinaryIO | None = None
        """The output file, locked; None if it is a stream or not there yet."""
        self._end = 0
        """Bytes of the output file's whole records."""
        self._has_errors = False
        try:
            self._check_source()
            self._check_target()
            self._read_answers()
            if source != STANDARD_STREAM and Path(source).is_file():
                self._count_lines()
        except OSError as error:
            self.close()
            raise InvalidInput(f"cannot use {error.filename or source!r}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another run have the output file. May be called again."""
        if self._held is not None:
            self._held.close()

    @property
    def is_done(self) -> bool:
        """Whether every line is known and answered."""
        return self.num_lines == self.num_answered

    def lines(self) -> Iterator[InputLine]:
        """The lines that are not answered yet, as they are read. Blank ones are passed over."""
        try:
            with self._open_source() as stream:
                for line, answered in self._number(stream):
                    if not answered:
                        yield line
        except OSError as error:
            raise InvalidInput(f"cannot read --input {self.source!r}: {error.strerror or error}") from error

    def open_target(self) -> BinaryIO:
        """For appending answers. A torn last record and those of refused lines are removed."""
        if self.target == STANDARD_STREAM:
            return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        try:
            if self._held is None:
                return self._create_target()
            if self._has_errors:
                self._drop_errors(self._held)
            else:
                self._held.truncate(self._end)
            return self._held
        except OSError as error:
            raise InvalidInput(f"cannot write to --output {self.target!r}: {error.strerror or error}") from error

    def _create_target(self) -> BinaryIO:
        stream: BinaryIO = open(self.target, "ab")  # noqa: SIM115 (the caller closes it)
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            self._held = stream
            self._lock(stream)
            if os.fstat(stream.fileno()).st_size:
                raise InvalidInput(
                    f"--output {self.target!r} was written by another run meanwhile; start this one again"
                )
        return stream

    def _lock(self, stream: BinaryIO) -> None:
        busy = InvalidInput(
            f"another run is writing to --output {self.target!r}; wait for its end, or give another file"
        )
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:  # a file system without locks
            return
        # The other run may have put a new file in the place of the one that was opened.
        if not (os.path.exists(self.target) and os.path.samestat(os.fstat(stream.fileno()), os.stat(self.target))):
            raise busy

    def _drop_errors(self, old: BinaryIO) -> None:
        """Put a file without the records of refused lines in the place of the output, at once and already locked."""
        path = os.path.realpath(self.target)
        number, name = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
        new: BinaryIO = os.fdopen(number, "r+b")
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old.seek(0)
            while old.tell() < self._end:
                data = old.readline()
                if msgspec.json.decode(data, type=_Answered).error is None:
                    new.write(data)
            new.flush()
            os.fsync(number)
            shutil.copymode(path, name)
            os.replace(name, path)
        except BaseException:
            new.close()
            os.unlink(name)
            raise
        self._held = new
        old.close()

    def _open_source(self) -> BinaryIO:
        if self.source == STANDARD_STREAM:
            # Of our own: a thread may still be reading it when the interpreter closes sys.stdin.
            return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        return open(self.source, "rb")

    def _check_source(self) -> None:
        if self.source == STANDARD_STREAM:
            return
        if not Path(self.source).exists():
            raise InvalidInput(f"--input {self.source!r} does not exist; give a file of JSON lines, or - for stdin")
        if Path(self.source).is_dir():
            raise InvalidInput(f"--input {self.source!r} is a folder; give a file of JSON lines, or - for stdin")
        if not os.access(self.source, os.R_OK):
            raise InvalidInput(f"--input {self.source!r} may not be read; check its permissions")

    def _check_target(self) -> None:
        """What can be told without creating it."""
        path = Path(self.target)
        if self.target == STANDARD_STREAM:
            return
        if path.is_dir():
            raise InvalidInput(f"cannot write to --output {self.target!r}: it is a folder; give a file")
        if not path.parent.is_dir():
            raise InvalidInput(f"cannot write to --output {self.target!r}: there is no folder {str(path.parent)!r}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InvalidInput(f"cannot write to --output {self.target!r}: check the permissions")

    def _number(self, stream: BinaryIO) -> Iterator[tuple[InputLine, bool]]:
        """Each line that is not blank, and whether it is answered."""
        for number, data in enumerate(stream, 1):
            if number == 1:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            is_blank = not data.strip()
            known = self._digests[number - 1] if number <= len(self._digests) else 0
            if known and (is_blank or known != int(digest_of(data), 16)):
                raise InvalidInput(
                    f"line {number} of {self.source} is not the one that {self.target} has an answer to; "
                    "give another --output, or remove the file"
                )
            if not is_blank:
                yield InputLine(number, data), bool(known)

    def _count_lines(self) -> None:
        num_lines = num_known = 0
        with self._open_source() as stream:
            for _, answered in self._number(stream):
                num_lines += 1
                num_known += answered
        if num_known < self.num_answered:
            raise InvalidInput(
                f"{self.target} has an answer to line {len(self._digests)}, but {self.source} has fewer lines; "
                "give another --output, or remove the file"
            )
        self.num_lines = num_lines

    def _read_answers(self) -> None:
        path = Path(self.target)
        if self.target == STANDARD_STREAM or not path.exists():
            return
        if self.source != STANDARD_STREAM and os.path.samefile(self.source, path):
            raise InvalidInput(f"--input and --output are the same file {self.target!r}; give another --output")
        if not path.is_file():
            return
        self._held = open(path, "a+b")  # noqa: SIM115 (open, and locked, until close)
        self._lock(self._held)
        self._held.seek(0)
        for number, data in enumerate(self._held, 1):
            if data.endswith(b"\n"):
                self._note_answer(number, data)
                self._end += len(data)
            elif not _may_be_torn(data):
                raise self._foreign(number)
        if self._has_errors and not os.access(Path(os.path.realpath(path)).parent, os.W_OK):
            raise InvalidInput(
                f"cannot replace the refused lines of --output {self.target!r}: its folder may not be written to; "
                "give another file"
            )

    def _foreign(self, number: int) -> InvalidInput:
        return InvalidInput(
            f"line {number} of --output {self.target!r} is no answer of this command; give another file"
        )

    def _note_answer(self, number: int, data: bytes) -> None:
        try:
            answer = msgspec.json.decode(data, type=_Answered)
            digest = int(answer.digest, 16)
            if not (answer.line > 0 and 0 < digest < 2**64):
                raise ValueError
        except (msgspec.MsgspecError, ValueError):
            raise self._foreign(number) from None
        if answer.error is not None:
            self._has_errors = True
            return
        if answer.line > len(self._digests):
            self._digests.extend([0] * (answer.line - len(self._digests)))
        self.num_answered += not self._digests[answer.line - 1]
        self._digests[answer.line - 1] = digest


def digest_of(data: bytes) -> str:
    """What tells a line from others, white space around it aside. Never zero."""
    digest = hashlib.blake2b(data.strip(), digest_size=8).hexdigest()
    return digest if int(digest, 16) else f"{1:016x}"


def _may_be_torn(data: bytes) -> bool:
    """Whether an output's last line, which has no line break, can be what is left of a record."""
    if not data.startswith(_RECORD_START):
        return _RECORD_START.startswith(data)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True
    return "digest" in value


def write_answer(stream: BinaryIO, line: InputLine, answer: dict[str, Any]) -> None:
    """Append one answer and hand it to the system at once.

    Numbers that are not finite become null; lone surrogates, which no JSON file can hold, their escape sequences.
    """
    record = {"line": line.number, **answer, "digest": digest_of(line.data)}
    try:
        data = msgspec.json.encode(record)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_encodable(record))
    stream.write(data + b"\n")
    stream.flush()


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _encodable(field) for key, field in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value
