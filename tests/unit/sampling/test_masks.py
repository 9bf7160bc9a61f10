import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.masks import BadWords, keep_only, mask_out
from octavo.sampling.penalties import TokenEntries

INF = float("inf")


def entries(*pairs: tuple[int, int]) -> TokenEntries:
    rows, token_ids = np.array(pairs, dtype=np.int64).T
    return TokenEntries(rows.copy(), token_ids.copy())


tokens = st.integers(0, 3)


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=5), st.lists(tokens, max_size=8))
def test_the_last_id_of_a_bad_word_is_banned_exactly_after_the_others(sequences, output):
    expected = {s[-1] for s in sequences if len(s) == 1 or output[-(len(s) - 1) :] == s[:-1]}
    assert set(BadWords(sequences).banned_after(np.array(output, dtype=np.int32)).tolist()) == expected


def test_only_the_end_of_the_output_counts():
    bad = BadWords([[1, 2, 3]])
    assert bad.num_context == 2
    assert bad.banned_after(np.array([1, 2])).tolist() == [3]
    assert bad.banned_after(np.array([1, 2, 0])).tolist() == []
    assert bad.banned_after(np.array([2])).tolist() == []
    assert bad.banned_after(np.array([], dtype=np.int32)).tolist() == []


def test_keep_only_touches_the_rows_that_have_a_list_and_takes_duplicates():
    logits = torch.arange(8.0).view(2, 4)
    keep_only(logits, entries((1, 2), (1, 0), (1, 2)))
    assert logits.tolist() == [[0, 1, 2, 3], [4, -INF, 6, -INF]]


def test_mask_out_bans_the_entries():
    logits = torch.zeros(2, 3)
    mask_out(logits, entries((0, 1), (1, 2), (1, 2)))
    assert logits.tolist() == [[0, -INF, 0], [0, 0, -INF]]
