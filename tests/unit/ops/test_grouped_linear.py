"""Linear layers with one weight for each range of rows, on every platform and over every kind of weight."""

from itertools import pairwise

import pytest
import torch

from octavo.ops import registry
from octavo.ops.interface import QUANTIZATION_GROUP, QuantizedMatrix

N, K = 40, 64


@pytest.fixture(params=["reference", "cpu"])
def platform(request):
    if request.param == "cpu":
        pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")
    return registry.get_platform(request.param)


def packed(platform, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(N, generator=generator)
    if kind == "float32":
        return platform.pack_linear(torch.randn(N, K, generator=generator), bias)
    values = torch.randint(-127, 128, (N, K), dtype=torch.int8, generator=generator)
    scales = torch.rand(N, K // QUANTIZATION_GROUP, generator=generator).half()
    return platform.pack_quantized([QuantizedMatrix(8, values, scales, None)], bias)


@pytest.mark.parametrize("kinds", [["float32"] * 4, ["int8"] * 4, ["int8", "float32", "int8", "int8"]])
@pytest.mark.parametrize("offsets", [[0, 2, 2, 9, 30], [0, 0, 0, 0, 5], [0, 5, 5, 5, 5], [0] * 5])
def test_each_range_of_rows_gets_what_linear_gives_it(platform, kinds, offsets):
    weights = [packed(platform, kind, seed) for seed, kind in enumerate(kinds)]
    x = torch.randn(offsets[-1], K)
    expected = [platform.linear(x[begin:end], w) for (begin, end), w in zip(pairwise(offsets), weights, strict=True)]
    y = platform.grouped_linear(x, weights, torch.tensor(offsets))
    assert y.shape == (offsets[-1], N)
    assert torch.equal(y, torch.cat(expected))


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("offsets", [[0, 3], [0, 2, 1, 3], [1, 1, 1, 3], [0, 1, 2, 2], [0, 1, 2, 4], [0, -1, 1, 3]])
def test_offsets_that_do_not_cut_the_rows_are_refused(platform, kind, offsets):
    weights = [packed(platform, kind, seed) for seed in range(3)]
    with pytest.raises(ValueError, match="offsets must"):
        platform.grouped_linear(torch.randn(3, K), weights, torch.tensor(offsets))


def test_no_weights_and_offsets_of_another_dtype_are_refused(platform):
    with pytest.raises(ValueError, match="offsets must be int64"):
        platform.grouped_linear(torch.randn(0, K), [], torch.tensor([0]))
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="offsets must be int64"):
        platform.grouped_linear(torch.randn(3, K), [packed(platform, "float32", 0)], offsets)
