"""Typed access to fields of a JSON object or of GGUF metadata: a refusal names the file, the field and the value."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import InvalidInput, short_repr
from octavo.files import read_bounded

MAX_INTEGER = 2**40
"""No size or length of a model comes near it; products of such numbers stay far below what a float holds."""
MAX_JSON_BYTES = 2**26
"""Of one JSON file; the index of a checkpoint of hundreds of shards has a few MiB."""


class Fields:
    """A mapping read from `source`. A field that is None counts as absent, as transformers treats it.

    Raises:
        InvalidInput: from every getter, when the field is absent without a default, or of another type or range.
    """

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        """`prefix` stands before every key that is asked for."""
        self._values = values
        self.source = source
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(key, f"an integer of at least {minimum}")
        if value > MAX_INTEGER:
            raise self.refusal(key, f"an integer of at most {MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        value = self._value(key, default)
        # the bound also keeps out nan, infinities and integers that no float holds
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < 1e300:
            raise self.refusal(key, f"a number of at least {minimum:g} and below 1e300")
        return float(value)

    def optional_number(self, key: str, minimum: float = 0.0) -> float | None:
        return self.number(key, minimum=minimum) if key in self else None

    def same_in_all_layers(self, key: str, default: int | None = None) -> int:
        """An integer that may be written once a layer, but must be the same in all."""
        value = self.get(key)
        if not isinstance(value, list):
            return self.integer(key, default)
        if len(set(value)) != 1:
            raise self.refusal(key, "the same in all layers")
        return Fields({key: value[0]}, self.source).integer(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "a string")
        return value

    def section(self, key: str) -> "Fields":
        """The object at `key`; an empty one when absent."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.refusal(key, "an object")
        return Fields(value, f"{self.source}, {key}")

    def keys(self) -> list[str]:
        """Keys of the fields that are there."""
        return [key for key in self._values if key in self]

    def has_key(self, key: str) -> bool:
        """The key is there, if only with None."""
        return self._prefix + key in self._values

    def refusal(self, key: str, expected: str) -> InvalidInput:
        """The refusal of the value at `key`."""
        return InvalidInput(f"{self.source}: {self._prefix}{key} is {short_repr(self.get(key))}, it must be {expected}")

    def _value(self, key: str, default: object) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise InvalidInput(f"{self.source}: {self._prefix}{key} is missing; get the file again")
        return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises InvalidInput when it is no regular file, too large, not JSON or no object."""
    text = read_bounded(path, MAX_JSON_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} ({len(text)} bytes) is not valid JSON: {error}; get it again") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{path} holds a {type(value).__name__}, it must be a JSON object; get it again")
    return value
