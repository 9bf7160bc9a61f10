"""Tokenizer files that are damaged or contradict themselves: always one refusal that names the file."""

import json
import os

import pytest
import tiny_models

from octavo.errors import InvalidInput
from octavo.tokenization import tokenizer as module
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny_models.byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def change(folder, **parts):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return path


PANICS = {
    "a normalizer whose table is broken": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    },
    "an empty pattern": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a"}},
    "a template with a token that is not declared": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<b>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("parts", PANICS.values(), ids=PANICS)
def test_what_makes_the_library_panic_is_refused_at_load(folder, parts):
    path = change(folder, **parts)
    with pytest.raises(InvalidInput, match=str(path)):
        load_tokenizer(folder)


NO_UNKNOWN = {
    "WordLevel": {"type": "WordLevel", "unk_token": "zz", "vocab": {"a": 1}},
    "WordPiece": {
        "type": "WordPiece", "unk_token": "zz", "continuing_subword_prefix": "#", "max_input_chars_per_word": 9,
        "vocab": {"a": 1},
    },
    "Unigram": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0], ["b", 1.0]]},
    "BPE": {"type": "BPE", "unk_token": "zz", "vocab": {"a": 1}, "merges": []},
}  # fmt: skip


@pytest.mark.parametrize("model", NO_UNKNOWN.values(), ids=NO_UNKNOWN)
def test_a_text_that_the_vocabulary_lacks_is_refused_and_others_are_not(folder, model):
    path = change(folder, model=model, pre_tokenizer=None, post_processor=None, added_tokens=[])
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("a")) == 1
    with pytest.raises(InvalidInput, match=f"{path} cannot encode the text"):
        tokenizer.encode("q")


class Backend:
    """Fails in every call."""

    def __init__(self, error):
        self._error = error

    def no_truncation(self):
        pass

    no_padding = no_truncation

    def get_vocab(self, with_added_tokens):
        return {"a": 0}

    def decode(self, ids, skip_special_tokens):
        raise self._error

    def encode_batch_fast(self, texts, add_special_tokens):
        raise self._error


PanicException = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize("error", [PanicException("boom"), Exception("boom")])
def test_failures_of_the_library_are_refusals(error):
    tokenizer = Tokenizer(Backend(error), source="a/file")
    with pytest.raises(InvalidInput, match="a/file cannot decode"):
        tokenizer.decode([0])
    with pytest.raises(InvalidInput, match="a/file cannot encode"):
        tokenizer.encode("a")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_other_exceptions_pass(error):
    tokenizer = Tokenizer(Backend(error()))
    with pytest.raises(error):
        tokenizer.decode([0])
    with pytest.raises(error):
        tokenizer.encode("a")


CONFIG_FILES = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", [*CONFIG_FILES, "additional_chat_templates/x.jinja"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "broken disk"])
def test_a_file_that_cannot_be_read_is_refused_by_name(folder, name, kind):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/proc/self/mem")  # a regular file whose first byte cannot be read
    with pytest.raises(InvalidInput, match=str(path)):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", CONFIG_FILES[:2])
def test_a_config_nested_too_deep_is_refused(folder, name):
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match=name):
        load_tokenizer(folder)


def test_an_error_of_the_system_is_a_refusal(folder, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "_load", fail)
    with pytest.raises(InvalidInput, match="cannot be read: Permission denied"):
        load_tokenizer(folder)
