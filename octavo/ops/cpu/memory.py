"""Memory on huge pages, where the system has them: what lies in pages of 4 KiB is read from memory at two thirds of the
speed, since every page has to be looked up. A single weight is often smaller than a huge page, so they lie one after
the other in regions of many. Pages that nobody writes take no memory.
"""

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_REGION = 32 << 20
_LARGE = _REGION // 4
"""What is larger lies alone: it would leave much of a region empty, or keep alive for small ones what it leaves."""
_LINE = 64


class _Regions:
    """The region that is being filled, with what is not large. The tensors in it keep it alive, and only they."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._find: weakref.ref[mmap.mmap] | None = None
        self._begin = self._end = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """A region and where in it so many bytes are free from now on."""
        with self._lock:
            region = self._find() if self._find is not None else None
            if region is None or self._end - self._begin < num_bytes:
                region, self._begin = _new_region(_REGION)
                self._find, self._end = weakref.ref(region), len(region)
            begin = self._begin
            self._begin += -(-num_bytes // _LINE) * _LINE
            return region, begin


def _new_region(num_bytes: int) -> tuple[mmap.mmap, int]:
    """A region and its first byte that begins a huge page."""
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    try:
        region = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system built without them
            region.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    return region, -address % _HUGE_PAGE


_regions = _Regions()


def empty(num_bytes: int, alone: bool = False) -> Tensor:
    """uint8 [num_bytes], at the start of a cache line, with whatever is there.

    alone: in a region that goes with it. Other memory comes back only when all of its region is let go.

    Raises:
        MemoryError: the system has no more.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    alone = alone or num_bytes > _LARGE
    region, begin = _new_region(num_bytes) if alone else _regions.take(num_bytes)
    return torch.frombuffer(region, dtype=torch.uint8, count=num_bytes, offset=begin)
