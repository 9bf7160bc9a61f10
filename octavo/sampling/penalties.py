"""Repetition, frequency and presence penalties, on the few logits they concern.

No table of counts is kept: what a request has said stands in its token ids; the penalised logits are gathered, changed
and put back.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_FINITE = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Places in the logits: entry e is (rows[e], token_ids[e])."""

    rows: npt.NDArray[np.int64]
    """[E] rows of the logits."""
    token_ids: npt.NDArray[np.int64]
    """[E]."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def index(self) -> tuple[Tensor, Tensor]:
        """For indexing the logits."""
        return torch.from_numpy(self.rows), torch.from_numpy(self.token_ids)

    def counted(self, vocab_size: int) -> tuple["TokenEntries", npt.NDArray[np.int64]]:
        """Each entry once, and how often it was there."""
        keys, counts = np.unique(self.rows * vocab_size + self.token_ids, return_counts=True)
        return TokenEntries(*np.divmod(keys, vocab_size)), counts


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """Parameters [R] of every row, and the tokens that the rows with a penalty hold, one entry for each time."""

    repetition: npt.NDArray[np.float64]
    frequency: npt.NDArray[np.float64]
    presence: npt.NDArray[np.float64]
    seen: TokenEntries
    """Prompt and output of the rows with a repetition penalty."""
    output: TokenEntries
    """Output of the rows with a frequency or presence penalty."""


def apply_penalties(logits: Tensor, penalties: PenaltyInputs) -> None:
    """Penalise logits [R, V] float32 in place: repetition, then frequency and presence.

    Repetition divides positive logits and multiplies the others (Keskar et al. 2019, CTRL, section 4.1). Frequency is
    taken off for each time the output holds the token, presence once. A finite logit stays finite.
    """
    if len(penalties.seen):
        # An entry that is there twice is written twice, with one value.
        values = logits[penalties.seen.index].double()
        penalty = torch.from_numpy(penalties.repetition[penalties.seen.rows])
        _put(logits, penalties.seen, torch.where(values > 0, values / penalty, values * penalty))
    if len(penalties.output):
        held, counts = penalties.output.counted(logits.shape[1])
        penalty = torch.from_numpy(penalties.frequency[held.rows] * counts + penalties.presence[held.rows])
        _put(logits, held, logits[held.index].double() - penalty)


def add_bias(logits: Tensor, entries: TokenEntries, values: npt.NDArray[np.float64]) -> None:
    """Add values [E] to logits [R, V] float32 at the entries, in place. No entry is there twice."""
    _put(logits, entries, logits[entries.index].double() + torch.from_numpy(values))


def _put(logits: Tensor, entries: TokenEntries, values: Tensor) -> None:
    logits[entries.index] = values.clamp(-_FINITE, _FINITE).float()
