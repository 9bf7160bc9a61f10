"""The exact bytes of single tokens, for users who join what one token alone cannot show. Touches the tokenizer only.

What holds: the bytes of a text's tokens, joined, are the bytes of the text (bar what a tokenizer changes at its start),
also where a token ends inside a character.
"""

import json
import re
from functools import cache
from typing import Any

from octavo.tokenization.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Bytes of tokens by id, found when asked for. Ids without a token have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = tokenizer.backend.get_added_tokens_decoder()
        kinds = _decoder_kinds(tokenizer.backend.decoder)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        if self._is_byte_level and all(char in _byte_of_char() for char in token):
            return bytes(_byte_of_char()[char] for char in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self._tokenizer.decode_token(token_id).encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    """Names of the decoder's parts, as tokenizer.json calls them."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {state["type"], *(part["type"] for part in state.get("decoders", ()))}


@cache
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet (Radford et al. 2019): printable bytes stand for themselves, the others follow 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
