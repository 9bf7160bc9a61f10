"""The sampler: logits of one step in, one token a row out, and log-probabilities where asked for.

Every row is a function of its own logits, parameters and random stream; nothing here depends on the batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.interface import Platform, SamplingBatch
from octavo.protocol.messages import TokenLogprobs
from octavo.sampling.logprobs import gather_logprobs
from octavo.sampling.random import uniform

NO_LOGPROBS = -2
"""Value of `SamplingInputs.num_logprobs` for a row that asked for none (-1 asks for the whole vocabulary)."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Parameters of the rows to sample, gathered from the persistent request rows. Arrays are [R]."""

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    sample_index: npt.NDArray[np.uint64]
    position: npt.NDArray[np.uint64]
    """Position of the token to be drawn, in its request."""
    num_logprobs: npt.NDArray[np.int64]
    held_back: list[tuple[int, npt.NDArray[np.int64]]]
    """(row, token ids that may not be drawn): ends of sequence before `min_tokens`."""


class Sampler:
    """Draws one token a row."""

    def __init__(self, platform: Platform, vocab_size: int) -> None:
        """vocab_size: tokens the tokenizer knows; rows of the logits beyond it are never drawn."""
        self._platform = platform
        self._vocab_size = vocab_size

    def __call__(
        self, logits: Tensor, inputs: SamplingInputs
    ) -> tuple[npt.NDArray[np.int64], list[TokenLogprobs | None]]:
        """logits [R, V] float32, changed in place -> token ids [R] and each row's log-probabilities or None."""
        wanted = np.flatnonzero(inputs.num_logprobs != NO_LOGPROBS)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None  # indexing copies
        logits[:, self._vocab_size :] = -torch.inf
        for row, token_ids in inputs.held_back:
            logits[row, torch.from_numpy(token_ids)] = -torch.inf
        token_ids = self._platform.sample(logits, _batch(inputs))
        logprobs: list[TokenLogprobs | None] = [None] * len(inputs.temperature)
        if raw is not None:
            counts = inputs.num_logprobs[wanted].tolist()
            for row, entry in zip(wanted, gather_logprobs(raw, token_ids[wanted], counts), strict=True):
                logprobs[row] = entry
        return token_ids.numpy(), logprobs


def _batch(inputs: SamplingInputs) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.from_numpy(inputs.temperature),
        top_k=torch.from_numpy(inputs.top_k),
        top_p=torch.from_numpy(inputs.top_p),
        min_p=torch.from_numpy(inputs.min_p),
        uniform=torch.from_numpy(uniform(inputs.seed, inputs.sample_index, inputs.position)),
        all_greedy=bool((inputs.temperature == 0.0).all()),
    )
