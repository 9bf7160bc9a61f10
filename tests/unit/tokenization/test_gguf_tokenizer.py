"""Tokenizers built from GGUF metadata: golden tokenisations of real vocabularies, and every rule on small ones."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.errors import InvalidInput
from octavo.gguf_file import GGUFFile
from octavo.tokenization.gguf_tokenizer import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, build_tokenizer
from octavo.tokenization.pre_tokenizers import BPE_KINDS
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

BYTE = 6
SEPARATOR = "\n__ggml_vocab_test__\n"
SERVED_ARCHITECTURES = ("llama", "qwen2")
OTHER_GOLDEN = ("gpt-2", "mpt", "refact", "starcoder")
"""Vocabularies of other architectures whose kinds the served ones use too."""
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def golden_cases(file):
    texts = file.with_name(f"{file.name}.inp").read_text(encoding="utf-8").split(SEPARATOR)[:-1]
    lines = file.with_name(f"{file.name}.out").read_text().splitlines()
    return list(zip(texts, ([int(token) for token in line.split()] for line in lines), strict=True))


def golden_files(folder):
    files = [file for file in sorted(folder.glob("*.gguf")) if file.with_name(f"{file.name}.out").exists()]
    served = [f for f in files if GGUFFile(f).metadata["general.architecture"] in SERVED_ARCHITECTURES]
    return served + [folder / f"ggml-vocab-{name}.gguf" for name in OTHER_GOLDEN]


def byte_level(tokens=(), types=(), **keys):
    """Metadata of a byte-level BPE: one token a byte, then `tokens` of `types`."""
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*BYTES, *tokens],
        "token_type": [NORMAL] * len(BYTES) + list(types or [NORMAL] * len(tokens)),
        "merges": [],
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def sentencepiece(pieces, **keys):
    """Metadata of a SentencePiece BPE: unknown, begin, end, 256 bytes, then `pieces` (text -> score)."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *fallback, *pieces],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "scores": [0.0] * 259 + list(pieces.values()),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def build(metadata):
    vocabulary = build_tokenizer(metadata, "m.gguf")
    return Tokenizer(
        vocabulary.backend,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
        chat_templates=vocabulary.chat_templates,
        vocab_size=vocabulary.vocab_size,
    )


def tokens_of(tokenizer, text):
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]


class TestRealVocabularies:
    def test_golden_tokenisations_are_equal(self, model_path):
        files = golden_files(model_path("vocab"))
        assert {"ggml-vocab-llama-bpe.gguf", "ggml-vocab-llama-spm.gguf", "ggml-vocab-qwen2.gguf"} <= {
            file.name for file in files
        }
        for file in files:
            tokenizer = load_tokenizer(file)
            for text, expected in golden_cases(file):
                assert tokenizer.encode(text, add_special_tokens=False) == expected, (file.name, text)

    def test_smollm2_splits_digits_and_knows_its_special_tokens(self, model_path):
        tokenizer = load_tokenizer(model_path("smollm2"))
        assert tokens_of(tokenizer, "<|im_start|>user 2024") == ["<|im_start|>", "user", "Ġ", "2", "0", "2", "4"]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
        assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
        assert "<|im_start|>" in tokenizer.chat_template

    def test_qwen_composes_accents_and_leaves_out_padding_tokens(self, model_path):
        tokenizer = load_tokenizer(model_path("qwen05"))
        assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
        assert tokenizer.vocab_size == len(tokenizer) == 151665
        assert "[PAD151665]" not in tokenizer.get_vocab()

    def test_llama3_adds_bos_by_its_kind_alone(self, model_path):
        file = model_path("vocab") / "ggml-vocab-llama-bpe.gguf"
        assert "tokenizer.ggml.add_bos_token" not in GGUFFile(file).metadata
        assert load_tokenizer(file).encode("a")[0] == 128000


