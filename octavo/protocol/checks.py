"""Small checks that every message's values share. Pure functions over plain values."""

import operator


def as_int(value: object) -> int | None:
    """`value` as a plain int; None if it is no integer. Takes numpy's integers, refuses booleans and floats."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            return None
        return operator.index(value)
    except Exception:  # whatever the methods of a user's object raise: an integer it is not
        return None


def is_encodable(text: str) -> bool:
    """Whether `text` is real Unicode. A lone surrogate is no character: it has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
