"""Memory on huge pages that weights share."""

import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")

from octavo.ops.cpu import memory

MIB = 2**20
SMAPS = Path("/proc/self/smaps")


def flags_of_mapping(address: int) -> list[str]:
    inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(text, 16) for text in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.fixture(autouse=True)
def regions(monkeypatch):
    """A region that begins with the test: what is allocated one after the other lies so."""
    monkeypatch.setattr(memory, "_regions", memory._Regions())


def test_parts_begin_at_cache_lines_and_share_no_byte():
    sizes = [1, 63, 64, 65, 1000, 3 * MIB, 40 * MIB, 1, 7 * MIB]
    parts = [memory.empty(size) for size in sizes]
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        assert part.shape == (size,)
        assert part.dtype is torch.uint8
        assert part.data_ptr() % 64 == 0
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(parts))


def test_small_parts_lie_in_one_huge_page():
    first, second = memory.empty(1000), memory.empty(1000)
    assert first.data_ptr() % (2 * MIB) == 0
    assert second.data_ptr() == first.data_ptr() + 1024


@pytest.mark.skipif(not SMAPS.exists(), reason="this system does not say what was advised of a mapping")
@pytest.mark.parametrize("size", [1000, 9 * MIB])
def test_the_system_is_asked_for_huge_pages(size):
    part = memory.empty(size)
    part.fill_(1)
    assert "hg" in flags_of_mapping(part.data_ptr())  # proc(5): the mapping was advised so


def test_a_large_part_lies_alone_at_the_start_of_a_huge_page():
    small, large, other = memory.empty(100), memory.empty(9 * MIB), memory.empty(100)
    assert large.data_ptr() % (2 * MIB) == 0
    assert other.data_ptr() == small.data_ptr() + 128


def test_nothing_takes_no_memory():
    assert memory.empty(0).shape == (0,)


def test_a_region_goes_with_the_last_of_its_parts():
    regions = memory._Regions()
    region, _ = regions.take(100)
    again, begin = regions.take(100)
    assert again is region
    gone = weakref.ref(region)
    part = torch.frombuffer(region, dtype=torch.uint8, count=100, offset=begin)
    del region, again
    gc.collect()
    assert gone() is not None
    del part
    gc.collect()
    assert gone() is None


def test_memory_alone_lies_beside_no_other():
    part, alone, other = memory.empty(100), memory.empty(100, alone=True), memory.empty(100)
    assert other.data_ptr() == part.data_ptr() + 128
    assert alone.data_ptr() % (2 * MIB) == 0


def test_memory_that_the_system_refuses_is_a_memory_error():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 * 2**30, hard))
    try:
        with pytest.raises(MemoryError, match=r"refuses \d+ bytes"):
            memory.empty(128 * 2**30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
