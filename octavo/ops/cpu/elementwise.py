"""Norms and gated activations of the cpu platform, over rows of float32.

Called for every layer of every step: the checks are the cheap ones, and outputs come from `new_empty` with plain
integers, which takes a third of the time of a torch.Size and does not heed the default dtype.
"""

import torch
from torch import Tensor

from octavo.ops.cpu import _native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Platform.rms_norm`. x [..., N], weight [N]."""
    rows, stride, num_rows, width = _rows(x)
    _check_parameter(weight, width)
    out = rows.new_empty(num_rows, width)
    _native.rms_norm(rows.data_ptr(), stride, weight.data_ptr(), eps, out.data_ptr(), num_rows, width)
    return out if x.dim() == 2 else out.view(x.shape)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Platform.fused_add_rms_norm`. x and residual [..., N], weight [N]."""
    rows, stride, num_rows, width = _rows(x)
    others, other_stride, num_others, other_width = _rows(residual)
    if num_others != num_rows or other_width != width:
        raise ValueError(f"residual {tuple(residual.shape)} is not of the shape of x {tuple(x.shape)}")
    _check_parameter(weight, width)
    out, total = rows.new_empty(num_rows, width), rows.new_empty(num_rows, width)
    _native.add_rms_norm(
        rows.data_ptr(),
        stride,
        others.data_ptr(),
        other_stride,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        total.data_ptr(),
        num_rows,
        width,
    )
    return (out, total) if x.dim() == 2 else (out.view(x.shape), total.view(x.shape))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Platform.layer_norm`. x [..., N], weight and bias [N]."""
    rows, stride, num_rows, width = _rows(x)
    _check_parameter(weight, width)
    if bias is not None:
        _check_parameter(bias, width)
    bias_at = 0 if bias is None else bias.data_ptr()
    out = rows.new_empty(num_rows, width)
    _native.layer_norm(rows.data_ptr(), stride, weight.data_ptr(), bias_at, eps, out.data_ptr(), num_rows, width)
    return out if x.dim() == 2 else out.view(x.shape)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `Platform.silu_and_mul`. x [..., 2 * N] -> [..., N]."""
    rows, stride, num_rows, width = _gated_rows(x)
    out = rows.new_empty(num_rows, width)
    _native.silu_and_mul(rows.data_ptr(), stride, out.data_ptr(), num_rows, width)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], width)


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """See `Platform.gelu_and_mul`. x [..., 2 * N] -> [..., N]."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r} is neither 'none' nor 'tanh'")
    rows, stride, num_rows, width = _gated_rows(x)
    out = rows.new_empty(num_rows, width)
    _native.gelu_and_mul(rows.data_ptr(), stride, out.data_ptr(), num_rows, width, approximate == "tanh")
    return out if x.dim() == 2 else out.view(*x.shape[:-1], width)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x as rows that are contiguous in themselves, how far apart they lie, how many they are, and how wide."""
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise TypeError(f"activations of the cpu platform are float32 on the CPU, not {x.dtype} on {x.device}")
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    num_rows, width = x.shape
    stride, step = x.stride()
    if step != 1:
        return x.contiguous(), width, num_rows, width
    return x, stride, num_rows, width


def _gated_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """The same for rows that hold gate and up; the width is that of one of them."""
    rows, stride, num_rows, both = _rows(x)
    if both % 2:
        raise ValueError(f"rows of gate and up have an even width, not {both}")
    return rows, stride, num_rows, both // 2


def _check_parameter(tensor: Tensor, width: int) -> None:
    if tensor.dtype is not torch.float32 or tensor.shape != (width,) or not tensor.is_contiguous():
        raise ValueError(f"a contiguous float32 [{width}] was expected, not {tensor.dtype} {tuple(tensor.shape)}")