class TestByteLevel:
    @pytest.mark.parametrize("kind", sorted(BPE_KINDS))
    def test_every_kind_loses_no_text(self, kind):
        tokenizer = build(byte_level(pre=kind))
        for text in ("It's 12345 days!\r\n\n  ok", "naïve Übung, ČŽ 日本語。１２３", "\t a  ", "I'LL שלום"):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    @settings(max_examples=200, deadline=None)
    @given(kind=st.sampled_from(sorted(BPE_KINDS)), text=st.text(st.characters(codec="utf-8"), max_size=30))
    def test_any_text_comes_back(self, kind, text):
        tokenizer = _by_kind(kind)
        shown = tokenizer.backend.normalizer.normalize_str(text) if tokenizer.backend.normalizer else text
        assert tokenizer.decode(tokenizer.encode(text)) == shown

    def test_merges_apply_in_order(self):
        tokenizer = build(byte_level(["bc", "ab", "abc"], merges=["b c", "a b", "a bc"]))
        assert tokens_of(tokenizer, "abc ab") == ["abc", "Ġ", "ab"]

    def test_a_whole_piece_wins_over_merges_only_where_the_kind_says_so(self):
        metadata = byte_level(["ab", "abc"], merges=["a b"])
        assert tokens_of(build(metadata), "abc") == ["ab", "c"]
        metadata["tokenizer.ggml.pre"] = "llama-bpe"
        assert tokens_of(build(metadata), "abc") == ["abc"]

    def test_an_unknown_kind_is_refused_by_name(self):
        with pytest.raises(InvalidInput, match=r"'klingon'.*tokenizer="):
            build(byte_level(pre="klingon"))

    def test_a_missing_kind_is_said_and_the_default_used(self, caplog):
        metadata = byte_level()
        del metadata["tokenizer.ggml.pre"]
        tokenizer = build(metadata)
        assert "m.gguf does not name its pre-tokenizer" in caplog.text
        assert tokenizer.decode(tokenizer.encode("a 1234")) == "a 1234"

    def test_merges_of_tokens_that_do_not_exist_are_refused(self):
        with pytest.raises(InvalidInput, match="merge list does not fit"):
            build(byte_level(merges=["x yy"]))

    def test_missing_merges_are_refused_by_key(self):
        metadata = byte_level()
        del metadata["tokenizer.ggml.merges"]
        with pytest.raises(InvalidInput, match=r"tokenizer\.ggml\.merges is missing"):
            build(metadata)


class TestTokenTypes:
    def test_control_tokens_are_found_in_text_and_not_shown(self):
        tokenizer = build(byte_level(["<end>", "<tool>"], [CONTROL, USER_DEFINED]))
        ids = tokenizer.encode("a<tool>b<end>")
        assert [tokenizer.backend.id_to_token(i) for i in ids] == ["a", "<tool>", "b", "<end>"]
        assert tokenizer.decode(ids) == "a<tool>b"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b<end>"

    def test_unused_tokens_at_the_end_are_left_out(self):
        tokenizer = build(byte_level(["[A]", "b", "[PAD1]", "[PAD2]"], [UNUSED, CONTROL, UNUSED, UNUSED]))
        assert tokenizer.vocab_size == len(BYTES) + 2

    def test_types_must_be_as_many_as_tokens(self):
        with pytest.raises(InvalidInput, match="257 tokens but 256 token types"):
            build(byte_level(["x"], token_type=[NORMAL] * 256))


class TestSpecialIds:
    def test_bos_and_eos_are_put_around_a_text_if_the_file_says_so(self):
        ids = {"bos_token_id": 256, "eos_token_id": 257}
        tokenizer = build(byte_level(["<b>", "<e>"], [CONTROL] * 2, add_bos_token=True, add_eos_token=True, **ids))
        assert tokens_of(tokenizer, "a") == ["a"]
        assert tokenizer.encode("a") == [256, BYTES.index("a"), 257]
        assert tokenizer.encode("") == [256, 257]

    def test_the_file_overrides_the_default_of_the_kind(self):
        tokenizer = build(byte_level(["<b>"], [CONTROL], pre="llama-bpe", bos_token_id=256, add_bos_token=False))
        assert tokenizer.encode("a") == [BYTES.index("a")]

    def test_token_names_with_signs_of_the_template_language_are_no_trouble(self):
        tokenizer = build(byte_level(["$B:7 x"], [CONTROL], bos_token_id=256, add_bos_token=True))
        assert tokenizer.encode("a") == [256, BYTES.index("a")]

    def test_end_of_turn_and_message_count_as_ends(self):
        keys = {"eos_token_id": 256, "eot_token_id": 257, "eom_token_id": 256}
        assert build(byte_level(["<e>", "<t>"], [CONTROL] * 2, **keys)).eos_token_ids == (256, 257)

    def test_an_id_outside_the_vocabulary_is_refused(self):
        with pytest.raises(InvalidInput, match="eos token has id 256, but there are 256 tokens"):
            build(byte_level(eos_token_id=256))

    def test_asking_for_a_bos_that_is_not_named_is_refused(self):
        with pytest.raises(InvalidInput, match="asks for a bos token"):
            build(byte_level(add_bos_token=True))


