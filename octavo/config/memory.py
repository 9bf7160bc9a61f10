"""Amounts of memory, as people write them and as people read them. Pure."""

import re

from octavo.errors import InvalidInput

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


def parse_bytes(value: int | str, name: str) -> int:
    """Bytes of 1048576, "512MiB", "1.5 GiB" or "2GB" (KB, MB, GB, TB: powers of 1000; KiB, ...: powers of 1024).

    Raises:
        InvalidInput: `value` is not such an amount, or is less than one byte; names the option `name`.
    """
    refusal = InvalidInput(f'{name}={value!r} is no amount of memory; give bytes, or a text such as "512MiB" or "2GiB"')
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise refusal
    if isinstance(value, str):
        match = _AMOUNT.fullmatch(value.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise refusal
        number = float(match[1]) if "." in match[1] else int(match[1])
        value = int(number * _UNITS[match[2]])
    if value < 1:
        raise InvalidInput(f"{name}={value} bytes must be at least 1")
    return value


def format_bytes(amount: int) -> str:
    """Three digits and a unit, for people: 94.5 MiB, 1.23 GiB."""
    value, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1024, larger
    return f"{amount} B" if unit == "B" else f"{value:.3g} {unit}"
