"""Floats in groups of 32: how far a weight may move, and what no numbers and odd numbers do."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.loader.dequantize import PIECE_ELEMENTS
from octavo.ops.interface import QuantizedMatrix, dequantized
from octavo.quantization.groups import quantize

BITS = pytest.mark.parametrize("bits", [8, 4])


def draw(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def made(weight: torch.Tensor, bits: int, threads: int = 1) -> QuantizedMatrix:
    with ThreadPoolExecutor(threads) as pool:
        return quantize(weight, bits, pool)


def squares(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1, 32).square().sum(1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-60, 15), spread=st.floats(0, 12))
def test_8_bits_move_a_weight_by_half_a_step_of_its_group_at_most(seed, exponent, spread):
    weight = draw(4, 96, seed) * 2.0**exponent
    weight *= 2 ** (spread * torch.rand(4, 1, generator=torch.Generator().manual_seed(seed)))
    matrix = made(weight, 8)
    largest = weight.reshape(-1, 32).abs().amax(1)
    # the scale rounds to float16: by 2**-11 of itself, which 127 times is 1/16, or up to a multiple of 2**-24
    bound = largest / 254 * 1.13 + 2.0**-25 * (matrix.scales.dtype == torch.float16)
    assert ((dequantized(matrix) - weight).reshape(-1, 32).abs().amax(1) <= bound).all()
    assert matrix.values.dtype == torch.int8
    assert matrix.values.min() >= -127
    assert matrix.minima is None


def test_4_bits_lose_a_tenth_less_than_rounding_between_minimum_and_maximum():
    weight = draw(64, 256)
    groups = weight.reshape(-1, 32)
    low = groups.amin(1, keepdim=True)
    scale = (groups.amax(1, keepdim=True) - low) / 15
    plain = ((groups - low) / scale).round() * scale + low
    lost, lost_plainly = squares(dequantized(made(weight, 4)) - weight), squares(plain - groups)
    assert lost.sum() < 0.9 * lost_plainly.sum()
    assert (lost <= 1.02 * lost_plainly).all()  # rounding to float16 aside


def test_4_bits_hold_16_equally_spaced_numbers_of_any_sign_exactly():
    steps = torch.arange(32).remainder(16).float()
    for low, scale in ((-2.0, 0.25), (3.0, 0.5), (-40.0, 1.0)):
        weight = (low + scale * steps).repeat(2, 2)
        assert torch.equal(dequantized(made(weight, 4)), weight)


@BITS
def test_zeros_and_equal_numbers_stay_what_they_are(bits):
    weight = torch.zeros(2, 64)
    weight[1] = 0.25
    back = dequantized(made(weight, bits))
    assert torch.equal(back[0], weight[0])
    torch.testing.assert_close(back[1], weight[1], rtol=1e-3, atol=0)


@BITS
def test_a_matrix_too_small_or_too_large_for_float16_keeps_float32_scales(bits):
    for size in (1e-9, 1e9):
        weight = draw(3, 64) * size
        matrix = made(weight, bits)
        assert matrix.scales.dtype == torch.float32
        relative = (dequantized(matrix) - weight).square().sum() / weight.square().sum()
        assert relative < {8: 1e-4, 4: 1e-2}[bits]
    assert made(draw(3, 64), bits).scales.dtype == torch.float16


@BITS
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_become_one_and_leaves_other_groups_alone(bits, odd):
    weight = draw(2, 64)
    whole = dequantized(made(weight, bits))
    weight[0, 5] = odd
    back = dequantized(made(weight, bits))
    assert not back[0, :32].isfinite().any()
    torch.testing.assert_close(back[1], whole[1], rtol=0, atol=0.02)


@BITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_quantised_as_its_float32(bits, dtype):
    weight = draw(5, 64).to(dtype)
    assert torch.equal(dequantized(made(weight, bits)), dequantized(made(weight.float(), bits)))


@BITS
def test_neither_pieces_nor_threads_change_anything(bits):
    rows = 2 * PIECE_ELEMENTS // 64 + 1
    weight = draw(rows, 64)
    whole = dequantized(made(weight, bits, threads=3))
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(whole[row], dequantized(made(weight[row : row + 1], bits))[0])
    columns = weight.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(dequantized(made(columns, bits)), whole)
