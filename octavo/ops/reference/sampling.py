"""Sampling on the CPU with torch and numpy. A row's token depends on that row alone, to the last bit.

Only operations whose result in a row cannot depend on the other rows are used: softmax and cumulative sums along a row,
exactly rounded elementwise arithmetic, comparisons and sorting. (A plain sum or an elementwise exp is not among them:
their vector tails move with the shape.)
"""

import numpy as np
import torch
from torch import Tensor

from octavo.ops.interface import SamplingBatch

_LOWEST_TEMPERATURE = 1e-250


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `Platform.sample`. logits [R, V] float32 -> ids [R] int64."""
    # torch.argmax is documented to return the first of several maxima.
    if batch.all_greedy:
        return logits.argmax(dim=-1)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    greedy = batch.temperature == 0
    tokens[greedy] = logits[greedy].argmax(dim=-1)
    rows = (~greedy).nonzero().squeeze(1)
    probs = _probabilities(logits[rows], batch.temperature[rows])
    _filter(probs, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
    tokens[rows] = _invert(probs, batch.uniform[rows])
    return tokens


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `Platform.process_logits`. logits [R, V] float32 -> [R, V] float64."""
    temperature = torch.where(batch.temperature == 0, 1.0, batch.temperature)
    # Nothing overflows at the floor, and there the gap between any two float32 is as good as infinite already.
    processed = logits.double().div_(temperature.clamp(min=_LOWEST_TEMPERATURE).unsqueeze(1))
    rows = ((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)).nonzero().squeeze(1)
    if len(rows):
        probs = _probabilities(logits[rows], temperature[rows])
        _filter(probs, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
        # What a greedy row takes stays, though its probability may round to that of a lower id.
        greedy = (batch.temperature[rows] == 0).nonzero().squeeze(1)
        probs[greedy, logits[rows[greedy]].argmax(dim=-1)] = 1.0
        processed[rows] = processed[rows].masked_fill_(probs == 0, -torch.inf)
    return processed


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature) in float64. The maximum is taken out first: a tiny temperature cannot overflow."""
    shifted = logits.double()
    shifted -= shifted.amax(dim=-1, keepdim=True)
    return torch.softmax(shifted.div_(temperature.unsqueeze(1)), dim=-1)


def _filter(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to 0, in place, the probability of every token that top-k, top-p or min-p leaves out."""
    rows = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    if len(rows) == len(probs):
        _keep_top(probs, top_k, top_p)
    elif len(rows):
        chosen = probs[rows]
        _keep_top(chosen, top_k[rows], top_p[rows])
        probs[rows] = chosen
    if bool((min_p > 0).any()):
        # The most probable token is never left out, so the floor is the same before and after top-k and top-p.
        probs.masked_fill_(probs < probs.amax(dim=-1, keepdim=True) * min_p.unsqueeze(1), 0.0)


def _keep_top(probs: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set all of probs [R, V] but the top-k, and of these the top-p, to 0; the lowest ids win among equals."""
    vocab_size = probs.shape[1]
    # numpy sorts values alone an order of magnitude faster than torch sorts them with their indices.
    in_order = np.sort(probs.numpy(), axis=-1)
    kept = _num_kept(torch.from_numpy(np.cumsum(in_order[:, ::-1], axis=-1)), top_k, top_p)
    ascending = torch.from_numpy(in_order)
    threshold = ascending.gather(1, (vocab_size - kept).unsqueeze(1))
    probs.masked_fill_(probs < threshold, 0.0)
    num_left = vocab_size - torch.searchsorted(ascending, threshold).squeeze(1)
    crowded = (num_left > kept).nonzero().squeeze(1)
    if len(crowded):
        num_above = vocab_size - torch.searchsorted(ascending, threshold, right=True).squeeze(1)
        _drop_last_equals(probs, crowded, threshold, kept - num_above)


def _drop_last_equals(probs: Tensor, rows: Tensor, value: Tensor, places: Tensor) -> None:
    """Of the tokens whose probability is `value`, keep the first `places` of each of `rows`."""
    chosen = probs[rows]
    equal = chosen == value[rows]
    probs[rows] = chosen.masked_fill_(equal & (equal.cumsum(-1) > places[rows].unsqueeze(1)), 0.0)


def _num_kept(cumulative: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """How many of a row's most probable tokens stay, given the cumulative sums [R, V] of its sorted probabilities."""
    vocab_size = cumulative.shape[1]
    by_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    total = cumulative.gather(1, (by_k - 1).unsqueeze(1))
    by_p = torch.searchsorted(cumulative, top_p.unsqueeze(1) * total).squeeze(1) + 1
    return torch.where(top_p < 1, torch.minimum(by_k, by_p), by_k)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative probability, in id order, exceeds uniform * total. Never one of probability 0."""
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # uniform is at most 1 - 2^-53, so the rounded product is below the total: there is always a token to find.
    found = torch.searchsorted(cumulative, uniform.unsqueeze(1) * total, right=True).squeeze(1)
    # A row of NaN, from a model that overflowed, finds none; it must not cost the other rows their step.
    return found.clamp_(max=probs.shape[1] - 1)
