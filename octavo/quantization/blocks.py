"""GGUF blocks -> `QuantizedMatrix`, without a detour over floats where the blocks are groups of 32 themselves.

Exact, bit by bit, when computed in float32: Q8_0 and Q5_0 (8 bits), Q4_0 and Q4_1 (4 bits). One exception: -128 in a
Q8_0 block, which no converter writes, makes that group be quantised again, as the kernels take -127 to 127.
Q4_K keeps its 4 bits exactly; its scales and minima, 6-bit numbers times a float16, are rounded to float16, by at most
2**-11 of themselves: little beside the rounding that 4 bits are. Where one is too large for float16, all of the matrix
stay in float32.
Quantised again: Q5_1, Q5_K, Q6_K and Q3_K to 8 bits, which moves a weight by at most 1/254 of its group's largest.
Q2_K, two groups of 16 with 4 values each, to 4 bits with scale and minimum, which adds some 3% to the squared error it
has; with Q3_K the same would add 19%, so that one gets 8 bits.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from octavo.loader.dequantize import DEQUANTIZERS, five_bits, group_scales, halves, in_pieces
from octavo.loader.gguf import to_half_rotation
from octavo.loader.tensor_source import BlockRows
from octavo.ops.interface import QUANTIZATION_GROUP, QuantizedMatrix
from octavo.quantization.forms import BITS_OF_BLOCKS
from octavo.quantization.groups import Groups, quantize_groups_to_8


def keep_blocks(blocks: BlockRows, pool: Executor) -> QuantizedMatrix:
    """The matrix in the bits that `BITS_OF_BLOCKS` gives its type."""
    kind, (rows, columns) = blocks.kind, blocks.shape
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    raw = blocks.raw.reshape(-1, block_bytes)
    per_block = block_elements // QUANTIZATION_GROUP
    made = Groups(BITS_OF_BLOCKS[kind.name], rows, columns)

    def work(piece: slice, halves: bool) -> None:
        place = slice(piece.start * per_block, piece.stop * per_block)
        if kind in _KEPT:
            _KEPT[kind](raw[piece], *made.piece(place))
        else:
            floats = np.empty((piece.stop - piece.start, block_elements), np.float32)
            DEQUANTIZERS[kind](raw[piece], floats)
            made.quantize(floats.reshape(-1, QUANTIZATION_GROUP), place, halves)

    in_pieces(len(raw), block_elements, pool, partial(work, halves=True))
    if kind not in _KEPT and not made.suit_halves():
        in_pieces(len(raw), block_elements, pool, partial(work, halves=False))
    matrix = made.matrix()
    return matrix if blocks.num_heads is None else _in_order(matrix, blocks.num_heads)


def _in_order(matrix: QuantizedMatrix, num_heads: int) -> QuantizedMatrix:
    return QuantizedMatrix(
        bits=matrix.bits,
        values=to_half_rotation(matrix.values, num_heads),
        scales=to_half_rotation(matrix.scales, num_heads),
        minima=None if matrix.minima is None else to_half_rotation(matrix.minima, num_heads),
    )


def _q8_0(blocks: np.ndarray, values: np.ndarray, scales: np.ndarray, _: np.ndarray) -> None:
    values[...] = blocks[:, 2:].view(np.int8)
    scales[...] = halves(blocks[:, :2])[:, 0]
    if values.min() == -128:
        outside = np.flatnonzero((values == -128).any(axis=1))
        floats = values[outside].astype(np.float32) * scales[outside, None]
        again, new_scales = np.empty_like(values[outside]), np.empty(len(outside), np.float32)
        quantize_groups_to_8(floats, again, new_scales, halves=True)
        values[outside], scales[outside] = again, new_scales


def _q5_0(blocks: np.ndarray, values: np.ndarray, scales: np.ndarray, _: np.ndarray) -> None:
    values[...] = five_bits(blocks[:, 2:6], blocks[:, 6:])
    values -= 16
    scales[...] = halves(blocks[:, :2])[:, 0]


def _neighbours(packed: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """packed [..., 2 k] with one run of elements in its low halves and one in its high ones -> each run by itself,
    [..., k], its neighbours together in a byte."""
    even, odd = packed[..., ::2], packed[..., 1::2]
    low[...] = (even & 15) | (odd << 4)
    high[...] = (even >> 4) | (odd & 0xF0)


def _q4_0(blocks: np.ndarray, values: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> None:
    _neighbours(blocks[:, 2:], values[:, :8], values[:, 8:])
    scales[...] = halves(blocks[:, :2])[:, 0]
    np.multiply(scales, -8, out=minima)


def _q4_1(blocks: np.ndarray, values: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> None:
    _neighbours(blocks[:, 4:], values[:, :8], values[:, 8:])
    scales[...], minima[...] = halves(blocks[:, :4]).T


def _q4_k(blocks: np.ndarray, values: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> None:
    pairs = values.reshape(-1, 4, 2, 16)
    _neighbours(blocks[:, 16:].reshape(-1, 4, 32), pairs[:, :, 0], pairs[:, :, 1])
    new_scales, taken_off = group_scales(blocks)
    scales[...] = new_scales.reshape(-1)
    np.negative(taken_off.reshape(-1), out=minima)


_KEPT: dict[Type, Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]] = {
    Type.Q8_0: _q8_0,
    Type.Q5_0: _q5_0,
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q4_K: _q4_k,
}
"""Types whose blocks are groups of 32: blocks -> values, scales, minima, written."""
