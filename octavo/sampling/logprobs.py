"""Log-probabilities, or logits, of one token a row and of the top ones."""

import torch
from torch import Tensor

from octavo.protocol.messages import TokenLogprobs


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: list[int], normalize: Tensor | None = None
) -> list[TokenLogprobs]:
    """For each row of logits [R, V]: the token of token_ids [R] first, then the num_logprobs[r] top ones.

    -1 stands for all V tokens. Equal logits rank in token-id order. Each row depends on its own row only.
    normalize [R] bool: whether a row's values are log-probabilities or the logits as they are. Default: all True.
    """
    values = logits.log_softmax(dim=-1)
    if normalize is not None and not bool(normalize.all()):
        values = torch.where(normalize.unsqueeze(1), values, logits)
    own = logits.gather(1, token_ids.unsqueeze(1))
    vocab = torch.arange(logits.shape[1])
    ahead = (logits > own) | ((logits == own) & (vocab < token_ids.unsqueeze(1)))
    ranks = (ahead.sum(dim=1) + 1).tolist()
    result = []
    for row, (token_id, count) in enumerate(zip(token_ids.tolist(), num_logprobs, strict=True)):
        # Order by the logits: two that differ may have one rounded log-probability.
        top = _top(logits[row], count)
        result.append(
            TokenLogprobs(
                token_ids=[token_id, *top.tolist()],
                logprobs=[values[row, token_id].item(), *values[row, top].tolist()],
                sampled_rank=ranks[row],
            )
        )
    return result


def _top(row: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest entries of row [V] (all if -1), largest first, the lower id first among equals."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    if count == -1 or count >= row.numel():
        return row.sort(descending=True, stable=True).indices
    threshold = row.topk(count).values[-1]
    candidates = (row >= threshold).nonzero().squeeze(1)
    order = row[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]
