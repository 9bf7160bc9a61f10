"""The blocks of one device: reference counts, the free list in LRU order, and the published contents.

The free list holds blocks that hold nothing at its front and cached blocks, least recently used first, behind them: so
memory that holds nothing is taken before anything is evicted. `total == free + cached + in use` at every moment.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from octavo.kvcache.block import KVCacheBlock
from octavo.kvcache.block_hash import BlockContent, same_content
from octavo.kvcache.free_list import FreeList


class BlockPool:
    """Hands out blocks and takes them back; finds a published block by its content.

    Args:
        num_blocks: blocks in the pool; ids are 0 .. num_blocks - 1.
        enable_caching: keep published blocks findable after their last owner has gone.
        free_order: the order in which blocks are first handed out; default ascending.
    """

    def __init__(self, num_blocks: int, enable_caching: bool, free_order: Sequence[int] | None = None) -> None:
        order = range(num_blocks) if free_order is None else free_order
        assert sorted(order) == list(range(num_blocks)), "free_order must name every block once"
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self.blocks[block_id] for block_id in order)
        self._published: dict[bytes, KVCacheBlock] = {}
        self._num_cached = 0
        self.peak_in_use = 0
        """Most blocks ever in use at once."""

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free and cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_free(self) -> int:
        return len(self._free) - self._num_cached

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out blocks with one owner each, evicting the least recently used cached ones if it must.

        Raises:
            RuntimeError: fewer than `num_blocks` are available; nothing has changed.
        """
        if num_blocks > len(self._free):
            raise RuntimeError(f"{num_blocks} blocks asked of a pool that has {len(self._free)} available")
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.content is not None:
                self._num_cached -= 1
                self._unpublish(block)
            block.ref_count = 1
        self._note_peak()
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add an owner to each of these blocks, which are published or have an owner."""
        for block in blocks:
            assert block.content is not None or block.ref_count > 0, f"{block} holds nothing that could be shared"
            if block.ref_count == 0:
                self._free.remove(block)
                self._num_cached -= 1
            block.ref_count += 1
        self._note_peak()

    def free(self, blocks_tail_first: Iterable[KVCacheBlock]) -> None:
        """Take one owner from each block. Tail first: of one chain the tail is then evicted before the head."""
        for block in blocks_tail_first:
            assert block.ref_count > 0, f"{block} is freed but has no owner"
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.content is None:
                self._free.prepend(block)
            else:
                self._free.append(block)
                self._num_cached += 1

    def lookup(self, content: BlockContent) -> KVCacheBlock | None:
        """The published block that holds exactly this content."""
        block = self._published.get(content.digest)
        return block if block is not None and same_content(block.content, content) else None

    def publish(self, block: KVCacheBlock, content: BlockContent) -> KVCacheBlock:
        """Make `block`, whose KV has been written, findable, and return the block that is found under the digest.

        If that is another one (it was computed twice at the same time, or the digests collide), `block` stays private.
        """
        assert self.enable_caching and block.ref_count > 0, f"{block} cannot be published"
        holder = self._published.setdefault(content.digest, block)
        if holder is block:
            block.content = content
        return holder

    def refresh(self, block: KVCacheBlock, content: BlockContent) -> None:
        """Before a private duplicate is freed: its content counts as used now, whichever block holds it.

        Otherwise the head of a chain, computed twice and published by an earlier owner, would be evicted before its
        tail, which then could not be found any more.
        """
        holder = self.publish(block, content)
        if holder.ref_count == 0:
            self._free.remove(holder)
            self._free.append(holder)

    def reset_cache(self) -> bool:
        """Forget every published content. False, and nothing has changed, while any block is in use."""
        if self.num_in_use > 0:
            return False
        for block in self._free:
            block.content = None
        self._published.clear()
        self._num_cached = 0
        return True

    def audit(self, expected_refs: Mapping[int, int]) -> None:
        """Check every count and link against `expected_refs` (block id -> owners; absent: none).

        Raises:
            AssertionError: naming the block or the count that is off.
        """
        listed = list(self._free)
        in_list = Counter(block.block_id for block in listed)
        assert len(listed) == len(self._free), f"free list counts {len(self._free)} but links {len(listed)} blocks"
        for block in self.blocks:
            expected = expected_refs.get(block.block_id, 0)
            assert block.ref_count == expected, f"{block} should have {expected} owners"
            where = in_list[block.block_id]
            assert where == (block.ref_count == 0), f"{block} is {where} times in the free list"
            if block.content is not None:
                found = self._published.get(block.content.digest)
                assert found is block, f"{block} has a content under which {found} is found"
        published = sum(block.content is not None for block in self.blocks)
        assert published == len(self._published), f"{len(self._published)} digests but {published} published blocks"
        cached = [block.content is not None for block in listed]
        assert sum(cached) == self._num_cached, f"{self._num_cached} counted as cached, {sum(cached)} found"
        assert cached == sorted(cached), "a cached block would be evicted before a free one is taken"
        assert self.enable_caching or not published, "blocks are published although caching is off"

    def _unpublish(self, block: KVCacheBlock) -> None:
        assert block.content is not None
        del self._published[block.content.digest]
        block.content = None

    def _note_peak(self) -> None:
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)
