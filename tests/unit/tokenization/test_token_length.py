"""A text never has fewer tokens than its length alone is said to prove."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from octavo.tokenization import token_length
from octavo.tokenization.token_length import TokenLengthBound
from octavo.tokenization.tokenizer import load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(words: list[str], *, without: str = "", unk: str | None = None, normalizer=None, pre=None) -> Tokenizer:
    """Byte-level BPE whose vocabulary has the bytes, and words of them with a merge for each prefix."""
    vocab = {char: i for i, char in enumerate(c for c in ALPHABET if c not in without)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    if unk is not None:
        vocab[unk] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=unk is not None))
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


@pytest.fixture(autouse=True)
def short_texts_count_too(monkeypatch):
    monkeypatch.setattr(token_length, "_WORTHWHILE", 0)


def check(backend: Tokenizer, text: str) -> int:
    """The bound holds; returns it."""
    bound = TokenLengthBound(backend).min_tokens(text)
    assert bound <= len(backend.encode(text, add_special_tokens=False).ids)
    return bound


def test_the_longest_token_sets_the_bound():
    backend = byte_level(["aaaaaaaa"])
    assert check(backend, "a" * 800) == 100
    assert check(backend, "é" * 400) == 100
    assert check(byte_tokenizer(), "word " * 20) == 20, "its longest token is </pad>, of 5 bytes"


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=60),
    words=st.lists(st.text("ab Ġé", min_size=2, max_size=8), max_size=4),
    lost=st.text("abé", max_size=2),
)
def test_no_text_has_fewer_tokens_than_said(text, words, lost):
    words = [
        word for word in ("".join(c for c in w if c in ALPHABET and c not in lost) for w in words) if len(word) > 1
    ]
    for unk in (None, "<unk>"):
        check(byte_level(words, without=lost, unk=unk), text)
        check(byte_level(words, without=lost, unk=unk, normalizer=normalizers.NFC()), text + "e\u0301" * 9)


def test_bytes_without_a_token_do_not_count():
    backend = byte_level(["bb"], without="a")
    assert backend.encode("a" * 100).ids == []
    assert check(backend, "a" * 100) == 0
    assert check(backend, "ab" * 100) == 50


def test_a_text_that_may_be_shortened_first_proves_nothing():
    shrinks = normalizers.Sequence([normalizers.NFC()])
    backend = byte_level([], normalizer=shrinks)
    assert check(backend, "e\u0301" * 100) == 0
    assert check(backend, "e" * 100) == 100, "of ASCII nothing is composed"
    for normalizer in (normalizers.Strip(), normalizers.Lowercase(), normalizers.Replace("aaa", "b"),
                       normalizers.Replace(Regex(" +"), " "), normalizers.StripAccents()):  # fmt: skip
        assert check(byte_level([], normalizer=normalizer), " " * 50 + "aaa" * 20) == 0
    assert check(byte_level([], normalizer=normalizers.Replace(" ", "bb")), " " * 50) == 50


@pytest.mark.parametrize(
    "backend",
    [
        Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
        Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        Tokenizer(models.BPE({"a": 0}, [])),
        byte_level([], pre=pre_tokenizers.Sequence([
            pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])),
        byte_level([], pre=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
    ],
)  # fmt: skip
def test_tokenizers_that_lose_text_or_make_one_token_of_much_allow_no_bound(backend):
    assert check(backend, "x" * 100 + " " * 100) == 0


def test_added_tokens_that_swallow_spaces_allow_no_bound():
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken("<end>", rstrip=True)])
    assert len(backend.encode("<end>" + " " * 100).ids) == 1
    assert check(backend, "<end>" + " " * 100) == 0


def test_sentencepiece_with_bytes_for_the_unknown_has_a_bound_and_without_has_none():
    def make(num_bytes: int) -> Tokenizer:
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(num_bytes)), "▁", "▁▁"]
        backend = Tokenizer(
            models.BPE({word: i for i, word in enumerate(words)}, [("▁", "▁")], unk_token="<unk>", byte_fallback=True)
        )
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return backend

    assert check(make(256), " " * 100 + "x" * 20) == 20, "<0x..> is 6 bytes long, though it stands for one"
    assert check(make(255), " " * 100) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-2", "llama-spm", "phi-3", "deepseek-coder", "starcoder"])
def test_it_holds_for_real_vocabularies_and_their_longest_tokens(name, model_path):
    tokenizer = load_tokenizer(model_path("vocab") / f"ggml-vocab-{name}.gguf")
    backend, rng = tokenizer.backend, random.Random(1)
    longest = sorted(backend.get_vocab().items(), key=lambda entry: -len(entry[0]))[:30]
    texts = [tokenizer.decode([token_id], skip_special_tokens=False) * 50 for _, token_id in longest]
    texts += ["".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x300, 0xD800)])) for _ in range(500))]
    texts += [char * 3000 for char in " -=\n\ta日👋"]
    bounds = [check(backend, text) for text in texts]
    assert name == "phi-3" or max(bounds) > 0
