"""Persistent per-request state of the runner: one row a request, from admission until it is released.

What every request has is a numpy array indexed by row, so that a step's inputs are gathered without a Python loop over
requests or tokens; what few have is in a dict by row. A preempted request is released; when it resumes it gets a fresh
row with all its tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import NewRequest, SchedulerOutput
from octavo.sampling.logits_processors import ProcessorChain, ProcessorFailure
from octavo.sampling.masks import BadWords
from octavo.sampling.sampler import NO_LOGPROBS
from octavo.worker.prompt_embeds import to_tensor

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What one request says about single tokens; None where it says nothing."""

    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None
    """Token ids, and what is added to the logit of each."""
    allowed: npt.NDArray[np.int64] | None
    bad_words: BadWords | None
    processors: ProcessorChain | None


class RequestRows:
    """Rows of at most `max_num_seqs` requests of at most `max_model_len` tokens each."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # numpy leaves zeroed memory untouched until it is written: unused rows and columns cost no RAM
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)

        def column(dtype: type[np.generic]) -> npt.NDArray[Any]:
            return np.zeros(max_num_seqs, dtype=dtype)

        self.num_tokens = column(np.int64)
        self.num_prompt_tokens = column(np.int64)
        self.num_embeds = column(np.int64)
        """Leading tokens that are placeholders for embeddings."""
        self.num_blocks = column(np.int64)
        self.temperature = column(np.float64)
        self.top_k = column(np.int64)
        self.top_p = column(np.float64)
        self.min_p = column(np.float64)
        self.seed = column(np.uint64)
        self.sample_index = column(np.uint64)
        self.repetition_penalty = column(np.float64)
        self.frequency_penalty = column(np.float64)
        self.presence_penalty = column(np.float64)
        self.num_logprobs = column(np.int64)
        self.num_prompt_logprobs = column(np.int64)
        self.normalized_logprobs = column(np.bool_)
        """Log-probabilities rather than logits."""
        self.processed_logprobs = column(np.bool_)
        """Taken after everything that changes the distribution."""
        self.held_back_until = column(np.int64)
        """Request length below which `held_back` ids may not be sampled; 0: no such limit."""
        self.has_rules = column(np.bool_)
        """Whether the row is in `rules`."""
        self.held_back: dict[int, npt.NDArray[np.int64]] = {}
        self.rules: dict[int, TokenRules] = {}
        self.prompt_embeds: dict[int, Tensor] = {}
        """[num_embeds, hidden] of the rows whose prompt is given so."""
        self.failures: dict[int, str] = {}
        """Rows whose request could not be set up, and why."""
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def apply(self, step: SchedulerOutput) -> None:
        """Bring the rows up to date with what the scheduler decided: releases first, then new rows and new blocks."""
        for request_id in step.released_request_ids:
            self.release(request_id)
        for request in step.new_requests:
            self._add(request)
        for request_id, block_ids in step.new_block_ids.items():
            self._append_blocks(self._row_of[request_id], block_ids)

    def release(self, request_id: str) -> None:
        """Free the row of a request; unknown ids are ignored."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            for by_row in (self.held_back, self.rules, self.prompt_embeds, self.failures):
                by_row.pop(row, None)
            self._free.append(row)

    def clear(self) -> None:
        """Free every row."""
        for request_id in list(self._row_of):
            self.release(request_id)

    def rows_of(self, request_ids: list[str]) -> Rows:
        """Row numbers [R] of the requests."""
        row_of = self._row_of
        return np.fromiter((row_of[request_id] for request_id in request_ids), dtype=np.intp, count=len(request_ids))

    def append_tokens(self, rows: Rows, token_ids: npt.NDArray[np.int64]) -> None:
        """Append one sampled token [R] to each of the rows [R]."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def output_token_ids(self, row: int) -> npt.NDArray[np.int32]:
        """What the request has generated so far. A view."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def _add(self, request: NewRequest) -> None:
        row = self._free.pop()
        self._row_of[request.request_id] = row
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_embeds[row] = 0
        if request.prompt_embeds is not None:
            self.prompt_embeds[row] = to_tensor(request.prompt_embeds)
            self.num_embeds[row] = request.num_prompt_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)
        self._set_choice(row, request.sampling_params)
        self.sample_index[row] = request.sample_index
        self._set_logprobs(row, request.sampling_params)
        self.held_back_until[row] = 0
        if request.held_back_token_ids:
            self.held_back_until[row] = request.num_prompt_tokens + request.sampling_params.min_tokens
            self.held_back[row] = np.asarray(request.held_back_token_ids, dtype=np.int64)
        self._set_rules(row, request)

    def _set_choice(self, row: int, params: SamplingParams) -> None:
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = np.uint64((params.seed or 0) % 2**64)
        self.repetition_penalty[row] = params.repetition_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.presence_penalty[row] = params.presence_penalty

    def _set_logprobs(self, row: int, params: SamplingParams) -> None:
        mode = params.logprobs_mode or "raw_logprobs"
        self.normalized_logprobs[row] = mode.endswith("logprobs")
        self.processed_logprobs[row] = mode.startswith("processed")
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs

    def _set_rules(self, row: int, request: NewRequest) -> None:
        params = request.sampling_params
        processors = None
        if params.logits_processors:
            prompt = request.token_ids[: request.num_prompt_tokens] if request.prompt_embeds is None else []
            try:
                processors = ProcessorChain(params, prompt)
            except ProcessorFailure as failure:
                self.failures[row] = str(failure)
        bias = None
        if params.logit_bias:
            token_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
            bias = (token_ids, np.fromiter(params.logit_bias.values(), dtype=np.float64))
        allowed = None if params.allowed_token_ids is None else np.unique(params.allowed_token_ids).astype(np.int64)
        bad_words = BadWords(request.bad_words_token_ids) if request.bad_words_token_ids else None
        rules = TokenRules(bias, allowed, bad_words, processors)
        self.has_rules[row] = any(part is not None for part in (bias, allowed, bad_words, processors))
        if self.has_rules[row]:
            self.rules[row] = rules

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)
