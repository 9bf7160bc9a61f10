"""What a full block holds, and the digest it is found by.

The KV of a block depends on its own tokens, on every token before it, and on extra keys (see `extra_keys`). The digest
chains over all of these. Because the content itself is kept beside the digest, two contents that share a digest
are told apart: no request is ever given the KV of another prompt.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

ROOT_DIGEST = b""
"""Parent digest of a first block."""


class BlockContent:
    """The content of one full block: a link in a chain that leads to the first block of the prompt."""

    __slots__ = ("digest", "extra_keys", "parent", "token_ids")

    def __init__(
        self, digest: bytes, parent: "BlockContent | None", token_ids: tuple[int, ...], extra_keys: tuple[str, ...]
    ) -> None:
        self.digest = digest
        self.parent = parent
        """May be replaced by an equal content, so that equal prompts share one chain."""
        self.token_ids = token_ids
        self.extra_keys = extra_keys


def hash_block(parent_digest: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...]) -> bytes:
    """SHA-256 over the parent's digest, the block's token ids and the extra keys; 32 bytes.

    Every part has a fixed or stated length, so different parts never encode to the same bytes. The encoding does not
    depend on the machine or the process.
    """
    parts = [struct.pack(f"<qq{len(token_ids)}q", len(parent_digest), len(token_ids), *token_ids), parent_digest]
    for key in extra_keys:
        encoded = key.encode("utf-8", "surrogatepass")
        parts += (struct.pack("<q", len(encoded)), encoded)
    return sha256(b"".join(parts)).digest()


def make_content(
    parent: BlockContent | None, token_ids: Sequence[int], extra_keys: tuple[str, ...] = ()
) -> BlockContent:
    """The content of the block that holds `token_ids` after `parent`."""
    parent_digest = ROOT_DIGEST if parent is None else parent.digest
    return BlockContent(hash_block(parent_digest, token_ids, extra_keys), parent, tuple(token_ids), extra_keys)


def same_content(a: BlockContent | None, b: BlockContent | None) -> bool:
    """Whether two chains hold the same tokens under the same extra keys. Stops where the chains join."""
    while a is not b:
        if a is None or b is None or a.token_ids != b.token_ids or a.extra_keys != b.extra_keys:
            return False
        a, b = a.parent, b.parent
    return True
