"""Per-request random streams: a draw is a function of (seed, sample index, position) and of nothing else.

So a request draws the same numbers whatever runs beside it, however its prompt was chunked and however often it was
preempted. The generator is counter-based Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC'11): key = seed, counter = (position, sample index).
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter: list[UInt64Array], key: list[UInt64Array]) -> list[UInt64Array]:
    """Ten rounds over counter (4 words [R]) and key (2 words [R]); every word is a uint32 held in a uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _WORD) ^ c1 ^ k0, p1 & _LOW, (p0 >> _WORD) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def uniform(seed: UInt64Array, sample_index: UInt64Array, position: UInt64Array) -> npt.NDArray[np.float64]:
    """Draws [R] in [0, 1) with 53 bits, for seeds, sample indices and token positions [R] (uint64)."""
    counter = [position & _LOW, position >> _WORD, sample_index & _LOW, sample_index >> _WORD]
    w0, w1, _, _ = philox4x32(counter, [seed & _LOW, seed >> _WORD])
    mantissa = (w0 << np.uint64(21)) | (w1 >> np.uint64(11))
    return mantissa.astype(np.float64) * 2.0**-53
