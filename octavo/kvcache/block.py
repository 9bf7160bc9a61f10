"""One physical block of the pool. Only `BlockPool` and `FreeList` write its fields."""

from octavo.kvcache.block_hash import BlockContent


class KVCacheBlock:
    """A block id with its owners' count, what it is findable under, and its links while nobody holds it."""

    __slots__ = ("block_id", "content", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.content: BlockContent | None = None
        """Set exactly while the block is published."""
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, published={self.content is not None})"
