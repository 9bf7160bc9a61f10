"""A tensor of a checkpoint before it is read: what its header says, and how to have it. No torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

if TYPE_CHECKING:
    from torch import Tensor


class TensorHeader(NamedTuple):
    """What is known of a tensor unread."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    stored: str
    """float32, bfloat16, float16, or the name of a GGUF block type such as Q4_K."""
    num_bytes: int
    """In the file."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class BlockRows(NamedTuple):
    """A matrix in the quantised blocks of a GGUF file, row after row."""

    raw: np.ndarray
    """uint8 [num_bytes], mapped."""
    kind: GGMLQuantizationType
    shape: tuple[int, int]
    num_heads: int | None
    """Heads whose rows are to be brought into order by `to_half_rotation`; None: they are in order."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor that has not been read yet."""

    name: str
    """Hugging Face name."""
    read: "Callable[[], Tensor]"
    """In its stored float dtype; a quantised one in float32."""
    blocks: BlockRows | None = None
    """Of a quantised matrix."""
