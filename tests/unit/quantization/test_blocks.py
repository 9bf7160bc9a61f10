"""GGUF blocks kept in few bits against the gguf package's own dequantisation: bit by bit, or within what is said."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from octavo.loader.dequantize import DEQUANTIZERS, PIECE_ELEMENTS
from octavo.loader.gguf import to_half_rotation
from octavo.loader.tensor_source import BlockRows
from octavo.ops.interface import QuantizedMatrix, dequantized
from octavo.quantization.blocks import keep_blocks
from octavo.quantization.forms import BITS_OF_BLOCKS

HALF_PLACES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the float16 numbers of a block lie; every other byte may have any value."""
EXACT = (Type.Q8_0, Type.Q5_0, Type.Q4_0, Type.Q4_1)
TO_8 = (Type.Q5_1, Type.Q5_K, Type.Q6_K, Type.Q3_K)
ROWS, COLUMNS = 6, 512


def random_blocks(kind: Type, rows: int = ROWS, columns: int = COLUMNS, size: float = 0.1) -> np.ndarray:
    """uint8 [rows, bytes of a row]."""
    rng = np.random.default_rng(kind.value)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_elements, block_bytes), dtype=np.uint8)
    for place in HALF_PLACES[kind.name]:
        scales = rng.normal(0, size, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == Type.Q8_0:  # as converters write it
        blocks[:, 2:][blocks[:, 2:] == 128] = 129
    return blocks.reshape(rows, -1)


def keep(raw: np.ndarray, kind: Type, columns: int = COLUMNS, num_heads: int | None = None) -> QuantizedMatrix:
    with ThreadPoolExecutor(2) as pool:
        return keep_blocks(BlockRows(raw.reshape(-1), kind, (len(raw), columns), num_heads), pool)


def package(raw: np.ndarray, kind: Type) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(raw, kind))


def grouped(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.reshape(-1, 32)


def test_every_type_that_is_read_is_kept_in_no_fewer_bits_than_it_has():
    assert {kind.name for kind in DEQUANTIZERS} == BITS_OF_BLOCKS.keys()
    for name, bits in BITS_OF_BLOCKS.items():
        assert bits in (4, 8)
        assert bits >= int(name[1])


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_types_that_are_groups_of_32_stay_as_they_are_bit_by_bit(kind):
    raw = random_blocks(kind)
    matrix = keep(raw, kind)
    assert matrix.bits == BITS_OF_BLOCKS[kind.name]
    assert matrix.shape == (ROWS, COLUMNS)
    assert matrix.scales.dtype == torch.float16
    assert (matrix.minima is None) == (matrix.bits == 8)
    assert torch.equal(dequantized(matrix), package(raw, kind))


def test_q4_k_keeps_its_steps_and_rounds_scales_and_minima_to_float16():
    raw = random_blocks(Type.Q4_K)
    matrix, expected = keep(raw, Type.Q4_K), package(raw, Type.Q4_K)
    assert matrix.scales.dtype == matrix.minima.dtype == torch.float16
    error = grouped(dequantized(matrix) - expected).abs().amax(1)
    assert (error <= 2.0**-10 * (15 * matrix.scales.float().abs() + matrix.minima.float().abs()).reshape(-1)).all()
    assert error.max() > 0


def test_scales_too_large_for_float16_stay_in_float32_and_exact():
    raw = random_blocks(Type.Q4_K, size=3000)
    matrix = keep(raw, Type.Q4_K)
    assert matrix.scales.dtype == torch.float32
    assert torch.equal(dequantized(matrix), package(raw, Type.Q4_K))


def test_small_scales_of_q4_k_are_exact_in_float16():
    raw = random_blocks(Type.Q4_K, size=5e-7)
    matrix = keep(raw, Type.Q4_K)
    assert matrix.scales.dtype == torch.float16
    assert torch.equal(dequantized(matrix), package(raw, Type.Q4_K))


@pytest.mark.parametrize("kind", TO_8, ids=lambda kind: kind.name)
def test_other_types_are_off_by_half_a_step_of_8_bits_at_most(kind):
    raw = random_blocks(kind)
    matrix, expected = keep(raw, kind), grouped(package(raw, kind))
    assert matrix.bits == 8
    assert matrix.values.min() >= -127
    error = (grouped(dequantized(matrix)) - expected).abs().amax(1)
    assert (error <= expected.abs().amax(1) / 254 * 1.13).all()  # the scale rounds to float16


def test_q2_k_loses_no_more_in_4_bits_than_rounding_between_minimum_and_maximum_does():
    raw = random_blocks(Type.Q2_K)
    matrix, expected = keep(raw, Type.Q2_K), grouped(package(raw, Type.Q2_K))
    low, high = expected.amin(1, keepdim=True), expected.amax(1, keepdim=True)
    scale = (high - low) / 15
    rounded = ((expected - low) / scale).round() * scale + low
    lost = (grouped(dequantized(matrix)) - expected).square().sum(1)
    assert matrix.bits == 4
    assert lost.sum() < 0.9 * (rounded - expected).square().sum()
    assert lost.sum() < 0.005 * (expected - expected.mean(1, keepdim=True)).square().sum()


def test_a_group_with_minus_128_is_quantised_again_and_its_neighbours_are_not():
    raw = random_blocks(Type.Q8_0)
    raw[1, 34 + 2 + 7] = 128  # element 7 of row 1's second block
    matrix, expected = keep(raw, Type.Q8_0), package(raw, Type.Q8_0)
    assert matrix.values.min() == -127
    error = grouped(dequantized(matrix) - expected).abs().amax(1)
    group = COLUMNS // 32 + 1
    assert 0 < error[group] <= grouped(expected)[group].abs().max() / 254 * 1.13
    assert error.count_nonzero() == 1


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.Q6_K], ids=lambda kind: kind.name)
def test_rows_of_heads_are_brought_into_the_order_of_the_dequantised_ones(kind):
    raw = random_blocks(kind, rows=24)
    plain, ordered = keep(raw, kind), keep(raw, kind, num_heads=3)
    assert torch.equal(dequantized(ordered), to_half_rotation(dequantized(plain), 3))
    assert not torch.equal(dequantized(ordered), dequantized(plain))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0, Type.Q4_K, Type.Q2_K], ids=lambda kind: kind.name)
def test_pieces_join_without_a_seam(kind):
    rows = PIECE_ELEMENTS // COLUMNS + 3
    raw = random_blocks(kind, rows)
    first, last = keep(raw[:1], kind), keep(raw[-1:], kind)
    whole = dequantized(keep(raw, kind))
    assert torch.equal(whole[:1], dequantized(first))
    assert torch.equal(whole[-1:], dequantized(last))
