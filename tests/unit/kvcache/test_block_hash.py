"""A digest names one content; when it does not, the contents are told apart."""

import subprocess
import sys

import hypothesis.strategies as st
from hypothesis import given

from octavo.kvcache.block_hash import BlockContent, hash_block, make_content, same_content

parts = st.tuples(
    st.binary(max_size=4),
    st.lists(st.integers(0, 300), max_size=4),
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
)


def chain(*blocks: list[int], keys: tuple[str, ...] = ()) -> BlockContent:
    content = None
    for token_ids in blocks:
        content = make_content(content, token_ids, keys)
    assert content is not None
    return content


@given(parts, parts)
def test_different_parts_have_different_digests(a, b):
    assert (hash_block(*a) == hash_block(*b)) == (a == b)


def test_moving_a_border_between_parts_changes_the_digest():
    assert hash_block(b"", [1, 2], ()) != hash_block(b"", [1], ("\x02",))
    assert hash_block(b"", [1], ("ab", "c")) != hash_block(b"", [1], ("a", "bc"))
    assert hash_block(b"ab", [1], ()) != hash_block(b"a", [1], ())


def test_a_lone_surrogate_in_the_salt_is_a_key_like_any_other():
    assert hash_block(b"", [1], ("\ud800",)) != hash_block(b"", [1], ("\ud801",))


def test_the_digest_is_the_same_in_another_process():
    code = "from octavo.kvcache.block_hash import hash_block; print(hash_block(b'x', [1, 2], ('k',)).hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == hash_block(b"x", [1, 2], ("k",)).hex()


def test_the_digest_depends_on_everything_before_the_block():
    assert chain([1], [2]).digest != chain([3], [2]).digest
    assert chain([1], [2]).digest == chain([1], [2]).digest


def test_equal_chains_are_the_same_content_and_others_are_not():
    assert same_content(chain([1], [2], [3]), chain([1], [2], [3]))
    assert not same_content(chain([1], [2], [3]), chain([9], [2], [3]))
    assert not same_content(chain([2], [3]), chain([1], [2], [3]))
    assert not same_content(chain([1], keys=("a",)), chain([1], keys=("b",)))
    assert not same_content(chain([1]), None)


def test_comparing_stops_where_the_chains_join():
    class Counting(tuple):
        compared = 0

        def __ne__(self, other):
            Counting.compared += 1
            return tuple.__ne__(self, other)

    root = make_content(None, [1])
    for _ in range(50):
        root = make_content(root, [1])
    a, b = make_content(root, [2]), make_content(root, [2])
    a.token_ids = Counting(a.token_ids)
    assert same_content(a, b)
    assert Counting.compared == 1


def test_a_very_long_chain_can_be_compared_and_dropped():
    a, b = chain(*[[1]] * 100_000), chain(*[[1]] * 100_000)
    assert same_content(a, b)
    del a, b
