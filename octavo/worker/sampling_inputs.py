"""What the sampler needs of the rows that sample in a step. Rows that ask for nothing special cost nothing."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from octavo.sampling.penalties import PenaltyInputs, TokenEntries
from octavo.sampling.sampler import SamplingInputs
from octavo.worker.request_rows import RequestRows, Rows


def gather_sampling(rows: RequestRows, sampled: Rows) -> SamplingInputs:
    """Gather the sampling parameters of the rows `sampled` [S]."""
    length = rows.num_tokens[sampled]
    ruled = [(int(i), rows.rules[int(sampled[i])], int(sampled[i])) for i in np.flatnonzero(rows.has_rules[sampled])]
    biases = [(i, rules.bias) for i, rules, _ in ruled if rules.bias is not None]
    bias = _entries((i, token_ids) for i, (token_ids, _) in biases)
    early = np.flatnonzero(length < rows.held_back_until[sampled])
    banned = [(int(i), rows.held_back[int(sampled[i])]) for i in early]
    banned += [
        (i, rules.bad_words.banned_after(rows.output_token_ids(row)))
        for i, rules, row in ruled
        if rules.bad_words is not None
    ]
    return SamplingInputs(
        temperature=rows.temperature[sampled],
        top_k=rows.top_k[sampled],
        top_p=rows.top_p[sampled],
        min_p=rows.min_p[sampled],
        seed=rows.seed[sampled],
        sample_index=rows.sample_index[sampled],
        position=length.astype(np.uint64),
        num_logprobs=rows.num_logprobs[sampled],
        normalized=rows.normalized_logprobs[sampled],
        processed=rows.processed_logprobs[sampled],
        penalties=_gather_penalties(rows, sampled),
        bias=None if bias is None else (bias, np.concatenate([values for _, (_, values) in biases])),
        processors=[
            (i, rules.processors, rows.output_token_ids(row).tolist())
            for i, rules, row in ruled
            if rules.processors is not None
        ],
        allowed=_entries((i, rules.allowed) for i, rules, _ in ruled if rules.allowed is not None),
        banned=_entries(banned),
    )


def _gather_penalties(rows: RequestRows, sampled: Rows) -> PenaltyInputs | None:
    repetition = rows.repetition_penalty[sampled]
    frequency, presence = rows.frequency_penalty[sampled], rows.presence_penalty[sampled]
    repeating = np.flatnonzero(repetition != 1.0)
    counting = np.flatnonzero((frequency != 0.0) | (presence != 0.0))
    if not len(repeating) and not len(counting):
        return None
    return PenaltyInputs(
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        seen=_held_tokens(rows, sampled, repeating, rows.num_embeds),
        output=_held_tokens(rows, sampled, counting, rows.num_prompt_tokens),
    )


def _held_tokens(
    rows: RequestRows, sampled: Rows, chosen: npt.NDArray[np.intp], first: npt.NDArray[np.int64]
) -> TokenEntries:
    """The tokens from position first[row] on that the rows sampled[chosen] hold."""
    row = sampled[chosen]
    counts = rows.num_tokens[row] - first[row]
    # Position of each token: its place in the whole list, less where its row begins there, plus `first`.
    shift = first[row] - (np.cumsum(counts) - counts)
    positions = np.arange(counts.sum()) + np.repeat(shift, counts)
    token_ids = rows.token_ids[np.repeat(row, counts), positions]
    return TokenEntries(np.repeat(chosen, counts), token_ids.astype(np.int64))


def _entries(parts: Iterable[tuple[int, npt.NDArray[np.int64]]]) -> TokenEntries | None:
    """(row, token ids) pairs as one list of entries; None if there is none."""
    parts = list(parts)
    if not parts:
        return None
    rows = np.repeat(np.array([row for row, _ in parts], dtype=np.int64), [len(ids) for _, ids in parts])
    return TokenEntries(rows, np.concatenate([ids for _, ids in parts]))
