"""Log-probabilities of sampled tokens and of the most probable ones."""

import torch
from torch import Tensor

from octavo.protocol.messages import TokenLogprobs


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: list[int]) -> list[TokenLogprobs]:
    """For each row of logits [R, V] float32: the sampled token of token_ids [R], then the num_logprobs[r] top ones.

    -1 stands for all V tokens. Equal logits rank in token-id order. Each row depends on its own row only.
    """
    logprobs = logits.log_softmax(dim=-1)
    sampled = logprobs.gather(1, token_ids.unsqueeze(1))
    vocab = torch.arange(logits.shape[1])
    ahead = (logprobs > sampled) | ((logprobs == sampled) & (vocab < token_ids.unsqueeze(1)))
    ranks = (ahead.sum(dim=1) + 1).tolist()
    result = []
    for row, count in enumerate(num_logprobs):
        top = _top(logprobs[row], count)
        result.append(
            TokenLogprobs(
                token_ids=[int(token_ids[row]), *top.tolist()],
                logprobs=[sampled[row].item(), *logprobs[row, top].tolist()],
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
