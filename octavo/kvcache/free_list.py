"""The blocks nobody holds, in the order they are taken: a doubly linked list through the blocks themselves.

Every operation is O(1). A block is in the list exactly while its links are set. Two sentinels spare the end cases.
"""

from collections.abc import Iterable, Iterator

from octavo.kvcache.block import KVCacheBlock


class FreeList:
    """Front: taken next. Back: most recently used."""

    __slots__ = ("_back", "_front", "_len")

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._front = KVCacheBlock(-1)
        self._back = KVCacheBlock(-1)
        self._front.next_free = self._back
        self._back.prev_free = self._front
        self._len = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._front.next_free
        while block is not None and block is not self._back:
            yield block
            block = block.next_free

    def append(self, block: KVCacheBlock) -> None:
        """Put at the back."""
        before = self._back.prev_free
        assert before is not None
        self._link(before, block, self._back)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put at the front."""
        after = self._front.next_free
        assert after is not None
        self._link(self._front, block, after)

    def popleft(self) -> KVCacheBlock:
        """Take the front block.

        Raises:
            IndexError: the list is empty.
        """
        block = self._front.next_free
        if block is None or block is self._back:
            raise IndexError("no block is free")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out, wherever it is. It must be in the list."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not in the free list"
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._len -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.prev_free is None and block.next_free is None, f"{block} is in the free list already"
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self._len += 1
