"""How much RAM reading a checkpoint takes at its peak, from the headers. Pure arithmetic."""

from collections.abc import Sequence
from typing import NamedTuple


class ReadStep(NamedTuple):
    """One tensor on its way from the file into the model."""

    elements: int
    """Kept in the model from here on."""
    in_hand: int
    """Bytes beside the file and the model while it is copied, such as the dequantised form."""
    mapped: int
    """Bytes of the file that are mapped and were read by then; none are when all steps are done."""


class LoadingPeak(NamedTuple):
    """Bytes at the worst moment of loading, the weights kept so far among them."""

    resident: int
    """What the process is seen to hold. Pages of a mapped file count, though the kernel takes them back when asked."""
    needed: int
    """Without them: what must be there."""


def loading_peak(steps: Sequence[ReadStep], kept: Sequence[int], packed: Sequence[int]) -> LoadingPeak:
    """The peak when each step's tensor is kept in so many bytes.

    Args:
        kept: of each step, in the model until all is read.
        packed: of each step, when the platform has packed it: one after the other, while the unpacked form is there.
    """
    held = resident = needed = 0
    for step, size in zip(steps, kept, strict=True):
        held += size
        needed = max(needed, held + step.in_hand)
        resident = max(resident, held + step.in_hand + step.mapped)
    packing = max(held, sum(packed)) + max(packed, default=0)
    return LoadingPeak(max(resident, packing), max(needed, packing))
