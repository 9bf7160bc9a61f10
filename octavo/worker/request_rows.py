"""Persistent per-request state of the runner: one row a request, from admission until it is released.

Everything is a numpy array indexed by row, so that a step's inputs are gathered without a Python loop over requests
or tokens. A preempted request is released; when it resumes it gets a fresh row with all its tokens.
"""

import numpy as np
import numpy.typing as npt

from octavo.protocol.scheduler_output import NewRequest, SchedulerOutput
from octavo.sampling.sampler import NO_LOGPROBS

Rows = npt.NDArray[np.intp]


class RequestRows:
    """Rows of at most `max_num_seqs` requests of at most `max_model_len` tokens each."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # numpy leaves zeroed memory untouched until it is written: unused rows and columns cost no RAM
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float64)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.zeros(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.sample_index = np.zeros(max_num_seqs, dtype=np.uint64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.held_back_until = np.zeros(max_num_seqs, dtype=np.int64)
        """Request length below which `held_back` ids may not be sampled; 0: no such limit."""
        self.held_back: dict[int, npt.NDArray[np.int64]] = {}
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
            self.held_back.pop(row, None)
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

    def _add(self, request: NewRequest) -> None:
        row = self._free.pop()
        self._row_of[request.request_id] = row
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)
        params = request.sampling_params
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = np.uint64((params.seed or 0) % 2**64)
        self.sample_index[row] = 0
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.held_back_until[row] = request.num_prompt_tokens + params.min_tokens if request.held_back_token_ids else 0
        if request.held_back_token_ids:
            self.held_back[row] = np.asarray(request.held_back_token_ids, dtype=np.int64)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)
