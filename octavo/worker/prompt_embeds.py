"""Prompts given as embeddings: from the message to a tensor, and into the model's input in place of the tokens'."""

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.ops.interface import DTYPES
from octavo.protocol.messages import PromptEmbeds


def to_tensor(embeds: PromptEmbeds) -> Tensor:
    """[num_tokens, hidden] in the dtype they were given in."""
    return torch.frombuffer(bytearray(embeds.data), dtype=DTYPES[embeds.dtype]).view(embeds.shape)


def insert_embeds(x: Tensor, pieces: Iterable[tuple[int, Tensor]]) -> None:
    """Overwrite rows of the model's input x [T, hidden], in place: each piece [n, hidden] from its first row on."""
    for first, piece in pieces:
        x[first : first + len(piece)] = piece
