"""Floats -> groups of 32 in 8 or 4 bits. numpy on pieces that stay in the processor's cache, on several threads.

8 bits: scale = amax / 127, so a weight is off by at most 1/254 of its group's largest. 4 bits: scale and minimum,
where the least squared error of a few clips counts: cutting off a group's extremes a little makes the steps of all
others finer. Weights are rounded to the steps of the scale that is kept, a float16 number; only a matrix so small or
large that float16 has none for it keeps float32 scales.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.loader.dequantize import in_pieces
from octavo.ops.interface import QUANTIZATION_GROUP, QuantizedMatrix

CLIPS = (1.0, 0.95, 0.9)
"""Parts of a group's range that 4 bits are tried on."""
SMALLEST_NORMAL_HALF = 2.0**-14


def quantize_groups_to_8(groups: np.ndarray, values: np.ndarray, scales: np.ndarray, halves: bool) -> None:
    """groups float32 [n, 32] -> int8 [n, 32] in -127..127 and float32 [n], which are float16 numbers with `halves`."""
    np.divide(_over_groups(np.maximum, np.abs(groups)), 127, out=scales)
    if halves:
        # the small ones go up: the step grows a little, instead of the largest weight being cut off
        small = np.ceil(scales * 2.0**24) * np.float32(2.0**-24)
        scales[...] = np.where(scales < SMALLEST_NORMAL_HALF, small, _to_halves(scales))
    with np.errstate(invalid="ignore"):  # what is no number stays none: its scale is none
        scaled = groups / np.where(scales == 0, 1, scales)[:, None]
        np.rint(scaled, out=scaled)
        values[...] = np.clip(scaled, -127, 127, out=scaled)


def quantize_groups_to_4(
    groups: np.ndarray, values: np.ndarray, scales: np.ndarray, minima: np.ndarray, halves: bool
) -> None:
    """groups float32 [n, 32] -> 4 bits in uint8 [n, 16], two neighbours a byte, and float32 [n] of both."""
    low, high = _over_groups(np.minimum, groups), _over_groups(np.maximum, groups)
    best = np.full(len(groups), np.inf, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # as above
        for clip in CLIPS:
            scale = (high - low) * np.float32(clip / 15)
            steps = _steps(groups, scale, (low + high) / 2 - scale * np.float32(7.5))
            scale, minimum = _fit(groups, steps, scale)
            if halves:
                scale, minimum = _to_halves(scale), _to_halves(minimum)
            steps = _steps(groups, scale, minimum)
            error = steps * scale[:, None]
            error += minimum[:, None]
            error -= groups
            squares = np.einsum("ij,ij->i", error, error)
            better = ~(squares >= best)  # also where it is no number: the first one is taken then
            best = np.where(better, squares, best)
            scales[...], minima[...] = np.where(better, scale, scales), np.where(better, minimum, minima)
            packed = steps.astype(np.uint8)
            values[...] = np.where(better[:, None], packed[:, ::2] | packed[:, 1::2] << 4, values)


def _steps(groups: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """The nearest of 0..15, as float32."""
    steps = groups - minimum[:, None]
    steps /= np.where(scale == 0, 1, scale)[:, None]
    np.rint(steps, out=steps)
    clipped: np.ndarray = np.clip(steps, 0, 15, out=steps)
    return clipped


def _fit(groups: np.ndarray, steps: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, minimum) of the least squared error for given steps; groups of one step keep their scale."""
    mean_step, mean = steps.mean(axis=1), groups.mean(axis=1)
    spread = np.einsum("ij,ij->i", steps, steps) - 32 * mean_step**2
    together = np.einsum("ij,ij->i", steps, groups) - 32 * mean_step * mean
    fitted = np.where(spread > 0, together / np.where(spread > 0, spread, 1), scale)
    return fitted, mean - fitted * mean_step


def _over_groups(join: Callable[[np.ndarray, np.ndarray], np.ndarray], groups: np.ndarray) -> np.ndarray:
    """min or max of each row of [n, 32], by halves: several times faster than numpy's over such short rows."""
    while groups.shape[1] > 1:
        half = groups.shape[1] // 2
        groups = join(groups[:, :half], groups[:, half:])
    return groups[:, 0]


def _to_halves(numbers: np.ndarray) -> np.ndarray:
    """The nearest float16 numbers, in float32."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


class Groups:
    """Room for a matrix in few bits, group behind group, filled in pieces."""

    def __init__(self, bits: int, rows: int, columns: int) -> None:
        per_row = columns // QUANTIZATION_GROUP
        assert per_row * QUANTIZATION_GROUP == columns, f"{columns} columns are no whole groups"
        count = rows * per_row
        self.bits, self._rows = bits, rows
        self._values = np.empty((count, 32), np.int8) if bits == 8 else np.empty((count, 16), np.uint8)
        self._scales = np.empty(count, np.float32)
        self._minima = np.empty(count if bits == 4 else 0, np.float32)

    def piece(self, groups: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(values, scales, minima) of these groups, to be written: int8 [n, 32] or uint8 [n, 16], float32 [n], and
        float32 [n] or, in 8 bits, nothing."""
        return self._values[groups], self._scales[groups], self._minima[groups]

    def quantize(self, groups: np.ndarray, place: slice, halves: bool) -> None:
        """Write floats [n, 32] there."""
        values, scales, minima = self.piece(place)
        if self.bits == 8:
            quantize_groups_to_8(groups, values, scales, halves)
        else:
            quantize_groups_to_4(groups, values, scales, minima, halves)

    def suit_halves(self) -> bool:
        """Whether what was rounded to float16 is off by no more than 2**-11 of the largest scale, or minimum."""
        return bool(self._scales.any()) and _suit_halves(self._scales) and _suit_halves(self._minima)

    def matrix(self) -> QuantizedMatrix:
        """What was written."""
        return QuantizedMatrix(
            bits=self.bits,
            values=torch.from_numpy(self._values.reshape(self._rows, -1)),
            scales=self._factors(self._scales),
            minima=self._factors(self._minima) if self.bits == 4 else None,
        )

    def _factors(self, numbers: np.ndarray) -> Tensor:
        """In float16, unless that changes them by more than is harmless."""
        with np.errstate(over="ignore"):
            halves = numbers.astype(np.float16)
        keep = _suit_halves(numbers) or np.array_equal(halves.astype(np.float32), numbers)
        return torch.from_numpy((halves if keep else numbers).reshape(self._rows, -1))


def _suit_halves(numbers: np.ndarray) -> bool:
    largest = np.abs(numbers).max(initial=0)
    return bool(largest == 0 or SMALLEST_NORMAL_HALF <= largest <= np.finfo(np.float16).max)


def quantize(weight: Tensor, bits: int, pool: Executor) -> QuantizedMatrix:
    """weight [N, K] of a float dtype in 8 or 4 bits. K is a multiple of 32."""
    rows, columns = weight.shape
    made, per_row = Groups(bits, rows, columns), columns // QUANTIZATION_GROUP

    def work(piece: slice, halves: bool) -> None:
        floats = weight[piece].to(torch.float32).contiguous().numpy().reshape(-1, QUANTIZATION_GROUP)
        made.quantize(floats, slice(piece.start * per_row, piece.stop * per_row), halves)

    in_pieces(rows, columns, pool, partial(work, halves=True))
    if not made.suit_halves():
        in_pieces(rows, columns, pool, partial(work, halves=False))
    return made.matrix()
