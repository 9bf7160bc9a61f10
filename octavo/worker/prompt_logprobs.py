"""Log-probabilities of prompt tokens, computed in slices so that a long prompt needs no [prompt, vocab] logits."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.protocol.messages import TokenLogprobs
from octavo.sampling.logprobs import gather_logprobs
from octavo.sampling.sampler import NO_LOGPROBS
from octavo.worker.input_batch import InputBatch
from octavo.worker.request_rows import RequestRows

_SLICE = 64
"""Rows of logits kept at once."""


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """P tokens of this step that predict a prompt token whose log-probabilities were asked for."""

    request: npt.NDArray[np.intp]
    """[P] which of the step's requests."""
    token: npt.NDArray[np.int64]
    """[P] which of the step's tokens."""
    predicted: npt.NDArray[np.int64]
    """[P] id of the prompt token that follows it."""


def find_prompt_positions(rows: RequestRows, batch: InputBatch) -> PromptPositions | None:
    """The positions of this step, in batch order; None if nobody asked."""
    row = batch.rows
    if (rows.num_prompt_logprobs[row] == NO_LOGPROBS).all():
        return None
    scheduled = np.diff(batch.query_start_loc)
    # The last prompt token predicts the first output token.
    left = rows.num_prompt_tokens[row] - 1 - batch.num_computed
    counts = np.where(rows.num_prompt_logprobs[row] == NO_LOGPROBS, 0, np.clip(left, 0, scheduled))
    request = np.repeat(np.arange(len(row)), counts)
    offset = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    position = batch.num_computed[request] + offset
    predicted = rows.token_ids[row[request], position + 1].astype(np.int64)
    return PromptPositions(request, batch.query_start_loc[request] + offset, predicted)


def compute_prompt_logprobs(
    positions: PromptPositions,
    rows: RequestRows,
    batch: InputBatch,
    request_ids: list[str],
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    log_softmax: Callable[[Tensor], Tensor],
) -> dict[str, list[TokenLogprobs]]:
    """Request id -> one entry a position, in order.

    Sampling parameters do not act on prompt tokens: a processed mode gives the raw values.

    Args:
        hidden: [T, hidden] of this step's tokens.
        compute_logits: [S, hidden] -> [S, V].
        log_softmax: [S, V] -> [S, V].
    """
    result: dict[str, list[TokenLogprobs]] = {}
    for first in range(0, len(positions.token), _SLICE):
        part = slice(first, first + _SLICE)
        row = batch.rows[positions.request[part]]
        entries = gather_logprobs(
            log_softmax,
            compute_logits(hidden[torch.from_numpy(positions.token[part])]),
            torch.from_numpy(positions.predicted[part]),
            rows.num_prompt_logprobs[row].tolist(),
            torch.from_numpy(rows.normalized_logprobs[row]),
        )
        for request, entry in zip(positions.request[part], entries, strict=True):
            result.setdefault(request_ids[request], []).append(entry)
    return result
