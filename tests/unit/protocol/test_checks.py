"""as_int and is_encodable."""

import numpy as np
import pytest

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
