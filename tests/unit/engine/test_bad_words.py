"""bad_words_token_ids and check_some_token_remains: which sequences are banned, and when that leaves nothing."""

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from octavo.engine.bad_words import bad_words_token_ids, check_some_token_remains
from octavo.errors import InvalidInput
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

load = functools.lru_cache(load_tokenizer)


@pytest.fixture(params=["smollm2", "qwen05", "llama-spm"])
def tokenizer(request, model_path):
    name = request.param
    return load(model_path("vocab") / "ggml-vocab-llama-spm.gguf" if name == "llama-spm" else model_path(name))


def is_banned(banned, ids):
    """Whether any banned sequence stands somewhere in `ids`."""
    return any(ids[i : i + len(b)] == b for b in banned for i in range(len(ids)))


@pytest.mark.parametrize("word", ["exaggerated", " exaggerated", "Paris", "日本", "two words"])
@pytest.mark.parametrize("text", ["{}", "it is {} indeed", "\n{}"])
def test_word_is_banned_at_the_start_and_inside_a_text(tokenizer, word, text):
    banned = bad_words_token_ids(tokenizer, [word])
    assert is_banned(banned, tokenizer.encode(text.format(word.strip()), add_special_tokens=False))


@pytest.mark.parametrize("word", ["exaggerated", "hello"])
def test_both_forms_are_banned_whatever_their_lengths(model_path, word):
    """One form may have several tokens and the other one; both must be there."""
    tokenizer = load(model_path("smollm2"))
    banned = bad_words_token_ids(tokenizer, [word])
    forms = [tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]
    assert forms[0] != forms[1]
    assert banned == forms


def test_other_words_are_not_banned(tokenizer):
    banned = bad_words_token_ids(tokenizer, ["exaggerated"])
    for text in ("it is exact", "exact", " gerade", "\n"):
        assert not is_banned(banned, tokenizer.encode(text, add_special_tokens=False))


def test_sequence_that_ends_with_a_banned_one_is_left_out(tokenizer):
    banned = bad_words_token_ids(tokenizer, ["Paris", "in Paris", "Paris"])
    assert banned == bad_words_token_ids(tokenizer, ["Paris"])


def test_white_space_alone_is_a_word_of_its_own(model_path):
    tokenizer = load(model_path("smollm2"))
    assert tokenizer.encode("\n\n", add_special_tokens=False) in bad_words_token_ids(tokenizer, ["\n\n"])


def test_word_without_tokens_is_refused_by_name():
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(InvalidInput, match=r"bad_words=.*'x' has no tokens"):
        bad_words_token_ids(tokenizer, ["x"])


TOKENS = st.integers(0, 3)


@settings(max_examples=500, deadline=None)
@given(
    allowed=st.sets(TOKENS, min_size=1, max_size=3),
    held_back=st.sets(TOKENS, max_size=2),
    min_tokens=st.integers(0, 3),
    banned=st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=6),
)
def test_refused_is_exactly_what_can_run_out_of_tokens(allowed, held_back, min_tokens, banned):
    """Against the definition: every output that the bans allow is walked, as far as the longest ban can look back."""
    try:
        check_some_token_remains(allowed, held_back, min_tokens, banned)
        refused = False
    except InvalidInput:
        refused = True
    assert refused == can_run_out(allowed, held_back, min_tokens, banned, depth=5)


def can_run_out(allowed, held_back, min_tokens, banned, depth):
    outputs = [()]
    for length in range(depth + 1):
        left_now = allowed - held_back if length < min_tokens else allowed
        following = []
        for output in outputs:
            left = {t for t in left_now if not any((*output, t)[-len(b) :] == tuple(b) for b in banned)}
            if not left:
                return True
            # An output goes on behind a token that ends it only if it does not end there.
            following += [(*output, token) for token in left - held_back]
        outputs = following
    return False
