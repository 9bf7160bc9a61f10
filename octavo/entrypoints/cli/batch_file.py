"""The two files of a batch: JSON lines in, JSON lines out. Nothing of a model, and no more than a few lines in memory.

What always holds: an answer names the number and a digest of the line it belongs to, so that a run can be cut off at
any moment and started again, and an output file that belongs to another input is refused, never taken for done.
"""

import hashlib
import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from octavo.errors import InvalidInput

STANDARD_STREAM = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InputLine(NamedTuple):
    """One line that is to be answered."""

    number: int
    """From 1."""
    data: bytes


class _Answered(msgspec.Struct):
    """What a line of the output must have."""

    line: int
    digest: str


class BatchFiles:
    """Input and output of one run.

    Args:
        source: the input file; `-`: stdin.
        target: the output file; `-`: stdout. What it holds already is read, and a torn last line is cut off.

    Raises:
        InvalidInput: a file cannot be used, or the output answers other lines than those of the input.
    """

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        self._digests = array("Q")
        """By line number - 1; 0: not answered yet."""
        self.num_answered = 0
        """Lines that the output file answered already."""
        self.num_lines: int | None = None
        """Lines that are not blank; None for a stream."""
        try:
            self._check_source()
            self._check_target()
            self._read_answers()
            if source != STANDARD_STREAM and Path(source).is_file():
                with open(source, "rb") as stream:
                    self.num_lines = sum(1 for _ in self._number(stream))
        except OSError as error:
            raise InvalidInput(f"cannot use {error.filename or source!r}: {error.strerror or error}") from error

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
        """For appending answers."""
        if self.target == STANDARD_STREAM:
            return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        try:
            return open(self.target, "ab")
        except OSError as error:
            raise InvalidInput(f"cannot write to --output {self.target!r}: {error.strerror}") from error

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
            if not data.strip():
                continue
            known = self._digests[number - 1] if number <= len(self._digests) else 0
            if known and known != int(digest_of(data), 16):
                raise InvalidInput(
                    f"line {number} of {self.source} is not the one that {self.target} has an answer to; "
                    "give another --output, or remove the file"
                )
            yield InputLine(number, data), bool(known)

    def _read_answers(self) -> None:
        path = Path(self.target)
        if self.target == STANDARD_STREAM or not path.exists():
            return
        if self.source != STANDARD_STREAM and os.path.samefile(self.source, path):
            raise InvalidInput(f"--input and --output are the same file {self.target!r}; give another --output")
        if not path.is_file():
            return
        with open(path, "r+b") as stream:
            end = 0
            for number, data in enumerate(stream, 1):
                if not data.endswith(b"\n"):
                    break
                self._note_answer(number, data)
                end += len(data)
            stream.truncate(end)

    def _note_answer(self, number: int, data: bytes) -> None:
        try:
            answer = msgspec.json.decode(data, type=_Answered)
            digest = int(answer.digest, 16)
            if not (answer.line > 0 and 0 < digest < 2**64):
                raise ValueError
        except (msgspec.MsgspecError, ValueError):
            raise InvalidInput(
                f"line {number} of --output {self.target!r} is no answer of this command; give another file"
            ) from None
        if answer.line > len(self._digests):
            self._digests.extend([0] * (answer.line - len(self._digests)))
        self.num_answered += not self._digests[answer.line - 1]
        self._digests[answer.line - 1] = digest


def digest_of(data: bytes) -> str:
    """What tells a line from others, white space around it aside. Never zero."""
    digest = hashlib.blake2b(data.strip(), digest_size=8).hexdigest()
    return digest if int(digest, 16) else f"{1:016x}"


def write_answer(stream: BinaryIO, line: InputLine, answer: dict[str, Any]) -> None:
    """Append one answer and hand it to the system at once. Numbers that are not finite become null."""
    record = {"line": line.number, **answer, "digest": digest_of(line.data)}
    stream.write(msgspec.json.encode(record) + b"\n")
    stream.flush()
