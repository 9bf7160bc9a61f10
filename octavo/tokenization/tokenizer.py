"""Text to token ids and back, whatever file the tokenizer came in. Reads files, never the network.

`load_tokenizer` reads a folder in Hugging Face format, a tokenizer.json or a GGUF file; all give the same `Tokenizer`.
"""

import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from octavo.errors import InvalidInput, printable, short_repr
from octavo.gguf_file import GGUFFile
from octavo.tokenization.gguf_tokenizer import WORD_START, build_tokenizer

_GGUF_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # spelt so in the format
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
"""Special tokens with a name of their own -> their name in GGUF keys."""
_WRONG_FORM = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
_ANY_TEXT = "Hello, 1 world"


class Tokenizer:
    """A vocabulary with what a model says about it. Immutable after construction, safe to share between threads.

    Args:
        backend: the tokenizers library's object; its truncation and padding are switched off.
        bos_token_id: begin-of-sequence id, if the model has one.
        eos_token_ids: ids that end a sequence, the main one first.
        chat_templates: Jinja source by name; the unnamed one is `default`.
        special_tokens: text by name (`bos_token`, ...), as chat templates call them; the names of `bos_token_id` and
            `eos_token_ids` are added.
        vocab_size: highest id + 1; None: found from the backend.
        source: where it came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
        source: str = "the tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.source = source
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_templates = dict(chat_templates or {})
        self.special_tokens = dict(special_tokens or {})
        for name, token_id in (("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id)):
            token = None if token_id is None else backend.id_to_token(token_id)
            if token is not None:
                self.special_tokens.setdefault(name, token)
        self.vocab_size = max(self.get_vocab().values(), default=-1) + 1 if vocab_size is None else vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The main end-of-sequence id."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the model's default chat template."""
        return self.chat_templates.get("default")

    def __len__(self) -> int:
        """Number of tokens, added ones included; less than `vocab_size` if ids are skipped."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: put begin- and end-of-sequence tokens around it where the model wants them.

        Raises:
            InvalidInput: `text` has a lone surrogate, so it is no Unicode text; or the tokenizer has no tokens for it.
        """
        try:
            # the batch call lets other threads run meanwhile, `encode` does not
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise _no_text(text) from error
        except BaseException as error:
            if not is_backend_error(error):
                raise
            raise InvalidInput(
                f"{self.source} cannot encode the text: {printable(str(error))}; give another with tokenizer="
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids` as a whole. Ids outside the vocabulary add nothing."""
        return self._decode(ids, skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """Text of one token as it reads inside a text: a leading space is kept, special tokens are shown."""
        text = self._decode([token_id], skip_special_tokens=False)
        token = self.backend.id_to_token(token_id)
        if token is not None and token.startswith(WORD_START) and not text.startswith((" ", WORD_START)):
            return f" {text}"
        return text

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_backend_error(error):
                raise
            raise InvalidInput(
                f"{self.source} cannot decode tokens: {printable(str(error))}; give another with tokenizer="
            ) from error

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Token ids of a conversation, or its text without `tokenize`; called as in the transformers library.

        `variables` are further ones of the template. See `octavo.tokenization.chat.render_chat` for the rest.
        """
        from octavo.tokenization.chat import encode_rendered, render_chat  # brings Jinja, which few callers need

        text = render_chat(
            self,
            conversation,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            chat_template_kwargs=variables,
        )
        return encode_rendered(self, text) if tokenize else text

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: a folder with tokenizer.json and, where the model has them, tokenizer_config.json and chat_template.jinja;
            or a tokenizer.json; or a .gguf file.

    Raises:
        InvalidInput: there is no tokenizer, or it cannot be read.
    """
    try:
        tokenizer = _load(path)
    except OSError as error:
        raise InvalidInput(
            f"tokenizer file {str(error.filename or path)!r} cannot be read: {error.strerror or error}; check the file"
        ) from error
    _try_out(tokenizer)
    return tokenizer


def is_backend_error(error: BaseException) -> bool:
    """Whether the tokenizers library raised it: a bare Exception, or a panic, which is not even one of those."""
    kind = type(error)
    return kind is Exception or (kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime")


def _load(path: Path) -> Tokenizer:
    if path.is_dir():
        return _load_folder(path, path / "tokenizer.json")
    if not path.is_file():
        raise InvalidInput(f"tokenizer {str(path)!r} does not exist; give a folder, a tokenizer.json or a .gguf file")
    if path.suffix == ".gguf":
        return _load_gguf(path)
    return _load_folder(path.parent, path)


def _try_out(tokenizer: Tokenizer) -> None:
    """Encode and decode something. A part that contradicts itself panics with every text; an unknown token is none."""
    try:
        tokenizer.decode(tokenizer.encode(_ANY_TEXT))
    except InvalidInput as refusal:
        if type(refusal.__cause__) is not Exception:
            raise


def _load_gguf(path: Path) -> Tokenizer:
    metadata = GGUFFile(path).metadata
    try:
        vocabulary = build_tokenizer(metadata, str(path))
    except BaseException as error:
        if not is_backend_error(error):
            raise
        raise InvalidInput(f"{path}: no tokenizer can be made of its metadata: {printable(str(error))}") from error
    return Tokenizer(
        vocabulary.backend,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
        chat_templates=vocabulary.chat_templates,
        special_tokens=_named_tokens(metadata, vocabulary.backend),
        vocab_size=vocabulary.vocab_size,
        source=str(path),
    )


def _load_folder(folder: Path, file: Path) -> Tokenizer:
    if not file.is_file():
        raise InvalidInput(
            f"model folder {str(folder)!r} has no tokenizer.json; give a folder or file that has one with tokenizer="
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        if not (isinstance(error, Exception) or is_backend_error(error)):
            raise
        raise InvalidInput(
            f"{file} is no tokenizer of the tokenizers library: {printable(str(error))}; get the file again"
        ) from error
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    try:
        return _configured(backend, config, file)
    except InvalidInput:
        raise
    except BaseException as error:
        if not (isinstance(error, _WRONG_FORM) or is_backend_error(error)):
            raise
        raise InvalidInput(
            f"tokenizer_config.json or chat_template.jinja in {folder} is not of the expected form: "
            f"{short_repr(error, 200)}; "
            "get the files again"
        ) from error


def _configured(backend: tokenizers.Tokenizer, config: Mapping[str, object], file: Path) -> Tokenizer:
    _add_configured_tokens(backend, config, file.parent)
    bos_id, eos_id = (_token_id(backend, config.get(key)) for key in ("bos_token", "eos_token"))
    return Tokenizer(
        backend,
        bos_token_id=bos_id,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_templates=_chat_templates(file.parent, config.get("chat_template")),
        special_tokens={name: text for name in _GGUF_NAMES if (text := _token_text(config.get(name)))},
        source=str(file),
    )


def _read_json(file: Path) -> dict[str, object]:
    """An absent file is an empty dict."""
    text = _read_text(file)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON: {error}; get the file again") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} holds a {type(content).__name__}, it must be an object; get the file again")
    return content


def _read_text(file: Path) -> str | None:
    """None if there is no such file. Only regular files are opened: reading a pipe may never end."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise InvalidInput(f"{file} is no regular file; put the model's own file there, or remove it")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror or error}; check the file") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8 text: {error}; get the file again") from error


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, object], folder: Path) -> None:
    """Register tokens that tokenizer_config.json declares and tokenizer.json does not (or not as special)."""
    declared = config.get("added_tokens_decoder")
    known = backend.get_added_tokens_decoder()
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])) if isinstance(declared, dict) else ():
        token_id, content, special = int(key), str(entry["content"]), bool(entry.get("special", False))
        if token_id in known and known[token_id].content == content and known[token_id].special >= special:
            continue
        options = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        backend.add_tokens([tokenizers.AddedToken(content, special=special, **options)])
        if backend.token_to_id(content) != token_id:
            raise InvalidInput(
                f"{folder / 'tokenizer_config.json'} gives token {short_repr(content)} the id {token_id}, "
                f"but tokenizer.json makes it {backend.token_to_id(content)}; the two files do not belong together"
            )


def _token_id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    """Id of a token written as a string or as an object with `content`."""
    content = _token_text(token)
    return None if content is None else backend.token_to_id(content)


def _token_text(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_tokens(metadata: Mapping[str, object], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Texts of the special tokens that a GGUF file names, by the names that chat templates use."""
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_NAMES.items()}
    texts = {
        name: backend.id_to_token(token_id)
        for name, token_id in ids.items()
        if isinstance(token_id, int) and 0 <= token_id < 2**32
    }
    return {name: text for name, text in texts.items() if text is not None}


def _chat_templates(folder: Path, configured: object) -> dict[str, str]:
    """Templates by name. Files of their own win over those of tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in configured}
        if len(templates) == 1:
            templates = {"default": next(iter(templates.values()))}
    default = folder / "chat_template.jinja"
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for name, file in (("default", default), *((file.stem, file) for file in named)):
        text = _read_text(file)
        if text is not None:
            templates[name] = text
    return templates


def _no_text(text: object) -> InvalidInput:
    if not isinstance(text, str):
        return InvalidInput(f"prompt {short_repr(text)} is a {type(text).__name__}, it must be a string")
    place = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    return InvalidInput(
        f"prompt has a lone surrogate ({text[place : place + 1]!a}) at character {place}, which is no Unicode text; "
        "decode the bytes it came from with errors='replace'"
    )
