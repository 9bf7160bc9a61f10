"""Layers over weights of 8 and 4 bits: their exact sums, and a row has the same bits whatever is computed beside it."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")

from kernels.quantized_cases import (
    KERNELS,
    assert_same_bits,
    is_fused,
    matrix,
    quantized_rows,
    random,
    slow_linear,
    strided,
)

from octavo.ops.cpu import _native as native
from octavo.ops.cpu import quantized as ops
from octavo.ops.interface import QuantizedMatrix, dequantized

sizes = st.integers(1, 70) | st.sampled_from([96, 127, 128, 129, 200])
depths = st.integers(1, 8).map(lambda groups: 32 * groups) | st.sampled_from([576, 1536])
row_counts = st.integers(0, 30) | st.sampled_from([48, 70, 96, 97, 145])
parts_of = st.lists(st.tuples(sizes, st.sampled_from([4, 8])), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def kernels_as_before():
    isa, threads = native.isa(), native.num_threads()
    yield
    native.use_quantized_kernels("")
    native.use_isa(isa)
    native.set_num_threads(threads)


def alone(x, weight):
    """Each row by itself, on one thread."""
    threads = native.num_threads()
    native.set_num_threads(1)
    rows = [ops.linear(x[i : i + 1], weight) for i in range(x.shape[0])]
    native.set_num_threads(threads)
    return torch.cat(rows)


def matrices(shapes, k, seed):
    return [matrix(n, k, bits, seed + i) for i, (n, bits) in enumerate(shapes)]


@settings(max_examples=200, deadline=None)
@given(
    shapes=parts_of,
    k=depths,
    rows=row_counts,
    has_bias=st.booleans(),
    gap=st.integers(0, 3),
    kernels=st.sampled_from(KERNELS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_any_shape_gives_the_bits_of_the_slow_reference(shapes, k, rows, has_bias, gap, kernels, threads, seed):
    native.use_quantized_kernels(kernels)
    native.set_num_threads(threads)
    parts = matrices(shapes, k, seed)
    bias = random(sum(n for n, _ in shapes), seed=seed) if has_bias else None
    packed = ops.pack_quantized(parts, bias)
    x = random(rows, k, seed=seed + 9)
    y = ops.linear(strided(x, gap), packed)
    assert_same_bits(y, slow_linear(x, parts, packed, bias, is_fused(kernels)))


@settings(max_examples=100, deadline=None)
@given(
    shapes=parts_of,
    k=depths,
    rows=st.integers(1, 20),
    magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 1e6, 1e30]),
    kernels=st.sampled_from(KERNELS),
    seed=st.integers(0, 999),
)
def test_the_error_is_that_of_rounding_the_input_to_8_bits(shapes, k, rows, magnitude, kernels, seed):
    native.use_quantized_kernels(kernels)
    parts = matrices(shapes, k, seed)
    w = torch.cat([dequantized(part) for part in parts]).double()
    x = random(rows, k, seed=seed + 9) * magnitude
    y = ops.linear(x, ops.pack_quantized(parts, None)).double()
    _, scales = quantized_rows(x)
    halves = torch.from_numpy(scales).double().repeat_interleave(32, dim=1) / 2
    # half a step for each input, and what float32 sums of value and minimum lose, apart, in so many groups
    values = sum_of_parts(parts)
    bound = 1.0001 * halves @ w.abs().T + 1e-7 * (4 + k // 32) * x.double().abs() @ values.T
    assert ((y - x.double() @ w.T).abs() <= bound).all()


def sum_of_parts(parts):
    """|scale * value| + |minimum| of each weight, which may be much more than |scale * value + minimum|."""
    minima = [0 * p.scales if p.minima is None else p.minima for p in parts]
    plain = [
        dequantized(QuantizedMatrix(p.bits, p.values, p.scales, None)).abs()
        + m.float().abs().repeat_interleave(32, dim=1)
        for p, m in zip(parts, minima, strict=True)
    ]
    return torch.cat(plain).double()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_is_the_same_beside_any_number_of_others(kernels):
    native.use_quantized_kernels(kernels)
    weight = ops.pack_quantized(matrices([(75, 4), (33, 8)], 544, 0), random(108))
    x = random(130, 544, seed=2)
    expected = alone(x, weight)
    for rows in (*range(1, 71), *range(90, 131)):  # and where other kernels take over
        assert_same_bits(ops.linear(x[:rows], weight), expected[:rows])


@settings(max_examples=60, deadline=None)
@given(
    shapes=parts_of,
    k=depths,
    cuts=st.lists(st.integers(0, 170), max_size=4),
    gap=st.integers(0, 3),
    kernels=st.sampled_from(KERNELS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_a_row_is_the_same_in_any_split_on_any_number_of_threads(shapes, k, cuts, gap, kernels, threads, seed):
    native.use_quantized_kernels(kernels)
    native.set_num_threads(threads)
    weight = ops.pack_quantized(matrices(shapes, k, seed), None)
    x = random(170, k, seed=seed)
    edges = [0, *sorted(cuts), 170]
    parts = [ops.linear(strided(x[a:b], gap), weight) for a, b in pairwise(edges)]
    assert_same_bits(torch.cat(parts), alone(x, weight))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("n", "k", "rows"), [(576, 1536, 300), (3000, 576, 33), (40, 8192, 400), (5000, 576, 1)])
def test_threads_change_no_bit_of_a_large_product(kernels, n, k, rows):
    native.use_quantized_kernels(kernels)
    weight, x = ops.pack_quantized([matrix(n, k, 4), matrix(32, k, 8)], None), random(rows, k)
    native.set_num_threads(1)
    expected = ops.linear(x, weight)
    assert_same_bits(expected[rows - 1 :], ops.linear(x[rows - 1 :], weight))
    for threads in (2, 3):
        native.set_num_threads(threads)
        assert_same_bits(ops.linear(x, weight), expected)


def test_all_kernels_that_fuse_operations_give_the_same_bits():
    weight, x = ops.pack_quantized([matrix(100, 576, 4), matrix(70, 576, 8)], random(170)), random(21, 576)
    results = {}
    for kernels in KERNELS:
        fused = is_fused(kernels)
        native.use_quantized_kernels(kernels)
        results.setdefault(fused, []).append(ops.linear(x, weight))
    for same in results.values():
        for result in same[1:]:
            assert_same_bits(result, same[0])
    for one, other in pairwise(results.values()):
        torch.testing.assert_close(one[0], other[0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 7, 30, 130])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_do_not_saturate(kernels, rows, sign):
    native.use_quantized_kernels(kernels)
    k, ones = 64, torch.ones(40, 2, dtype=torch.float16)
    x = sign * torch.full((rows, k), 127.0)
    for value in (-128, -127, 127):
        weight = QuantizedMatrix(8, torch.full((40, k), value, dtype=torch.int8), ones, None)
        assert (ops.linear(x, ops.pack_quantized([weight], None)) == sign * 127.0 * value * k).all()
    weight = QuantizedMatrix(4, torch.full((40, k // 2), 255, dtype=torch.uint8), ones, ones)
    assert (ops.linear(x, ops.pack_quantized([weight], None)) == sign * 127.0 * 16 * k).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 3, 9, 150])
@pytest.mark.parametrize("n", [1, 7, 31, 33, 100])
def test_nothing_is_written_beside_the_output(kernels, rows, n):
    native.use_quantized_kernels(kernels)
    k, guard = 96, 64
    weight, x = ops.pack_quantized([matrix(n, k, 4), matrix(n, k, 8)], random(2 * n)), random(rows, k)
    memory = torch.full((rows * 2 * n + 2 * guard,), 77.0)
    y = memory[guard:-guard].fill_(torch.nan)
    native.quantized_linear(x.data_ptr(), k, rows, weight.description.data_ptr(), y.data_ptr())
    assert_same_bits(y.view(rows, 2 * n), ops.linear(x, weight))
    assert not y.isnan().any()
    assert (memory[:guard] == 77).all()
    assert (memory[-guard:] == 77).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 9, 40, 120])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_stays_in_its_row(kernels, rows, bad):
    native.use_quantized_kernels(kernels)
    weight, x = ops.pack_quantized([matrix(45, 96, 4), matrix(3, 96, 8)], None), random(rows, 96)
    clean = ops.linear(x, weight)
    x[rows - 1, 70] = bad
    y = ops.linear(x, weight)
    assert_same_bits(y[:-1], clean[:-1])
    assert y[-1].isnan().all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_groups_of_zeros_and_of_almost_zeros_count_as_zeros(kernels):
    native.use_quantized_kernels(kernels)
    weight = ops.pack_quantized([matrix(45, 96, 4), matrix(3, 96, 8)], None)
    x = random(3, 96)
    x[:, 32:64] = 0
    expected = ops.linear(x, weight)
    for tiny in (-0.0, 1e-40, -1e-37):
        x[:, 32:64] = tiny
        assert_same_bits(ops.linear(x, weight), expected)
    assert_same_bits(ops.linear(torch.zeros(2, 96), weight), torch.zeros(2, 48))


@settings(max_examples=100, deadline=None)
@given(
    shapes=parts_of,
    k=depths,
    ids=st.lists(st.integers(0, 10**6), max_size=60),
    scale=st.sampled_from([1e-7, 1e-5, 0.01, 100.0, 8000.0]),
    kernels=st.sampled_from(KERNELS),
    threads=st.integers(1, 3),
)
def test_an_embedding_is_exactly_the_dequantised_row(shapes, k, ids, scale, kernels, threads):
    native.use_quantized_kernels(kernels)
    native.set_num_threads(threads)
    parts = [matrix(n, k, bits, i, scale=scale) for i, (n, bits) in enumerate(shapes)]
    table = torch.cat([dequantized(part) for part in parts])
    ids = torch.tensor([i % len(table) for i in ids], dtype=torch.int64)
    assert torch.equal(ops.embedding_of_linear(ids, ops.pack_quantized(parts, None)), table[ids])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1.0, 1e9, 1e35])
def test_float32_scales_keep_11_bits_whatever_their_size(bits, scale):
    part = matrix(40, 64, bits, dtype=torch.float32, scale=scale)
    rows = ops.embedding_of_linear(torch.arange(40), ops.pack_quantized([part], None)).double()
    groups = part.values if bits == 8 else torch.stack([part.values & 15, part.values >> 4], dim=-1).view(40, 64)
    products = groups.double() * part.scales.double().repeat_interleave(32, dim=1)
    minima = 0 if part.minima is None else part.minima.double().repeat_interleave(32, dim=1)
    largest = part.scales.max() if part.minima is None else part.minima.abs().max()
    smallest = 2.0**-25 / 65504 * 256 * float(largest)  # of float16 at the end of its range
    error = (rows - products - minima).abs()
    assert (error <= 2.0**-11 * (products.abs() + abs(minima)) + smallest).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_grouped_form_gives_each_range_of_rows_its_own_weight(kernels, bits):
    native.use_quantized_kernels(kernels)
    native.set_num_threads(2)
    weights = [ops.pack_quantized([matrix(70, 96, bits, seed)], random(70, seed=seed)) for seed in range(5)]
    for offsets in ([0, 3, 3, 4, 30, 61], [0, 0, 0, 0, 0, 1], [0, 61, 61, 61, 61, 61], [0] * 6, [0, 0, 7, 12, 13, 40]):
        x = random(offsets[-1], 96, seed=1)
        y = ops.grouped_linear(x, weights, torch.tensor(offsets))
        expected = [ops.linear(x[a:b], w) for (a, b), w in zip(pairwise(offsets), weights, strict=True)]
        assert_same_bits(y, torch.cat(expected))


def test_the_grouped_form_takes_more_rows_than_it_brings_to_8_bits_at_a_time():
    weights = [ops.pack_quantized([matrix(33, 8192, 4, seed)], None) for seed in range(3)]
    x, offsets = random(800, 8192), torch.tensor([0, 300, 400, 800])
    expected = [ops.linear(x[a:b], w) for (a, b), w in zip(pairwise(offsets.tolist()), weights, strict=True)]
    assert_same_bits(ops.grouped_linear(x, weights, offsets), torch.cat(expected))


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_takes_as_much_memory_as_the_bits_and_less_than_a_panel_more(bits):
    part = matrix(1000, 96, bits)
    factors = sum(f.nbytes for f in (part.scales, part.minima) if f is not None)
    extra = ops.pack_quantized([part], None).segments[0].panels.nbytes - part.values.nbytes - factors
    assert 0 <= extra < 32 * (96 * bits // 8 + 3 * 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_packed_the_same_from_any_strides(bits):
    plain = matrix(40, 96, bits)
    wide = torch.cat([plain.values, plain.values], dim=1)
    for values in (wide[:, plain.values.shape[1] :], plain.values.T.contiguous().T):
        scales = plain.scales.T.contiguous().T
        packed = ops.pack_quantized([QuantizedMatrix(bits, values, scales, plain.minima)], None)
        ids = torch.arange(40)
        assert torch.equal(ops.embedding_of_linear(ids, packed), dequantized(plain))


def test_4_bits_without_minima_have_zeros():
    part = matrix(40, 96, 4)
    without = QuantizedMatrix(4, part.values, part.scales, None)
    packed = ops.pack_quantized([without], None)
    assert torch.equal(ops.embedding_of_linear(torch.arange(40), packed), dequantized(without))


def test_a_copy_of_a_weight_stands_on_its_own():
    parts, x = [matrix(40, 96, 4), matrix(5, 96, 8)], random(3, 96)
    weight = ops.pack_quantized(parts, random(45))
    expected = ops.linear(x, weight)
    copies = [copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))]
    for segment in weight.segments:
        segment.panels.fill_(255)
    for same in copies:
        assert_same_bits(ops.linear(x, same), expected)


@pytest.mark.parametrize("token_id", [-1, 50, 2**40, -(2**62)])
def test_a_token_id_outside_of_the_table_is_refused(token_id):
    weight = ops.pack_quantized([matrix(20, 32, 4), matrix(30, 32, 8)], None)
    with pytest.raises(IndexError, match=f"token id {token_id} is outside of the 50 rows"):
        ops.embedding_of_linear(torch.tensor([3, token_id]), weight)


def test_weights_that_do_not_fit_are_refused():
    good = matrix(8, 64, 4)
    refused = [
        (QuantizedMatrix(5, good.values, good.scales, None), "8 and 4 can"),
        (QuantizedMatrix(8, good.values, good.scales, None), "cannot pack 8 bits from torch.uint8"),
        (QuantizedMatrix(4, good.values[:0], good.scales[:0], None), "cannot pack"),
        (QuantizedMatrix(4, good.values[:, :24], good.scales, None), "K = 48 must be a multiple of 32"),
        (QuantizedMatrix(4, good.values, good.scales[:, :1], None), "scales and minima must be"),
        (QuantizedMatrix(4, good.values, good.scales.double(), None), "scales and minima must be"),
        (QuantizedMatrix(4, good.values, good.scales, good.scales[:1]), "scales and minima must be"),
        (QuantizedMatrix(4, good.values, good.scales * torch.inf, None), "must be finite"),
        (QuantizedMatrix(4, good.values, good.scales, good.scales * torch.nan), "must be finite"),
        (QuantizedMatrix(8, torch.ones(8, 64, dtype=torch.int8), good.scales, good.scales), "no minima"),
    ]
    for part, message in refused:
        with pytest.raises(ValueError, match=message):
            ops.pack_quantized([part], None)
    with pytest.raises(ValueError, match="same K"):
        ops.pack_quantized([good, matrix(8, 32, 4)], None)
    with pytest.raises(ValueError, match="does not fit"):
        ops.pack_quantized([good], random(7))


def test_inputs_that_do_not_fit_are_refused():
    weight = ops.pack_quantized([matrix(20, 64, 4)], None)
    for x in (random(2, 32), random(2, 64).double(), random(64), random(64, 2).T, random(2, 2, 64)):
        with pytest.raises(ValueError, match=r"x must be|rows of x must be"):
            ops.linear(x, weight)
    for ids in (torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match="token ids must be"):
            ops.embedding_of_linear(ids, weight)
    other, x = ops.pack_quantized([matrix(21, 64, 4)], None), random(3, 64)
    with pytest.raises(ValueError, match="one shape"):
        ops.grouped_linear(x, [weight, other], torch.tensor([0, 1, 3]))
    for offsets in ([0, 1], [0, 2, 1, 3], [1, 1, 1, 3], [0, 1, 2, 2], [0, 1, 2, 4], [0, -1, 1, 3]):
        with pytest.raises(ValueError, match="offsets must"):
            ops.grouped_linear(x, [weight] * 3, torch.tensor(offsets))
    with pytest.raises(ValueError, match="offsets must"):
        ops.grouped_linear(x, [weight] * 3, torch.tensor([0, 1, 2, 3], dtype=torch.int32))


def test_kernels_are_those_of_the_instruction_set_unless_others_are_named():
    weight = ops.pack_quantized([matrix(20, 64, 8), matrix(20, 64, 4)], None)
    for kernels in KERNELS:
        native.use_quantized_kernels(kernels)
        assert ops.kernel_name(weight) == f"{kernels} int4+int8"
    native.use_quantized_kernels("")
    for isa in native.supported_isas():
        native.use_isa(isa)
        assert ops.kernel_name(weight).startswith(isa[:4])
    with pytest.raises(ValueError, match="called mmx"):
        native.use_quantized_kernels("mmx")