class TestSentencePiece:
    def test_words_keep_their_spaces_and_bytes_stand_in_for_unknown_characters(self):
        tokenizer = build(sentencepiece({"▁": 0.0, "a": -1.0, "b": -2.0, "▁a": -3.0}))
        assert tokens_of(tokenizer, "a ab") == ["▁a", "▁a", "b"]
        assert tokens_of(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
        assert tokenizer.encode("a") == [1, tokenizer.backend.token_to_id("▁a")]
        for text in ("a ab", "  a", "é日 b "):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_no_space_is_put_before_a_text_if_the_file_says_so(self):
        tokenizer = build(sentencepiece({"▁": 0.0, "a": -1.0, "▁a": -3.0}, add_space_prefix=False))
        assert tokens_of(tokenizer, "a a") == ["a", "▁a"]
        assert tokenizer.decode(tokenizer.encode(" a")) == " a"

    def test_scores_must_be_as_many_as_tokens(self):
        with pytest.raises(InvalidInput, match="260 tokens but 3 scores"):
            build(sentencepiece({"a": 0.0}, scores=[0.0, 0.0, 0.0]))

    @settings(max_examples=300, deadline=None)
    @given(text=st.text("ab ", max_size=24), order=st.permutations(range(8)))
    def test_merging_is_what_sentencepiece_does(self, text, order):
        pieces = dict(zip(("▁", "a", "b"), (-100.0, -101.0, -102.0), strict=True))
        joined = ("▁▁", "▁a", "ab", "ba", "bb", "▁▁▁▁", "abba", "▁ab")
        pieces |= {piece: -float(rank) for piece, rank in zip(joined, order, strict=True)}
        assert tokens_of(build(sentencepiece(pieces)), text) == _sentencepiece_by_definition(pieces, text)


def _sentencepiece_by_definition(pieces, text):
    """Join the leftmost pair of neighbours whose union has the best score, until there is none."""
    symbols = list(("▁" + text if text else "").replace(" ", "▁"))
    while True:
        unions = [(-pieces[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
        if not unions:
            return symbols
        _, place = min(unions)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]


class TestWholeFile:
    def test_another_tokenizer_model_is_refused_by_name(self):
        with pytest.raises(InvalidInput, match=r"m\.gguf has a tokenizer of model 'bert'; only gpt2, llama"):
            build(byte_level(model="bert"))

    def test_a_file_without_tokenizer_is_refused(self):
        with pytest.raises(InvalidInput, match="tokenizer="):
            build({"general.architecture": "llama"})

    def test_a_value_of_the_wrong_type_is_refused_by_key(self):
        with pytest.raises(InvalidInput, match=r"tokenizer\.ggml\.tokens is 5, it must be a list of str"):
            build(byte_level() | {"tokenizer.ggml.tokens": 5})

    def test_templates_keep_their_names(self):
        named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
        tokenizer = build(byte_level() | named | {"tokenizer.chat_templates": ["tool_use"]})
        assert tokenizer.chat_template == "plain"
        assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}


_BUILT: dict[str, Tokenizer] = {}


def _by_kind(kind):
    if kind not in _BUILT:
        _BUILT[kind] = build(byte_level(pre=kind))
    return _BUILT[kind]
