"""The sampler: logits of one step in, one token a row out, and log-probabilities where asked for.

The order: penalties, bias, the user's logits processors, masks; then temperature, filters and the draw, which are the
platform's. Every row is a function of its own logits, parameters and random stream; nothing here depends on the batch.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.interface import Platform, SamplingBatch
from octavo.protocol.messages import TokenLogprobs
from octavo.sampling.logits_processors import ProcessorChain, ProcessorFailure
from octavo.sampling.logprobs import gather_logprobs
from octavo.sampling.masks import keep_only, mask_out
from octavo.sampling.penalties import PenaltyInputs, TokenEntries, add_bias, apply_penalties
from octavo.sampling.random import uniform

NO_LOGPROBS = -2
"""Value of `SamplingInputs.num_logprobs` for a row that asked for none (-1 asks for the whole vocabulary)."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Parameters of the rows to sample, gathered from the persistent request rows. Arrays are [R].

    What only some rows have is a list of entries, or None if no row has it.
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    sample_index: npt.NDArray[np.uint64]
    position: npt.NDArray[np.uint64]
    """Position of the token to be drawn, in its request."""
    num_logprobs: npt.NDArray[np.int64]
    normalized: npt.NDArray[np.bool_]
    """Whether the row's log-probabilities are such, or logits."""
    processed: npt.NDArray[np.bool_]
    """Whether they are taken after everything that changes the distribution, or before."""
    penalties: PenaltyInputs | None = None
    bias: tuple[TokenEntries, npt.NDArray[np.float64]] | None = None
    """Entries, and what is added to each."""
    processors: list[tuple[int, ProcessorChain, list[int]]] = field(default_factory=list)
    """(row, its processors, its output token ids)."""
    allowed: TokenEntries | None = None
    """The only ids that may be drawn, in the rows that have any."""
    banned: TokenEntries | None = None
    """Ids that may not be drawn: ends of sequence before `min_tokens`, ends of bad words."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was drawn, row by row."""

    token_ids: npt.NDArray[np.int64]
    """[R]; without meaning in rows that failed."""
    logprobs: list[TokenLogprobs | None]
    failed: dict[int, str]
    """Rows that cannot go on, and why."""


class Sampler:
    """Draws one token a row."""

    def __init__(self, platform: Platform, vocab_size: int) -> None:
        """vocab_size: tokens the tokenizer knows; rows of the logits beyond it are never drawn."""
        self._platform = platform
        self._vocab_size = vocab_size

    def __call__(self, logits: Tensor, inputs: SamplingInputs) -> SamplerOutput:
        """logits [R, V] float32, changed in place -> one token a row and what was asked for beside it."""
        asked = inputs.num_logprobs != NO_LOGPROBS
        raw_rows = np.flatnonzero(asked & ~inputs.processed)
        raw = logits[torch.from_numpy(raw_rows)] if len(raw_rows) else logits  # indexing copies
        failed = self._change(logits, inputs)
        batch = _batch(inputs)
        token_ids = self._platform.sample(logits, batch)
        failed = _find_broken(logits, token_ids, batch) | failed
        logprobs: list[TokenLogprobs | None] = [None] * len(inputs.temperature)
        if len(raw_rows):
            self._fill_logprobs(logprobs, raw_rows, raw, token_ids, inputs)
        processed_rows = np.flatnonzero(asked & inputs.processed)
        if len(processed_rows):
            index = torch.from_numpy(processed_rows)
            processed = self._platform.process_logits(logits[index], _select(batch, index))
            self._fill_logprobs(logprobs, processed_rows, processed, token_ids, inputs)
        return SamplerOutput(token_ids.numpy(), logprobs, failed)

    def _change(self, logits: Tensor, inputs: SamplingInputs) -> dict[int, str]:
        """Everything that comes before the temperature, in place. Returns the rows that failed, and why."""
        if inputs.penalties is not None:
            apply_penalties(logits, inputs.penalties)
        if inputs.bias is not None:
            add_bias(logits, *inputs.bias)
        failed = {}
        for row, chain, output_token_ids in inputs.processors:
            try:
                logits[row] = chain(output_token_ids, logits[row])
            except ProcessorFailure as failure:
                failed[row] = str(failure)
        if logits.shape[1] > self._vocab_size:
            logits[:, self._vocab_size :] = -torch.inf
        if inputs.allowed is not None:
            keep_only(logits, inputs.allowed)
        if inputs.banned is not None:
            mask_out(logits, inputs.banned)
        return _find_exhausted(logits, inputs) | failed

    def _fill_logprobs(
        self,
        logprobs: list[TokenLogprobs | None],
        rows: npt.NDArray[np.intp],
        logits: Tensor,
        token_ids: Tensor,
        inputs: SamplingInputs,
    ) -> None:
        """Set the entries of `rows` [W], whose logits are [W, V]."""
        normalize = torch.from_numpy(inputs.normalized[rows])
        counts = inputs.num_logprobs[rows].tolist()
        entries = gather_logprobs(
            self._platform.log_softmax, logits, token_ids[torch.from_numpy(rows)], counts, normalize
        )
        for row, entry in zip(rows, entries, strict=True):
            logprobs[row] = entry


def _find_exhausted(logits: Tensor, inputs: SamplingInputs) -> dict[int, str]:
    """Rows in which no token is left."""
    masked = [entries.rows for entries in (inputs.allowed, inputs.banned) if entries is not None]
    masked.append(np.array([row for row, _, _ in inputs.processors], dtype=np.int64))
    if not any(map(len, masked)):
        return {}
    rows = np.unique(np.concatenate(masked))
    exhausted = rows[(logits[torch.from_numpy(rows)].amax(dim=-1) == -torch.inf).numpy()]
    reason = "no token is left: allowed_token_ids, bad_words, min_tokens and logits processors together ban every one"
    return dict.fromkeys(exhausted.tolist(), reason)


def _find_broken(logits: Tensor, token_ids: Tensor, batch: SamplingBatch) -> dict[int, str]:
    """Rows whose logits are no numbers: they would draw some token all the same."""
    # the greatest logit of a row that holds a NaN is NaN; a greedy row has drawn it
    if batch.all_greedy:
        greatest = logits.numpy()[np.arange(len(token_ids)), token_ids.numpy()]
    else:
        greatest = logits.amax(dim=-1).numpy()
    broken = np.flatnonzero(~np.isfinite(greatest)).tolist()
    reason = "the model's logits are not finite; its weights are damaged, or too large for its dtype"
    return dict.fromkeys(broken, reason)


def _batch(inputs: SamplingInputs) -> SamplingBatch:
    all_greedy = bool((inputs.temperature == 0.0).all())
    draws = np.zeros_like(inputs.temperature) if all_greedy else uniform(
        inputs.seed, inputs.sample_index, inputs.position
    )  # fmt: skip
    return SamplingBatch(
        temperature=torch.from_numpy(inputs.temperature),
        top_k=torch.from_numpy(inputs.top_k),
        top_p=torch.from_numpy(inputs.top_p),
        min_p=torch.from_numpy(inputs.min_p),
        uniform=torch.from_numpy(draws),
        all_greedy=all_greedy,
    )


def _select(batch: SamplingBatch, rows: Tensor) -> SamplingBatch:
    return SamplingBatch(
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        min_p=batch.min_p[rows],
        uniform=batch.uniform[rows],
        all_greedy=batch.all_greedy,
    )
