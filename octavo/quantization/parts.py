"""Cutting a `QuantizedMatrix`: the shards that processes of one model hold."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.errors import InvalidInput
from octavo.ops.interface import QUANTIZATION_GROUP, QuantizedMatrix


def take_rows(matrix: QuantizedMatrix, first: int, count: int) -> QuantizedMatrix:
    """Rows first .. first + count, in memory of their own unless they are all."""
    if (first, count) == (0, matrix.shape[0]):
        return matrix
    return _map(matrix, lambda part: part[first : first + count].clone())


def take_columns(matrix: QuantizedMatrix, first: int, count: int) -> QuantizedMatrix:
    """Columns first .. first + count, in memory of their own unless they are all.

    Raises:
        InvalidInput: they begin or end inside a group.
    """
    columns = matrix.shape[1]
    if (first, count) == (0, columns):
        return matrix
    if first % QUANTIZATION_GROUP or count % QUANTIZATION_GROUP:
        raise InvalidInput(
            f"weights in few bits have groups of {QUANTIZATION_GROUP} columns: {columns} cannot be split into parts of "
            f"{count}; use a tensor_parallel_size that leaves whole groups, or quantization='none'"
        )

    def cut(part: Tensor) -> Tensor:
        start, stop = (place * part.shape[1] // columns for place in (first, first + count))
        return part[:, start:stop].clone()

    return _map(matrix, cut)


def pad_rows(matrix: QuantizedMatrix, rows: int) -> QuantizedMatrix:
    """The matrix with rows of zeros behind it, so that it has so many."""
    missing = rows - matrix.shape[0]
    if not missing:
        return matrix
    return _map(matrix, lambda part: torch.cat([part, part.new_zeros(missing, part.shape[1])]))


def equal(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    """Whether they are the same, bit by bit."""
    if one.bits != other.bits or (one.minima is None) != (other.minima is None):
        return False
    pairs = [(one.values, other.values), (one.scales, other.scales)]
    if one.minima is not None and other.minima is not None:
        pairs.append((one.minima, other.minima))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _map(matrix: QuantizedMatrix, cut: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
    minima = None if matrix.minima is None else cut(matrix.minima)
    return replace(matrix, values=cut(matrix.values), scales=cut(matrix.scales), minima=minima)
