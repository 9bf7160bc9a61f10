"""Refusals in the words of those who send JSON. The engine's own are in Python's: they are raised offline, too."""

import re

_QUOTED = re.compile(r"""((?<!\w)'(?:[^'\\]|\\.)*'(?!\w)|(?<!\w)"(?:[^"\\]|\\.)*"(?!\w))""")
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "a dict": "an object",
    "dicts": "objects",
    "a str": "a text",
    "a int": "a number",
    "a float": "a number",
    "a bool": "true or false",
    "a NoneType": "null",
}
_PATTERN = re.compile(rf"\b({'|'.join(_WORDS)})\b")


def in_json_words(message: str) -> str:
    """The message with Python's constants and types called as in JSON, except inside quotes."""
    parts = _QUOTED.split(message)
    parts[::2] = [_PATTERN.sub(lambda found: _WORDS[found[0]], part) for part in parts[::2]]
    return "".join(parts)
