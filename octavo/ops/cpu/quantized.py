"""Linear layers and embeddings over weights of 8 and 4 bits, packed once at load.

The input of a product is brought to 8 bits inside the call: each row and group of 32 neighbours has its own scale, the
largest magnitude / 127, and rounds to the nearest. Sums over a group are exact integers; their products with the scales
are added in float32 in the order of K. So a row's result depends on that row alone, whatever other rows, tiles and
threads there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.ops.cpu import _native, memory
from octavo.ops.interface import QUANTIZATION_GROUP, QuantizedMatrix

PANEL_COLUMNS = 32
_LARGEST = 65504.0  # of float16
_SMALLEST_EXPONENT = -100  # enough for scales of 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Some rows of a weight, all in as many bits (csrc/cpu/quantized/quantized.h)."""

    panels: Tensor
    """uint8: the weight's own size, and up to a panel of zeros."""
    bias: Tensor | None
    """float32, filled up with zeros to whole panels."""
    n: int
    bits: int
    exponent: int
    """Scales and minima are stored times 2**-exponent, which brings them into the range of float16."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [n, k] in few bits, and its bias. Any kernels of this machine read it."""

    segments: tuple[Segment, ...]
    n: int
    k: int
    description: Tensor = field(init=False, repr=False)
    """int64: QuantizedWeight and its QuantizedSegments as the native side reads them. Holds addresses."""

    def __post_init__(self) -> None:
        words, column = [self.n, self.k, len(self.segments)], 0
        for segment in self.segments:
            bias = 0 if segment.bias is None else segment.bias.data_ptr()
            words += [segment.panels.data_ptr(), bias, segment.n, column, segment.bits, segment.exponent]
            column += segment.n
        object.__setattr__(self, "description", torch.tensor(words, dtype=torch.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy has its tensors elsewhere
        return QuantizedWeight, (self.segments, self.n, self.k)


def pack_quantized(parts: Sequence[QuantizedMatrix], bias: Tensor | None) -> QuantizedWeight:
    """See `Platform.pack_quantized`. float32 scales and minima are rounded to float16's 11 bits.

    Raises:
        ValueError: a part is not as `QuantizedMatrix` says or has a scale that is no number, the parts differ in K, or
            the bias does not fit them.
    """
    for part in parts:
        _check(part)
    if len({part.shape[1] for part in parts}) != 1:
        raise ValueError(f"parts of a weight must have the same K, not {[part.shape for part in parts]}")
    n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit a weight of shape {(n, k)}")
    segments, row = [], 0
    for part in parts:
        rows = part.shape[0]
        segments.append(_pack(part, None if bias is None else bias[row : row + rows]))
        row += rows
    return QuantizedWeight(tuple(segments), n, k)


def linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x [T, K] float32 -> [T, N] float32. Rows of x may be strided.

    Raises:
        ValueError: x does not fit the weight.
    """
    rows = _checked_rows(x, weight.k)
    y = x.new_empty((rows, weight.n))
    _native.quantized_linear(x.data_ptr(), x.stride(0), rows, weight.description.data_ptr(), y.data_ptr())
    return y


def grouped_linear(x: Tensor, weights: Sequence[QuantizedWeight], offsets: Tensor) -> Tensor:
    """Rows offsets[e] .. offsets[e + 1] of x [T, K] float32 times weight e, for all E weights at once -> [T, N].

    offsets: int64 [E + 1], rising from 0 to T.

    Raises:
        ValueError: x, the weights or the offsets do not fit each other.
    """
    shapes = {(weight.n, weight.k) for weight in weights}
    if len(shapes) != 1:
        raise ValueError(f"grouped weights must have one shape, not {sorted(shapes)}")
    ((n, k),) = shapes
    rows = _checked_rows(x, k)
    if offsets.dtype is not torch.int64 or offsets.shape != (len(weights) + 1,) or not offsets.is_cpu:
        raise ValueError(f"offsets must be int64 [{len(weights) + 1}], not {offsets.dtype} {list(offsets.shape)}")
    offsets = offsets.contiguous()
    y = x.new_empty((rows, n))
    _native.grouped_quantized_linear(
        x.data_ptr(),
        x.stride(0),
        rows,
        offsets.data_ptr(),
        [weight.description.data_ptr() for weight in weights],
        y.data_ptr(),
    )
    return y


def embedding_of_linear(token_ids: Tensor, weight: QuantizedWeight) -> Tensor:
    """Rows token_ids [T] int64 of a packed weight [V, K] -> [T, K] float32: scale * value + minimum.

    Raises:
        IndexError: a token id outside of [0, V).
        ValueError: token_ids is not as said.
    """
    if token_ids.dtype is not torch.int64 or token_ids.dim() != 1 or not token_ids.is_cpu:
        raise ValueError(f"token ids must be int64 [T], not {token_ids.dtype} {list(token_ids.shape)}")
    ids = token_ids.contiguous()
    output = ids.new_empty((ids.shape[0], weight.k), dtype=torch.float32)
    _native.embedding_of_quantized(ids.data_ptr(), ids.shape[0], weight.description.data_ptr(), output.data_ptr())
    return output


def kernel_name(weight: QuantizedWeight) -> str:
    """What computes with this weight, such as "avx512amx int4" or "avx2 int4+int8"."""
    bits = sorted({segment.bits for segment in weight.segments})
    return f"{_native.quantized_kernels_in_use()} {'+'.join(f'int{b}' for b in bits)}"


def _check(part: QuantizedMatrix) -> None:
    if part.bits not in (4, 8):
        raise ValueError(f"a weight of {part.bits} bits cannot be packed: 8 and 4 can")
    expected = torch.int8 if part.bits == 8 else torch.uint8
    values = part.values
    if values.dtype is not expected or values.dim() != 2 or 0 in values.shape or not values.is_cpu:
        raise ValueError(f"cannot pack {part.bits} bits from {values.dtype} {list(values.shape)} on {values.device}")
    n, k = part.shape
    if k % QUANTIZATION_GROUP:
        raise ValueError(f"K = {k} must be a multiple of {QUANTIZATION_GROUP}: keep this weight in another dtype")
    if part.bits == 8 and part.minima is not None:
        raise ValueError("a weight of 8 bits has no minima")
    for factors in (part.scales, part.minima):
        if factors is None:
            continue
        shape = (n, k // QUANTIZATION_GROUP)
        if factors.dtype not in (torch.float16, torch.float32) or factors.shape != shape or not factors.is_cpu:
            raise ValueError(
                f"scales and minima must be float16 or float32 {list(shape)}, not {factors.dtype} {list(factors.shape)}"
            )


def _pack(part: QuantizedMatrix, bias: Tensor | None) -> Segment:
    n, k = part.shape
    values = part.values.detach()
    if values.stride(1) != 1:
        values = values.contiguous()
    exponent = _exponent(part)
    scales = _stored(part.scales, exponent)
    minima = None if part.minima is None else _stored(part.minima, exponent)
    panels = memory.empty(_native.quantized_bytes(n, k, part.bits))
    _native.pack_quantized(
        values.data_ptr(),
        values.stride(0),
        scales.data_ptr(),
        0 if minima is None else minima.data_ptr(),
        n,
        k,
        part.bits,
        panels.data_ptr(),
    )
    if bias is not None:
        whole = bias.new_zeros(-(-n // PANEL_COLUMNS) * PANEL_COLUMNS, dtype=torch.float32)
        whole[:n] = bias.detach()
        bias = whole
    return Segment(panels, bias, n, part.bits, exponent)


def _exponent(part: QuantizedMatrix) -> int:
    """The power of two whose taking out brings the largest scale or minimum just below float16's largest number.

    What is float16 already stays exact; small scales, which float16 has few bits for, keep all 11.
    """
    factors = [part.scales] if part.minima is None else [part.scales, part.minima]
    if not all(f.isfinite().all() for f in factors):
        raise ValueError("scales and minima of a weight must be finite")
    largest = max(float(f.abs().max()) for f in factors)
    exponent = _SMALLEST_EXPONENT
    while largest > _LARGEST * 2.0**exponent:
        exponent += 1
    return exponent


def _stored(factors: Tensor, exponent: int) -> Tensor:
    return (factors.detach().float() * 2.0**-exponent).to(torch.float16).contiguous()


def _checked_rows(x: Tensor, k: int) -> int:
    if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != k or not x.is_cpu:
        raise ValueError(f"x must be float32 [T, {k}] on the CPU, not {x.dtype} {list(x.shape)} on {x.device}")
    if x.stride(1) != 1:
        raise ValueError(f"the rows of x must be contiguous; its strides are {x.stride()}")
    return x.shape[0]
