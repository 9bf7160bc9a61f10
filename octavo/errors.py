"""The exceptions a user may catch, and how their messages show a value.

Everything Octavo refuses because of what the user gave is an `InvalidInput`; it is a `ValueError`, so callers need
not know its name. A `ValueError` that is not an `InvalidInput` is a defect of Octavo.
"""

import builtins
import reprlib


class InvalidInput(ValueError):
    """An option, field, prompt or file is refused. The message names the value, the limit and the way out."""


class PromptTooLong(InvalidInput):
    """A prompt has more tokens than there is room for."""


class EngineDeadError(RuntimeError):
    """The engine core is gone (closed, killed or failed): nothing can be asked of it any more."""


class Overloaded(RuntimeError):
    """The queue of an engine is full: the request is refused, nothing of it is left, and it may be sent again later.

    Args:
        message: which bound was reached.
        retry_after: seconds after which there is likely to be room.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.args[0]}; try again in {self.retry_after:g} s"


def not_built(what: str, hint: str = "") -> InvalidInput:
    """The refusal of an option or field whose feature does not exist yet."""
    return InvalidInput(f"{what} is not built yet" + (f"; {hint}" if hint else "; leave it out"))


def short_repr(value: object, limit: int = 60) -> str:
    """`repr(value)` for a message: one line of printable characters, `limit` at most. Never raises.

    Large containers, texts and integers are shown in part; an object that cannot show itself by its type.
    """
    short = _ShortRepr()
    short.maxstring = short.maxother = limit
    try:
        return printable(short.repr(value), limit)
    except Exception:  # a `__repr__` or an item's method raised, or gave no text
        return printable(f"<{type(value).__name__}>", limit)


def describe(error: BaseException, limit: int = 500) -> str:
    """Type and text of an exception for a message: one printable line that can be encoded. Never raises."""
    name = type(error).__name__
    try:
        text = str(error)
        return printable(f"{name}: {text}" if text else name, limit)
    except BaseException:  # `__str__` may be a user's code, and raise whatever it likes
        return printable(f"{name} (its text cannot be had)", limit)


def encodable(text: str) -> str:
    """`text` with lone surrogates escaped, and all else as it is."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str, limit: int = 200) -> str:
    """`text` with control characters and lone surrogates escaped; of a long one the two ends, `limit` characters."""
    text = _middle_out(text, limit)
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return _middle_out(shown, limit)


def _middle_out(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = (limit - 3) // 2
    return f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"


class _ShortRepr(reprlib.Repr):
    """What the library's does, and integers of any size: Python itself writes none of more than 4300 digits."""

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        if bits <= _LONGEST_INT_BITS:
            return builtins.repr(x)
        sign = "-" if x < 0 else ""
        return f"<{sign}integer of about {int(bits * _DIGITS_PER_BIT) + 1} digits>"


_LONGEST_INT_BITS = 256
_DIGITS_PER_BIT = 0.30103
