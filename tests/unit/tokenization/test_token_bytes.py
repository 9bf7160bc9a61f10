import pytest
import tokenizers
from tiny_models import BOS, byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from octavo.tokenization.token_bytes import TokenBytes
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

TEXT = "ďábelské 👋 日本"


def test_joined_bytes_of_a_byte_level_tokenizer_are_the_text():
    tokenizer = Tokenizer(byte_tokenizer())
    token_bytes = TokenBytes(tokenizer)
    pieces = [token_bytes[token_id] for token_id in tokenizer.encode(TEXT)]
    assert all(len(piece) == 1 for piece in pieces)
    assert b"".join(pieces).decode() == TEXT


def test_an_added_token_has_the_bytes_of_its_text():
    assert TokenBytes(Tokenizer(byte_tokenizer()))[BOS] == b"<s>"


def test_an_id_without_a_token_has_no_bytes():
    assert TokenBytes(Tokenizer(byte_tokenizer()))[10_000] == b""


def sentencepiece() -> Tokenizer:
    words = ["<unk>", "▁Hello", "▁world", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


def test_byte_tokens_of_sentencepiece_are_one_byte_and_words_keep_their_space():
    tokenizer = sentencepiece()
    token_bytes = TokenBytes(tokenizer)
    ids = [1, 2, *(3 + byte for byte in "日".encode())]
    assert b"".join(token_bytes[token_id] for token_id in ids).decode() == " Hello world日"


@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_joined_bytes_of_a_real_tokenizer_are_the_text(model_path, name):
    tokenizer = load_tokenizer(model_path(name))
    token_bytes = TokenBytes(tokenizer)
    assert b"".join(token_bytes[token_id] for token_id in tokenizer.encode(TEXT)).decode() == TEXT
