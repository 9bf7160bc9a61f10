"""Log-probabilities, or logits, of one token a row and of the top ones."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.protocol.messages import TokenLogprobs

_SLICE = 16
"""Rows whose log-probabilities, over the whole vocabulary, are kept at once."""
_GROUP = 64
"""Entries whose maximum is kept where a lower bound of the top ones is sought."""


def gather_logprobs(
    log_softmax: Callable[[Tensor], Tensor],
    logits: Tensor,
    token_ids: Tensor,
    num_logprobs: list[int],
    normalize: Tensor | None = None,
) -> list[TokenLogprobs]:
    """For each row of logits [R, V]: the token of token_ids [R] first, then the num_logprobs[r] top ones.

    -1 stands for all V tokens. Equal logits rank in token-id order. Each row depends on its own row only.

    Args:
        log_softmax: the platform's.
        normalize: [R] bool, whether a row's values are log-probabilities or the logits as they are. Default: all True.
    """
    is_normalized = np.ones(len(logits), dtype=bool) if normalize is None else normalize.numpy()
    result = []
    for first in range(0, len(logits), _SLICE):
        part = slice(first, first + _SLICE)
        scores = logits[part].numpy()
        values = log_softmax(logits[part]).numpy() if is_normalized[part].any() else scores
        rows = zip(scores, values, is_normalized[part], token_ids[part].tolist(), num_logprobs[part], strict=True)
        for row_scores, row_values, normalized, token_id, count in rows:
            # Order by the logits: two that differ may have one rounded log-probability.
            ids = np.concatenate(([token_id], _top(row_scores, count)))
            entry = TokenLogprobs(
                token_ids=ids.tolist(),
                logprobs=(row_values if normalized else row_scores)[ids].tolist(),
                sampled_rank=_rank(row_scores, token_id),
            )
            result.append(entry)
    return result


def _rank(row: npt.NDArray[np.floating], token_id: int) -> int:
    """1 for the largest entry of row [V], the lower id first among equals."""
    own = row[token_id]
    return 1 + int(np.count_nonzero(row > own)) + int(np.count_nonzero(row[:token_id] == own))


def _top(row: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """Ids of the `count` largest entries of row [V] (all if -1), largest first, the lower id first among equals."""
    num_groups = len(row) // _GROUP
    if count == -1 or count > num_groups:
        candidates = np.arange(len(row))
    elif count == 0:
        candidates = np.arange(0)
    else:
        # Each of the `count` greatest group maxima is an entry: no top one can be below the last of them.
        maxima = row[: num_groups * _GROUP].reshape(num_groups, _GROUP).max(axis=1)
        candidates = np.flatnonzero(row >= np.partition(maxima, num_groups - count)[num_groups - count])
    order = np.argsort(-row[candidates], kind="stable")
    return candidates[order if count == -1 else order[:count]]
