"""How few tokens a text can have: what its length alone proves, so that a hopeless one need not be tokenised.

Exact in one direction: no text ever has fewer tokens than said. That needs a tokenizer which never loses a character
and never makes one token of text that is not in its vocabulary; of any other kind nothing is claimed.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

_WHOLE_ON_ASCII = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that may shorten a text, but never one of ASCII alone."""


_WORTHWHILE = 4096
"""Characters; of a shorter text nothing is said."""


class TokenLengthBound:
    """The bound of one tokenizer. Thread-safe.

    Args:
        backend: as it encodes. It is looked at when the first long text comes; later changes are not seen.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def min_tokens(self, text: str) -> int:
        """No fewer tokens than these; 0 if nothing can be said. Takes a fraction of the time of encoding."""
        if len(text) < _WORTHWHILE:
            return 0
        facts = self._facts
        if facts is None or (facts.needs_ascii and not text.isascii()):
            return 0
        kept = text.encode("utf-8", "surrogatepass").translate(None, facts.lost_bytes)
        return -(-len(kept) // facts.longest_token)

    @cached_property
    def _facts(self) -> "_Facts | None":
        """None: this kind of tokenizer allows no bound."""
        backend = self._backend
        pre_tokenizer, normalizer = _state(backend.pre_tokenizer), _state(backend.normalizer)
        if not _pre_tokenizer_keeps_all(pre_tokenizer) or not _normalizer_keeps_all(normalizer, ascii_only=True):
            return None
        vocab = backend.get_vocab(with_added_tokens=True)
        lost = _lost_bytes(backend, vocab, pre_tokenizer)
        if lost is None:
            return None
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        is_byte_level = _is_byte_level(pre_tokenizer)
        return _Facts(
            lost_bytes=lost,
            longest_token=max(len(t) if is_byte_level and t not in added else _num_bytes(t) for t in vocab),
            needs_ascii=not _normalizer_keeps_all(normalizer, ascii_only=False),
        )


@dataclass(frozen=True)
class _Facts:
    lost_bytes: bytes
    """Each of these has no token, and disappears."""
    longest_token: int
    """Bytes of a text that one token stands for at most."""
    needs_ascii: bool


def _num_bytes(token: str) -> int:
    """At least as many bytes as of a text the token can stand for."""
    return len(token.encode("utf-8", "surrogatepass"))


def _state(part: Any) -> dict[str, Any]:
    """The parts of a tokenizer serialise themselves as JSON."""
    if part is None:
        return {"type": None}
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else {"type": "?"}


def _lost_bytes(backend: tokenizers.Tokenizer, vocab: dict[str, int], pre_tokenizer: dict[str, Any]) -> bytes | None:
    """The bytes that a text loses because the vocabulary has no token for them; None: more than single bytes may go."""
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # it swallows the spaces beside it
    model = backend.model
    if isinstance(model, tokenizers.models.BPE | tokenizers.models.Unigram) and getattr(model, "byte_fallback", False):
        return b"" if all(f"<0x{byte:02X}>" in vocab for byte in range(256)) else None
    if not isinstance(model, tokenizers.models.BPE) or not _is_byte_level(pre_tokenizer):
        return None
    return bytes(byte for byte, char in _byte_level_alphabet().items() if char not in vocab)


def _is_byte_level(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether each character of a token stands for one byte."""
    return any(part["type"] == "ByteLevel" for part in _parts(pre_tokenizer, "pretokenizers"))


def _byte_level_alphabet() -> dict[int, str]:
    """How byte-level tokenizers write each byte: as itself where that can be seen, else from U+0100 on (GPT-2)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}


def _parts(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """A sequence's parts, or the only one."""
    if state["type"] != "Sequence":
        return [state]
    return [part for entry in state[key] for part in _parts(entry, key)]


def _pre_tokenizer_keeps_all(state: dict[str, Any]) -> bool:
    for part in _parts(state, "pretokenizers"):
        splits = part["type"] in ("Split", "Punctuation") and part.get("behavior") != "Removed"
        if not splits and part["type"] not in (None, "ByteLevel", "Digits", "Metaspace"):
            return False
    return True


def _normalizer_keeps_all(state: dict[str, Any], ascii_only: bool) -> bool:
    """Whether no text, or none of ASCII, gets shorter."""
    for part in _parts(state, "normalizers"):
        kind = part["type"]
        if kind == "Replace":
            old = part.get("pattern", {}).get("String")
            if not old or len(str(part.get("content", "")).encode()) < len(old.encode()):
                return False
        elif kind not in (None, "Prepend", "ByteLevel") and not (ascii_only and kind in _WHOLE_ON_ASCII):
            return False
    return True
