"""Sampling and log-probabilities of the cpu platform. No row is sorted as a whole."""

import torch
from torch import Tensor

from octavo.ops.cpu import _native
from octavo.ops.interface import SamplingBatch


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `Platform.sample`. logits [R, V] float32 -> ids [R] int64.

    Of a row that holds a NaN, or whose maximum is infinite, the position of such an entry.
    """
    logits, num_rows, vocab_size = _rows(logits, (torch.float32,))
    if vocab_size == 0:
        raise ValueError("there is no token to draw: the vocabulary is empty")
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    if batch.all_greedy:
        _native.argmax(logits.data_ptr(), logits.stride(0), num_rows, vocab_size, token_ids.data_ptr())
        return token_ids
    parameters = _parameters(batch, num_rows)
    uniform = _column(batch.uniform, torch.float64, num_rows)
    _native.sample(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        *[column.data_ptr() for column in parameters],
        uniform.data_ptr(),
        token_ids.data_ptr(),
    )
    return token_ids


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `Platform.process_logits`. logits [R, V] float32 -> [R, V] float64."""
    logits, num_rows, vocab_size = _rows(logits, (torch.float32,))
    parameters = _parameters(batch, num_rows)
    processed = torch.empty(num_rows, vocab_size, dtype=torch.float64)
    _native.process_logits(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        *[column.data_ptr() for column in parameters],
        processed.data_ptr(),
    )
    return processed


def log_softmax(logits: Tensor) -> Tensor:
    """See `Platform.log_softmax`. logits [R, V], float32 or float64 -> the same."""
    logits, num_rows, vocab_size = _rows(logits, (torch.float32, torch.float64))
    out = torch.empty(num_rows, vocab_size, dtype=logits.dtype)
    is_double = logits.dtype is torch.float64
    _native.log_softmax(logits.data_ptr(), logits.stride(0), num_rows, vocab_size, out.data_ptr(), is_double)
    return out


def _rows(logits: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, int, int]:
    """logits with rows that are contiguous in themselves, how many they are, and how wide."""
    if logits.dtype not in dtypes:
        raise TypeError(f"logits are {' or '.join(map(str, dtypes))}, not {logits.dtype}")
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, num_rows, vocab_size


def _parameters(batch: SamplingBatch, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _column(batch.temperature, torch.float64, num_rows),
        _column(batch.top_k, torch.int64, num_rows),
        _column(batch.top_p, torch.float64, num_rows),
        _column(batch.min_p, torch.float64, num_rows),
    )


def _column(column: Tensor, dtype: torch.dtype, num_rows: int) -> Tensor:
    if column.dtype is not dtype or column.shape != (num_rows,):
        raise ValueError(f"{dtype} [{num_rows}] was expected, not {column.dtype} {tuple(column.shape)}")
    return column.contiguous()
