"""Masks: token ids that a row may not draw. They come after everything else, so nothing can lift them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.sampling.penalties import TokenEntries

TokenIds = npt.NDArray[np.int64]

_ANY = -1
_NOTHING = -2


class BadWords:
    """The token sequences one request may not generate: the last id of each may not follow the others."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """sequences: at least one, none of them empty."""
        self.num_context = max(len(sequence) for sequence in sequences) - 1
        """Output tokens that `banned_after` looks at."""
        self._last = np.array([sequence[-1] for sequence in sequences], dtype=np.int64)
        # Aligned at the right: what stands before a sequence may be anything.
        self._before = np.full((len(sequences), self.num_context), _ANY, dtype=np.int64)
        for row, sequence in zip(self._before, sequences, strict=True):
            row[self.num_context - len(sequence) + 1 :] = sequence[:-1]

    def banned_after(self, output_token_ids: npt.NDArray[np.integer]) -> TokenIds:
        """Ids that may not follow this output (its last `num_context` ids are enough)."""
        tail = np.full(self.num_context, _NOTHING, dtype=np.int64)
        recent = output_token_ids[max(0, len(output_token_ids) - self.num_context) :]
        tail[self.num_context - len(recent) :] = recent
        matches = (self._before == tail) | (self._before == _ANY)
        return self._last[matches.all(axis=1)]


def keep_only(logits: Tensor, allowed: TokenEntries) -> None:
    """Mask everything but the allowed entries in the rows that have any, in place."""
    kept = logits[allowed.index]
    logits[torch.from_numpy(np.unique(allowed.rows))] = -torch.inf
    logits[allowed.index] = kept


def mask_out(logits: Tensor, banned: TokenEntries) -> None:
    """Mask the banned entries, in place."""
    logits[banned.index] = -torch.inf
