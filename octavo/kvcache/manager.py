"""KVCacheManager: the block table of every request that has one, and prefix reuse between them.

Who owns a block when: `allocate` or `fork` makes the request an owner of each block of its table; `free` ends that.
`hold_prompt` makes the samples of one prompt an owner together; `fork` by the last of them, or `release`, ends that.
A block is published only by `publish`, after its KV has been written, and never changes while it is published. Neither
does a block with more than one owner: who would write to it is given a copy (copy-on-write), see `take_block_copies`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.config.engine_config import CacheConfig
from octavo.kvcache.block import KVCacheBlock
from octavo.kvcache.block_hash import BlockContent, make_content, same_content
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.extra_keys import extra_keys_of
from octavo.kvcache.prompt_hold import PromptHold
from octavo.protocol.messages import PromptEmbeds


class CachedRequest(Protocol):
    """What the manager sees of a request."""

    request_id: str
    token_ids: list[int]
    """Prompt and output; only ever appended to."""
    num_computed_tokens: int
    """Tokens whose KV has been written."""
    cache_salt: str | None
    prompt_embeds: PromptEmbeds | None
    """The prompt, if it was given so; `token_ids` begins with as many placeholders."""
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
        self._holds: list[PromptHold] = []
        self._copies: list[tuple[int, int]] = []

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
        if table is not None:
            self._free_blocks(table.blocks, request.block_contents[: table.num_published])

    def hold_prompt(self, request: CachedRequest, num_tokens: int) -> PromptHold:
        """Keep the blocks of the request's first `num_tokens` tokens, whose KV has been written, for `fork`.

        The request may write on in the last of them only after `detach`.
        """
        blocks = self._tables[request.request_id].blocks[: self.num_blocks_for(num_tokens)]
        self.pool.touch(blocks)
        hold = PromptHold(blocks, request.block_contents[: num_tokens // self.block_size], num_tokens)
        self._holds.append(hold)
        return hold

    def must_detach(self, hold: PromptHold) -> bool:
        """Whether the hold shares a partly filled block with the request it was taken from, which would write to it."""
        return hold.num_tokens % self.block_size > 0 and hold.blocks[-1].ref_count > 1

    def detach(self, hold: PromptHold) -> None:
        """Let the hold have a copy of its last block. Takes one block, which must be available."""
        hold.blocks[-1] = self._copy(hold.blocks[-1])

    def needs_copy(self, hold: PromptHold, last: bool) -> bool:
        """Whether `fork` takes a block."""
        tail = hold.blocks[-1]
        return not last or tail.ref_count > 1 or tail.content is not None

    def fork(self, hold: PromptHold, request: CachedRequest, last: bool) -> None:
        """Begin the request's block table with the blocks of `hold`; only their last token is left to compute.

        The block that token is in is copied, unless the hold is its only owner and ends.

        Args:
            last: the hold ends, and the request takes its place.
        """
        assert request.request_id not in self._tables, f"{request.request_id} has a block table already"
        table = self._tables[request.request_id] = _BlockTable(hold.blocks)
        if self.needs_copy(hold, last):
            self.pool.touch(hold.blocks)
            table.blocks[-1] = self._copy(table.blocks[-1])
            if last:
                self.release(hold)
        else:
            self._holds.remove(hold)
        request.block_contents = list(hold.contents)
        table.num_published = min(len(hold.contents), (hold.num_tokens - 1) // self.block_size)

    def release(self, hold: PromptHold) -> None:
        """End a hold, tail first."""
        self._holds.remove(hold)
        self._free_blocks(hold.blocks, hold.contents)

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(source, target) block ids to copy before the next step computes, since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing has changed, while any block is in use."""
        return self.pool.reset_cache()

    def reset(self) -> None:
        """Forget every block table, hold, pending copy and cached block, whatever state they are in.

        Only for a caller that computes all its requests anew. What `CachedRequest.block_contents` say stays true.
        """
        pool = BlockPool(self.pool.num_blocks, self.enable_prefix_caching)
        pool.peak_in_use = self.pool.peak_in_use
        self.pool, self._tables, self._holds, self._copies = pool, {}, [], []

    def utilization(self, live_requests: Iterable[CachedRequest]) -> float:
        """Tokens written over slots of the blocks in use, 0..1; a shared block counts once. 0 when none is in use."""
        in_use = self.pool.num_in_use
        if in_use == 0:
            return 0.0
        # Only full blocks are shared, so every entry beyond the blocks in use counts a full block once more.
        entries = sum(len(table.blocks) for table in self._tables.values())
        written = sum(request.num_computed_tokens for request in live_requests)
        for hold in self._holds:
            entries += len(hold.blocks)
            written += hold.num_tokens
            if self.must_detach(hold):
                entries -= 1
                written -= hold.num_tokens % self.block_size
        return (written - (entries - in_use) * self.block_size) / (in_use * self.block_size)

    def audit(self, live_requests: Iterable[CachedRequest], holds: Sequence[PromptHold] = ()) -> None:
        """Check that every reference count is explained by the block table of a live request or by a hold.

        Args:
            live_requests: those that should have a block table, and no others.
            holds: those that should exist, and no others.

        Raises:
            AssertionError: naming the block, request or count that is off.
        """
        live = {request.request_id: request for request in live_requests}
        assert live.keys() == self._tables.keys(), f"block tables of {set(self._tables)}, but {set(live)} are live"
        assert set(map(id, holds)) == set(map(id, self._holds)), f"{len(self._holds)} holds, {len(holds)} are known"
        refs = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        refs.update(block.block_id for hold in self._holds for block in hold.blocks)
        for request_id, table in self._tables.items():
            self._audit_table(table, live[request_id])
        self.pool.audit(refs)

    def _audit_table(self, table: _BlockTable, request: CachedRequest) -> None:
        name, computed = request.request_id, request.num_computed_tokens
        slots = len(table.blocks) * self.block_size
        assert computed <= slots, f"{name} has {computed} computed tokens in {slots} slots"
        ids = [block.block_id for block in table.blocks]
        assert len(ids) == len(set(ids)), f"{name} holds a block twice: {ids}"
        tails = {hold.blocks[-1].block_id for hold in self._holds if self.must_detach(hold)}
        for block in table.blocks[computed // self.block_size :]:
            own = block.ref_count - (block.block_id in tails)
            assert own == 1 and block.content is None, f"{name} will write to {block}"

    def _copy(self, block: KVCacheBlock) -> KVCacheBlock:
        """A block of one owner's own, in the place of `block`, of which it ceases to be an owner."""
        (copy,) = self.pool.allocate(1)
        self._copies.append((block.block_id, copy.block_id))
        self.pool.free((block,))
        return copy

    def _free_blocks(self, blocks: list[KVCacheBlock], contents: Sequence[BlockContent]) -> None:
        """Cease to be an owner of `blocks`, tail first. `contents`: of those that have been offered to the cache."""
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            if block.content is None and index < len(contents):
                self.pool.refresh(block, contents[index])
            self.pool.free((block,))

    def _contents(self, request: CachedRequest, num_blocks: int) -> list[BlockContent]:
        """The request's contents, extended to at least `num_blocks`."""
        contents = request.block_contents
        for index in range(len(contents), num_blocks):
            start, end = index * self.block_size, (index + 1) * self.block_size
            parent = contents[-1] if contents else None
            keys = extra_keys_of(request.cache_salt, request.prompt_embeds, start, end)
            contents.append(make_content(parent, request.token_ids[start:end], keys))
        return contents


def num_unheld(blocks: Iterable[KVCacheBlock]) -> int:
    """How many of these blocks nobody holds: so many leave the available ones when they are taken as a prefix."""
    return sum(block.ref_count == 0 for block in blocks)


def _share(contents: list[BlockContent], index: int, shared: BlockContent) -> None:
    """Put an equal content in the place of `contents[index]`: chains that meet early are quick to compare."""
    contents[index] = shared
    if index + 1 < len(contents):
        contents[index + 1].parent = shared
