"""Amounts of memory, as people write them and as people read them. Pure."""

import re

from octavo.errors import InvalidInput, short_repr

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.ASCII)
MAX_BYTES = 2**60
"""No machine has as much memory."""


def parse_bytes(value: int | str, name: str) -> int:
    """Bytes of 1048576, "512MiB", "1.5 GiB" or "2GB" (KB, MB, GB, TB: powers of 1000; KiB, ...: powers of 1024).

    Raises:
        InvalidInput: `value` is not such an amount, less than one byte or more than 2**60; names the option `name`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise _no_amount(value, name)
    if isinstance(value, str):
        match = _AMOUNT.fullmatch(value.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise _no_amount(value, name)
        number = float(match[1]) if "." in match[1] else int(match[1])
        value = int(number * _UNITS[match[2]])
    if value < 1:
        raise InvalidInput(f"{name}={format_bytes(value)} must be at least 1 byte")
    if value > MAX_BYTES:
        raise InvalidInput(f"{name}={format_bytes(value)} must be at most {format_bytes(MAX_BYTES)}")
    return value


def format_bytes(amount: int) -> str:
    """Three digits and a unit, for people: 94.5 MiB, 1.23 GiB. What no unit suits is shown as a power of two."""
    if abs(amount) >= 2**80:
        return f"{'-' if amount < 0 else ''}2**{abs(amount).bit_length() - 1} B"
    value, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1024, larger
    return f"{amount} B" if unit == "B" else f"{value:.3g} {unit}"


def _no_amount(value: object, name: str) -> InvalidInput:
    return InvalidInput(
        f'{name}={short_repr(value)} is no amount of memory; give bytes, or a text such as "512MiB" or "2GiB"'
    )
