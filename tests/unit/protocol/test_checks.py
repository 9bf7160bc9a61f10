"""as_int, is_encodable and how values are shown."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import printable, short_repr
from octavo.protocol.checks import as_int, is_encodable


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint64(3)])
def test_integers_become_plain_ints(value):
    assert as_int(value) == 3
    assert type(as_int(value)) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 3.0, np.float32(3), "3", None, [3], np.array([3])])
def test_anything_else_is_no_integer(value):
    assert as_int(value) is None


def test_lone_surrogates_are_not_encodable():
    assert is_encodable("ďábelské 👋 日本")
    assert not is_encodable("a\ud83d")


class Hostile:
    def __repr__(self):
        raise RuntimeError("no")

    def __index__(self):
        raise RuntimeError("no")

    def __float__(self):
        raise RuntimeError("no")


HARD_TO_SHOW = [
    10**5000, -(10**5000), [10**5000], {10**5000: 10**5000}, "x" * 200_000, b"x" * 200_000, ["x" * 1000] * 1000,
    Hostile(), [Hostile()], "a\n\0\x1b\ud800", np.eye(100), type("a\nb", (Hostile,), {})(),
]  # fmt: skip


def test_an_object_that_fails_to_be_an_integer_is_none():
    assert as_int(Hostile()) is None


@pytest.mark.parametrize("value", HARD_TO_SHOW, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("limit", [20, 60, 200])
def test_anything_is_shown_on_one_short_printable_line(value, limit):
    shown = short_repr(value, limit)
    assert 0 < len(shown) <= limit
    assert shown.isprintable()


@given(st.recursive(st.integers() | st.text() | st.floats() | st.binary(), lambda x: st.lists(x) | st.tuples(x, x)))
def test_a_short_value_is_shown_as_python_does(value):
    whole = repr(value)
    assert short_repr(value, 60).isprintable()
    if len(whole) <= 20 and whole.isprintable():
        assert short_repr(value, 60) == whole


def test_of_a_huge_integer_the_size_is_shown():
    assert short_repr(-(10**5000)) == "<-integer of about 5001 digits>"
    assert short_repr(2**64) == str(2**64)


def test_both_ends_of_a_long_text_are_shown():
    assert printable("a" * 100 + "b" * 100, 11) == "aaaa...bbbb"
    assert printable("a\nb") == "a\\nb"
