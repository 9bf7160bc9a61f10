"""References that n samples of one prompt keep on its blocks, so that a sample that starts later can begin with them.

Only `KVCacheManager` makes and ends holds.
"""

from octavo.kvcache.block import KVCacheBlock
from octavo.kvcache.block_hash import BlockContent


class PromptHold:
    """An owner of the blocks of a computed prompt. Its last block may be partly filled."""

    __slots__ = ("blocks", "contents", "num_tokens")

    def __init__(self, blocks: list[KVCacheBlock], contents: list[BlockContent], num_tokens: int) -> None:
        self.blocks = blocks
        self.contents = contents
        """Of the full blocks; empty without prefix caching."""
        self.num_tokens = num_tokens

    @property
    def num_unshared(self) -> int:
        """Blocks nobody else owns: so many become available when the hold ends."""
        return sum(block.ref_count == 1 for block in self.blocks)
