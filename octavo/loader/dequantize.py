"""Block-quantised GGUF bytes -> float32.

The types that most files are made of have a dequantiser here, several times faster than the gguf package's, which
makes many temporaries; Q2_K and Q3_K go through the package. All give the package's values bit by bit.
Work is done in pieces that stay in the processor's cache, on several threads (numpy lets go of the interpreter).
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize as gguf_dequantize

PIECE_ELEMENTS = 131072


def dequantize(raw: np.ndarray, kind: Type, pool: Executor) -> np.ndarray:
    """raw: uint8 [num_bytes], whole blocks of a type in DEQUANTIZERS -> float32 [num_elements]."""
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block_elements), np.float32)
    in_pieces(len(blocks), block_elements, pool, lambda piece: DEQUANTIZERS[kind](blocks[piece], out[piece]))
    return out.reshape(-1)


def in_pieces(count: int, elements: int, pool: Executor, work: Callable[[slice], None]) -> None:
    """Call `work` for pieces of `count` items of `elements` numbers each, on the pool's threads."""
    step = max(1, PIECE_ELEMENTS // elements)
    pieces = [slice(start, min(start + step, count)) for start in range(0, count, step)]
    # a damaged file may hold any numbers: what they lead to is looked at when the tensor is whole, not warned of here
    quiet = np.errstate(over="ignore", invalid="ignore")
    for _ in pool.map(quiet(work), pieces):
        pass  # a failed piece raises here


def halves(part: np.ndarray) -> np.ndarray:
    """uint8 [n, 2 k] holding float16 -> float32 [n, k]."""
    return np.ascontiguousarray(part).view(np.float16).astype(np.float32)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """scale, 32 x int8."""
    out[...] = blocks[:, 2:].view(np.int8)
    out *= halves(blocks[:, :2])


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """scale, 32 x 4 bits around 8; element i and i + 16 share a byte."""
    out[:, :16], out[:, 16:] = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
    out -= 8
    out *= halves(blocks[:, :2])


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """scale, minimum, 32 x 4 bits."""
    scales = halves(blocks[:, :4])
    out[:, :16], out[:, 16:] = blocks[:, 4:] & 15, blocks[:, 4:] >> 4
    out *= scales[:, :1]
    out += scales[:, 1:]


def five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """high: [n, 4] one bit an element; low: [n, 16] as in Q4_0 -> uint8 [n, 32] in 0..31."""
    values = np.unpackbits(np.ascontiguousarray(high), bitorder="little").reshape(-1, 32)
    values <<= 4
    values[:, :16] |= low & 15
    values[:, 16:] |= low >> 4
    return values


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """scale, 32 high bits, 32 x 4 bits; around 16."""
    out[...] = five_bits(blocks[:, 2:6], blocks[:, 6:])
    out -= 16
    out *= halves(blocks[:, :2])


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """scale, minimum, 32 high bits, 32 x 4 bits."""
    scales = halves(blocks[:, :4])
    out[...] = five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= scales[:, :1]
    out += scales[:, 1:]


def group_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K blocks: float32 [n, 8] of scales and of what is taken off. Eight 6-bit scales and minima lie in
    12 bytes: 4 x the low six bits of scales 0-3 (and two bits of scale 4-7), the same of minima, then the low four bits
    of both for 4-7."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1).astype(np.float32)
    factors = halves(blocks[:, :4])
    return scales * factors[:, :1], minima * factors[:, 1:]


def _scale_groups(blocks: np.ndarray, groups: np.ndarray) -> None:
    """groups: [n, 8, 32] quants, in place -> values."""
    scales, minima = group_scales(blocks)
    groups *= scales[:, :, None]
    groups -= minima[:, :, None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """scale of scales, of minima, 12 bytes of both, 256 x 4 bits: 32 bytes hold two groups of 32."""
    low = blocks[:, 16:].reshape(-1, 4, 32)
    pairs = out.reshape(-1, 4, 2, 32)
    pairs[:, :, 0], pairs[:, :, 1] = low & 15, low >> 4
    _scale_groups(blocks, out.reshape(-1, 8, 32))


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K with 32 bytes of high bits before the low ones: bit g of byte i belongs to group g, element i."""
    high, low = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 8, 32)
    for group in range(8):
        nibbles = low[:, group // 2] >> 4 if group % 2 else low[:, group // 2] & 15
        groups[:, group] = nibbles | ((high >> group & 1) << 4)
    _scale_groups(blocks, groups)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Two halves of 128 elements: 64 bytes of low 4 bits, 32 bytes of high 2 bits each; 16 int8 scales; their scale."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    values = np.empty((len(blocks), 2, 128), np.uint8)
    values[:, :, :64], values[:, :, 64:] = low & 15, low >> 4
    for group in range(4):
        values[:, :, 32 * group : 32 * group + 32] |= (high >> (2 * group) & 3) << 4
    out[...] = values.reshape(-1, 256)
    out -= 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * halves(blocks[:, 208:])
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


def _through_package(kind: Type, blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = gguf_dequantize(blocks.reshape(1, -1), kind).reshape(out.shape)


DEQUANTIZERS: dict[Type, Callable[[np.ndarray, np.ndarray], None]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q2_K: partial(_through_package, Type.Q2_K),
    Type.Q3_K: partial(_through_package, Type.Q3_K),
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}
"""Type -> (uint8 blocks [n, block_bytes], float32 out [n, block_elements], written)."""
