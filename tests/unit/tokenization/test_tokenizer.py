"""Tokenizer and its loading from a folder in Hugging Face format."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import InvalidInput
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS = len(BYTES), len(BYTES) + 1


def byte_backend():
    """One token a byte, <s> before every text, </s> special too."""
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return backend


@pytest.fixture
def folder(tmp_path):
    byte_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


class TestFolder:
    def test_tokenizer_json_alone_is_enough(self, folder):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.decode(tokenizer.encode("hé")) == "hé"
        assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.chat_template) == ((), None, None)

    def test_the_file_itself_can_be_given(self, folder):
        assert load_tokenizer(folder / "tokenizer.json").vocab_size == EOS + 1

    @pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "lstrip": False}])
    def test_eos_is_read_as_string_or_object(self, folder, token):
        tokenizer = configure(folder, eos_token=token, bos_token="<s>")
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.eos_token_id) == (BOS, (EOS,), EOS)

    def test_special_tokens_map_is_read_where_the_config_is_silent(self, folder):
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "x"}))
        assert configure(folder, bos_token="<s>").eos_token_ids == (EOS,)
        assert load_tokenizer(folder).bos_token_id == BOS

    def test_the_post_processor_alone_decides_about_bos(self, folder):
        tokenizer = configure(folder, add_bos_token=False)
        assert tokenizer.encode("a") == [BOS, BYTES.index("a")]
        assert tokenizer.encode("a", add_special_tokens=False) == [BYTES.index("a")]

    def test_truncation_and_padding_of_the_file_are_off(self, folder):
        backend = byte_backend()
        backend.enable_truncation(2)
        backend.enable_padding(length=8)
        backend.save(str(folder / "tokenizer.json"))
        assert len(load_tokenizer(folder).encode("abc")) == 4

    def test_tokens_that_only_the_config_declares_are_added(self, folder):
        declared = {
            str(EOS + 1): {"content": "<tool>", "special": True},
            str(EOS): {"content": "</s>", "special": True},
        }
        tokenizer = configure(folder, added_tokens_decoder=declared)
        assert tokenizer.encode("<tool>", add_special_tokens=False) == [EOS + 1]
        assert tokenizer.vocab_size == EOS + 2
        assert tokenizer.decode([EOS + 1]) == ""

    def test_a_config_of_another_tokenizer_is_refused(self, folder):
        with pytest.raises(InvalidInput, match=r"'<tool>' the id 999.*do not belong together"):
            configure(folder, added_tokens_decoder={"999": {"content": "<tool>"}})


class TestChatTemplates:
    def test_a_string_is_the_default(self, folder):
        assert configure(folder, chat_template="T").chat_template == "T"

    def test_a_list_keeps_its_names(self, folder):
        listed = [{"name": "default", "template": "T"}, {"name": "rag", "template": "R"}]
        tokenizer = configure(folder, chat_template=listed)
        assert tokenizer.chat_template == "T"
        assert tokenizer.chat_templates == {"default": "T", "rag": "R"}

    def test_one_named_template_is_the_default(self, folder):
        assert configure(folder, chat_template=[{"name": "chatml", "template": "T"}]).chat_template == "T"

    def test_the_file_wins_over_the_config(self, folder):
        (folder / "chat_template.jinja").write_text("{# é #}F", encoding="utf-8")
        assert configure(folder, chat_template="T").chat_template == "{# é #}F"


class TestRefusals:
    def test_a_folder_without_tokenizer_json_names_the_way_out(self, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(b"")
        with pytest.raises(InvalidInput, match=r"no tokenizer\.json.*tokenizer="):
            load_tokenizer(tmp_path)

    def test_a_path_that_does_not_exist(self, tmp_path):
        with pytest.raises(InvalidInput, match="nowhere' does not exist"):
            load_tokenizer(tmp_path / "nowhere")

    def test_a_broken_tokenizer_json(self, folder):
        (folder / "tokenizer.json").write_text('{"model": ')
        with pytest.raises(InvalidInput, match=r"tokenizer\.json is no tokenizer"):
            load_tokenizer(folder)

    @pytest.mark.parametrize("content", ["{", "[]", "\xff"])
    def test_a_broken_config(self, folder, content):
        (folder / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(InvalidInput, match=r"tokenizer_config\.json"):
            load_tokenizer(folder)

    @pytest.mark.parametrize(
        "config",
        [{"chat_template": [{"name": "x"}]}, {"chat_template": [5]}, {"added_tokens_decoder": {"a": {}, "b": {}}}],
    )
    def test_a_config_of_another_form(self, folder, config):
        with pytest.raises(InvalidInput, match="not of the expected form"):
            configure(folder, **config)

    def test_a_broken_gguf(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"GGUF\x03")
        with pytest.raises(InvalidInput, match=r"m\.gguf"):
            load_tokenizer(tmp_path / "m.gguf")

    def test_a_lone_surrogate_is_refused_with_its_place(self, folder):
        with pytest.raises(InvalidInput, match=r"lone surrogate \('\\udc80'\) at character 2"):
            load_tokenizer(folder).encode("ab\udc80")

    def test_what_is_no_string_is_refused_by_type(self, folder):
        with pytest.raises(InvalidInput, match="is a int"):
            load_tokenizer(folder).encode(5)


class TestTokens:
    def test_vocab_size_counts_to_the_highest_id(self):
        backend = tokenizers.Tokenizer(models.BPE({"a": 0, "z": 9}, []))
        tokenizer = Tokenizer(backend)
        assert (tokenizer.vocab_size, len(tokenizer)) == (10, 2)

    def test_ids_outside_the_vocabulary_decode_to_nothing(self, folder):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.decode([10**6, *tokenizer.encode("a")]) == "a"
        assert tokenizer.decode_token(10**6) == ""

    def test_a_single_token_shows_its_leading_space_and_special_tokens(self, folder):
        assert load_tokenizer(folder).decode_token(EOS) == "</s>"
        pieces = tokenizers.Tokenizer(models.BPE({"▁": 0, "▁a": 1, "a": 2, "<0x41>": 3}, [("▁", "a")]))
        pieces.normalizer = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        pieces.decoder = decoders.Sequence(steps)
        pieces.add_tokens([AddedToken("<x>", special=True)])
        tokenizer = Tokenizer(pieces)
        assert [tokenizer.decode_token(i) for i in range(5)] == [" ", " a", "a", "A", "<x>"]
