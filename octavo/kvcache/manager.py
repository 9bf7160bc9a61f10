"""KVCacheManager: the block table of every request that has one, and prefix reuse between them.

Who owns a block when: `allocate` makes the request an owner of each block of its table; `free` ends that. A block is
published only by `publish`, after its KV has been written, and never changes while it is published.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.config.engine_config import CacheConfig
from octavo.kvcache.block import KVCacheBlock
from octavo.kvcache.block_hash import BlockContent, make_content, same_content
from octavo.kvcache.block_pool import BlockPool


class CachedRequest(Protocol):
    """What the manager sees of a request."""

    request_id: str
    token_ids: list[int]
    """Prompt and output; only ever appended to."""
    num_computed_tokens: int
    """Tokens whose KV has been written."""
    cache_salt: str | None
    block_contents: list[BlockContent]
    """Of its full blocks, as far as they were needed; kept by the manager."""


class _BlockTable:
    __slots__ = ("blocks", "num_published")

    def __init__(self, prefix: Sequence[KVCacheBlock]) -> None:
        self.blocks = list(prefix)
        self.num_published = len(prefix)
        """Leading blocks that have been offered to the cache."""


class KVCacheManager:
    """Block tables over one `BlockPool`. Lengths are in tokens unless the name says blocks.

    Args:
        config: size of the pool, block size, prefix caching.
        free_order: see `BlockPool`.
    """

    def __init__(self, config: CacheConfig, free_order: Sequence[int] | None = None) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks, config.enable_prefix_caching, free_order)
        self._tables: dict[str, _BlockTable] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and cached."""
        return self.pool.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def num_blocks_held(self, request_id: str) -> int:
        """Length of the request's block table; 0 without one."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table.blocks)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table; empty without one."""
        table = self._tables.get(request_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    def find_cached_prefix(self, request: CachedRequest) -> list[KVCacheBlock]:
        """The longest run of published blocks that begins the request, leaving it at least one token to compute.

        Takes no block and counts nothing. Valid until the next allocation.
        """
        if not self.enable_prefix_caching:
            return []
        limit = (len(request.token_ids) - 1) // self.block_size
        contents = self._contents(request, limit)
        found: list[KVCacheBlock] = []
        for index in range(limit):
            block = self.pool.lookup(contents[index])
            if block is None:
                break
            assert block.content is not None
            _share(contents, index, block.content)
            found.append(block)
        return found

    def allocate(
        self, request: CachedRequest, num_tokens_total: int, cached_prefix: Sequence[KVCacheBlock] = ()
    ) -> list[int] | None:
        """Grow the request's block table to hold positions below `num_tokens_total`.

        Args:
            cached_prefix: what `find_cached_prefix` found; only for a request that has no table yet.

        Returns:
            The ids of the newly allocated blocks (without the prefix), or None, and nothing has changed, if the pool
            has too few.
        """
        table = self._tables.get(request.request_id)
        assert table is None or not cached_prefix, "a cached prefix can only begin a block table"
        held = len(cached_prefix) if table is None else len(table.blocks)
        missing = self.num_blocks_for(num_tokens_total) - held
        if missing > self.pool.num_available - num_unheld(cached_prefix):
            return None
        if table is None:
            self.pool.touch(cached_prefix)
            table = self._tables[request.request_id] = _BlockTable(cached_prefix)
        if missing <= 0:
            return []
        new_blocks = self.pool.allocate(missing)
        table.blocks += new_blocks
        return [block.block_id for block in new_blocks]

    def publish(self, request: CachedRequest) -> None:
        """Make every full block below `num_computed_tokens` findable. Call only when their KV has been written."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        table = self._tables[request.request_id]
        if num_full <= table.num_published:
            return
        contents = self._contents(request, num_full)
        for index in range(table.num_published, num_full):
            holder = self.pool.publish(table.blocks[index], contents[index])
            if holder.content is not contents[index] and same_content(holder.content, contents[index]):
                assert holder.content is not None
                _share(contents, index, holder.content)
        table.num_published = num_full

    def free(self, request: CachedRequest) -> None:
        """Give up the request's block table, tail first. Without a table nothing happens."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        for index in reversed(range(len(table.blocks))):
            block = table.blocks[index]
            if block.content is None and index < table.num_published:
                self.pool.refresh(block, request.block_contents[index])
            self.pool.free((block,))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing has changed, while any block is in use."""
        return self.pool.reset_cache()

    def utilization(self, live_requests: Iterable[CachedRequest]) -> float:
        """Tokens written over slots of the blocks in use, 0..1; a shared block counts once. 0 when none is in use."""
        in_use = self.pool.num_in_use
        if in_use == 0:
            return 0.0
        table_entries = sum(len(table.blocks) for table in self._tables.values())
        # Only full blocks are shared, so every table entry beyond the blocks in use counts a full block once more.
        written = sum(request.num_computed_tokens for request in live_requests)
        return (written - (table_entries - in_use) * self.block_size) / (in_use * self.block_size)

    def audit(self, live_requests: Iterable[CachedRequest]) -> None:
        """Check that every reference count is explained by the block table of a live request.

        Args:
            live_requests: those that should have a block table, and no others.

        Raises:
            AssertionError: naming the block, request or count that is off.
        """
        live = {request.request_id: request for request in live_requests}
        assert live.keys() == self._tables.keys(), f"block tables of {set(self._tables)}, but {set(live)} are live"
        for request_id, table in self._tables.items():
            slots = len(table.blocks) * self.block_size
            computed = live[request_id].num_computed_tokens
            assert computed <= slots, f"{request_id} has {computed} computed tokens in {slots} slots"
            ids = [block.block_id for block in table.blocks]
            assert len(ids) == len(set(ids)), f"{request_id} holds a block twice: {ids}"
        refs = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        self.pool.audit(refs)

    def _contents(self, request: CachedRequest, num_blocks: int) -> list[BlockContent]:
        """The request's contents, extended to at least `num_blocks`."""
        contents = request.block_contents
        extra_keys = () if request.cache_salt is None else ("cache_salt", request.cache_salt)
        for index in range(len(contents), num_blocks):
            start = index * self.block_size
            parent = contents[-1] if contents else None
            contents.append(make_content(parent, request.token_ids[start : start + self.block_size], extra_keys))
        return contents


def num_unheld(blocks: Iterable[KVCacheBlock]) -> int:
    """How many of these blocks nobody holds: so many leave the available ones when they are taken as a prefix."""
    return sum(block.ref_count == 0 for block in blocks)


def _share(contents: list[BlockContent], index: int, shared: BlockContent) -> None:
    """Put an equal content in the place of `contents[index]`: chains that meet early are quick to compare."""
    contents[index] = shared
    if index + 1 < len(contents):
        contents[index + 1].parent = shared
