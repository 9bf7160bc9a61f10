"""What the tests of layers over few bits share: weights, and the slow reference, operation by operation."""

from functools import cache

import numpy as np
import torch

from octavo.ops.cpu import _native as native
from octavo.ops.cpu import quantized as ops
from octavo.ops.interface import QUANTIZATION_GROUP, QuantizedMatrix

KERNELS = native.quantized_kernels()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(n, k, bits, seed=0, dtype=torch.float16, scale=0.01):
    """A weight of all values that its bits have, -128 too."""
    generator = torch.Generator().manual_seed(seed)
    groups = (n, k // QUANTIZATION_GROUP)
    scales = (scale * torch.rand(groups, generator=generator)).to(dtype)
    if bits == 8:
        values = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
        return QuantizedMatrix(8, values, scales, None)
    values = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    return QuantizedMatrix(4, values, scales, (-8 * scale * torch.rand(groups, generator=generator)).to(dtype))


def strided(x, gap):
    """x with rows `gap` elements apart, and NaN in between."""
    whole = torch.full((x.shape[0], x.shape[1] + gap), torch.nan)
    whole[:, : x.shape[1]] = x
    return whole[:, : x.shape[1]]


def assert_same_bits(a, b):
    assert a.shape == b.shape
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def quantized_rows(x):
    """(values, scales) as the kernels bring x to 8 bits: integers [T, groups, 32] and float32 [T, groups]."""
    groups = x.numpy().reshape(x.shape[0], x.shape[1] // QUANTIZATION_GROUP, QUANTIZATION_GROUP)
    largest = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        factors = np.where(largest < 2.0**-120, np.float32(0), np.float32(127) / largest)
    values = np.rint(groups * factors[..., None]).astype(np.int64)
    scales = np.where(largest < 2.0**-120, np.float32(0), largest * (np.float32(1) / np.float32(127)))
    return values, scales


def add_product(total, a, b, is_fused):
    """total + a * b, rounded once or twice. 64 bits of a long double hold all that counts."""
    if not is_fused:
        return total + a * b
    return (total.astype(np.longdouble) + a.astype(np.longdouble) * b.astype(np.longdouble)).astype(np.float32)


@cache
def is_fused(kernels):
    """Whether these kernels, as they were compiled, add a product in one operation or in two."""
    part, x = matrix(64, 320, 8), random(3, 320)
    packed = ops.pack_quantized([part], None)
    native.use_quantized_kernels(kernels)
    return not torch.equal(ops.linear(x, packed), slow_linear(x, [part], packed, None, is_fused=False))


def slow_linear(x, parts, packed, bias, is_fused):
    """The same sums in the same order, one group of K after the other."""
    values, scales = quantized_rows(x)
    columns = []
    for part, segment in zip(parts, packed.segments, strict=True):
        w = part.values
        if part.bits == 4:
            w = torch.stack([w & 15, w >> 4], dim=-1)
        w = w.reshape(part.shape[0], -1, QUANTIZATION_GROUP).numpy().astype(np.int64)
        shrink = 2.0**-segment.exponent
        w_scales = (part.scales.float() * shrink).half().float().numpy()
        total = np.zeros((x.shape[0], part.shape[0]), np.float32)
        for g in range(w.shape[1]):
            sums = (values[:, g] @ w[:, g].T).astype(np.float32)
            total = add_product(total, sums, scales[:, g, None] * w_scales[None, :, g], is_fused)
            if part.minima is not None:
                minima = (part.minima.float() * shrink).half().float().numpy()[None, :, g]
                row_sums = scales[:, g] * values[:, g].sum(-1).astype(np.float32)
                total = add_product(total, minima, row_sums[:, None], is_fused)
        columns.append(total * np.float32(2.0**segment.exponent))
    y = torch.from_numpy(np.concatenate(columns, axis=1))
    return y + (0.0 if bias is None else bias)
