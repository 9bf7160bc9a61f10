"""Shards of matrices in few bits are the shards of what they stand for."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from octavo.errors import InvalidInput
from octavo.ops.interface import QuantizedMatrix, dequantized
from octavo.quantization.groups import quantize
from octavo.quantization.parts import equal, pad_rows, take_columns, take_rows

BITS = pytest.mark.parametrize("bits", [8, 4])


def made(bits: int, rows: int = 6, columns: int = 128, seed: int = 0) -> QuantizedMatrix:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    with ThreadPoolExecutor(1) as pool:
        return quantize(weight, bits, pool)


@BITS
def test_rows_and_columns_are_those_of_the_matrix_in_memory_of_their_own(bits):
    matrix = made(bits)
    whole = dequantized(matrix)
    rows, columns = take_rows(matrix, 2, 3), take_columns(matrix, 32, 64)
    assert torch.equal(dequantized(rows), whole[2:5])
    assert torch.equal(dequantized(columns), whole[:, 32:96])
    for part in (rows, columns):
        assert part.values.is_contiguous()
        assert part.values.untyped_storage().nbytes() == part.values.nbytes
    assert take_rows(matrix, 0, 6) is take_columns(matrix, 0, 128) is matrix


@BITS
@pytest.mark.parametrize(("first", "count"), [(16, 32), (0, 48), (32, 31)])
def test_columns_inside_a_group_are_refused_with_the_numbers(bits, first, count):
    with pytest.raises(InvalidInput, match=f"128 cannot be split into parts of {count}; use a tensor_parallel_size"):
        take_columns(made(bits), first, count)


@BITS
def test_padding_rows_are_zeros(bits):
    padded = dequantized(pad_rows(made(bits), 9))
    assert torch.equal(padded[:6], dequantized(made(bits)))
    assert padded.shape == (9, 128)
    assert not padded[6:].any()


@BITS
def test_matrices_are_equal_where_every_bit_is(bits):
    one = made(bits)
    assert equal(one, made(bits))
    assert not equal(one, made(bits, seed=1))
    assert not equal(one, made(12 - bits))
    assert not equal(one, replace(one, scales=one.scales.float()))
    assert not equal(one, made(bits, rows=5))
