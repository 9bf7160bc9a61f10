"""How much RAM reading a checkpoint takes at its peak, from the headers. Pure arithmetic."""

from collections.abc import Iterable
from typing import NamedTuple


class ReadStep(NamedTuple):
    """One tensor on its way from the file into the model."""

    elements: int
    """Kept in the model from here on."""
    in_hand: int
    """Bytes beside the file and the model while it is copied, such as the dequantised form."""
    mapped: int
    """Bytes of the file that are mapped and were read by then."""


class LoadingPeak(NamedTuple):
    """Bytes at the worst moment of loading, the weights kept so far among them."""

    resident: int
    """What the process is seen to hold. Pages of a mapped file count, though the kernel takes them back when asked."""
    needed: int
    """Without them: what must be there."""


def loading_peak(steps: Iterable[ReadStep], item_size: int, packed_elements: int) -> LoadingPeak:
    """The peak when each step's elements are kept with `item_size` bytes.

    Args:
        packed_elements: of the largest matrix: when all is read, the platform packs one after the other.
    """
    kept = resident = needed = mapped = 0
    for step in steps:
        kept += step.elements * item_size
        mapped = step.mapped
        needed = max(needed, kept + step.in_hand)
        resident = max(resident, kept + step.in_hand + mapped)
    packing = packed_elements * item_size
    return LoadingPeak(max(resident, kept + packing + mapped), max(needed, kept + packing))
