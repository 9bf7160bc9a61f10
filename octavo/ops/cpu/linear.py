"""Linear layers over weights packed once at load, and embeddings. The arithmetic is float32 whatever the storage.

Every output is one sum over k in order, plus the bias: a row's result depends on that row alone, whatever other rows,
tiles and threads there are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.cpu import _native, memory

_STORAGES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A weight [n, k] in the panels that the kernels of one instruction set read (csrc/cpu/linear/linear.h)."""

    data: Tensor
    """uint8: the weight's own size, and up to a panel of zeros."""
    bias: Tensor | None
    """float32 [n], filled up with zeros to whole panels."""
    n: int
    k: int
    dtype: torch.dtype
    storage: int
    isa: str


def pack_linear(weight: Tensor, bias: Tensor | None) -> NativeWeight:
    """Pack weight [N, K] in its own dtype, with whatever strides, and bias [N].

    Raises:
        ValueError: not a matrix of float32, bfloat16 or float16 on the CPU, or empty, or the bias does not fit it.
    """
    if weight.dtype not in _STORAGES or weight.dim() != 2 or 0 in weight.shape or not weight.is_cpu:
        raise ValueError(f"cannot pack a {weight.dtype} weight of shape {tuple(weight.shape)} on {weight.device}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    n, k = weight.shape
    storage, columns = _STORAGES[weight.dtype], _native.panel_columns()
    padded = -(-n // columns) * columns
    data = memory.empty(padded * k * weight.element_size())
    weight = weight.detach()
    _native.pack_linear(weight.data_ptr(), n, k, *weight.stride(), storage, data.data_ptr())
    if bias is not None:
        whole = bias.new_zeros(padded, dtype=torch.float32)
        whole[:n] = bias.detach()
        bias = whole
    return NativeWeight(data, bias, n, k, weight.dtype, storage, _native.isa())


def linear(x: Tensor, weight: NativeWeight) -> Tensor:
    """x [T, K] float32 -> [T, N] float32. Rows of x may be strided.

    Raises:
        ValueError: x does not fit the weight, or the weight was packed for another instruction set.
    """
    k = weight.k
    if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != k or not x.is_cpu:
        raise ValueError(f"x must be float32 [T, {k}] on the CPU, not {x.dtype} {list(x.shape)} on {x.device}")
    x_stride, k_stride = x.stride()
    if k_stride != 1 and k > 1:
        raise ValueError(f"the rows of x must be contiguous; its strides are {x.stride()}")
    rows, bias = x.shape[0], weight.bias
    y = x.new_empty((rows, weight.n))
    _native.linear(
        x.data_ptr(),
        x_stride,
        rows,
        weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weight.n,
        k,
        weight.storage,
        weight.isa,
        y.data_ptr(),
    )
    return y


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows token_ids [T] int64 of table [V, hidden] float32, bfloat16 or float16 -> [T, hidden] float32.

    Raises:
        IndexError: a token id outside of [0, V).
        ValueError: token_ids or table is not as said, or not contiguous.
    """
    ids = _checked_ids(token_ids)
    if table.dtype not in _STORAGES or table.dim() != 2 or not table.is_contiguous() or not table.is_cpu:
        raise ValueError(
            f"cannot embed from a {table.dtype} table, shape {list(table.shape)}, strides {table.stride()}"
        )
    vocabulary, hidden = table.shape
    output = ids.new_empty((ids.shape[0], hidden), dtype=torch.float32)
    _native.embedding(
        ids.data_ptr(),
        ids.shape[0],
        table.data_ptr(),
        vocabulary,
        hidden,
        _STORAGES[table.dtype],
        output.data_ptr(),
    )
    return output


def embedding_of_linear(token_ids: Tensor, weight: NativeWeight) -> Tensor:
    """Rows token_ids [T] int64 of a packed weight [V, K] -> [T, K] float32, exactly as they were packed.

    Raises:
        IndexError: a token id outside of [0, V).
        ValueError: token_ids is not as said, or the weight was packed for another instruction set.
    """
    ids = _checked_ids(token_ids)
    output = ids.new_empty((ids.shape[0], weight.k), dtype=torch.float32)
    _native.embedding_of_linear(
        ids.data_ptr(),
        ids.shape[0],
        weight.data.data_ptr(),
        weight.n,
        weight.k,
        weight.storage,
        weight.isa,
        output.data_ptr(),
    )
    return output


def kernel_name(weight: NativeWeight) -> str:
    """What computes with this weight, such as "avx2 f32"."""
    return f"{weight.isa} {_NAMES[weight.dtype]}"


def _checked_ids(token_ids: Tensor) -> Tensor:
    if token_ids.dtype is not torch.int64 or token_ids.dim() != 1 or not token_ids.is_cpu:
        raise ValueError(f"token ids must be int64 [T], not {token_ids.dtype} {list(token_ids.shape)}")
    return token_ids.contiguous()
