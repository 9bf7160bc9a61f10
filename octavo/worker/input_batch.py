"""One step's inputs, gathered from the persistent rows into fresh tensors that no later step disturbs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.interface import AttentionMetadata
from octavo.protocol.scheduler_output import SchedulerOutput
from octavo.worker.request_rows import RequestRows, Rows


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T tokens of R requests, S of which sample a token in this step."""

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    attention: AttentionMetadata
    rows: Rows
    """[R] row of each request."""
    num_computed: npt.NDArray[np.int64]
    """[R] position of each request's first token in this step."""
    query_start_loc: npt.NDArray[np.int64]
    """[R + 1] the tokens of request r are query_start_loc[r] .. query_start_loc[r + 1]."""
    sampling: npt.NDArray[np.intp]
    """[S] which of the R requests sample: those whose known tokens are all computed after this step."""
    logits_indices: Tensor
    """[S] int64: the token whose hidden state predicts the next one."""


def gather_inputs(rows: RequestRows, step: SchedulerOutput) -> InputBatch:
    """Gather the inputs of `step`; no Python loop over requests or tokens."""
    row = rows.rows_of(step.request_ids)
    counts = np.asarray(step.num_scheduled_tokens, dtype=np.int64)
    starts = np.asarray(step.num_computed_tokens, dtype=np.int64)
    ends = starts + counts
    query_start_loc = np.zeros(len(row) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    token_row = np.repeat(row, counts)
    positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], counts)
    block_size = rows.block_size
    slots = rows.block_tables[token_row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    width = int(-(-ends.max() // block_size))
    sampling = np.flatnonzero(ends == rows.num_tokens[row])
    attention = AttentionMetadata(
        block_tables=torch.from_numpy(rows.block_tables[row, :width]),
        query_start_loc=torch.from_numpy(query_start_loc.astype(np.int32)),
        seq_lens=torch.from_numpy(ends.astype(np.int32)),
        slot_mapping=torch.from_numpy(slots),
    )
    return InputBatch(
        input_ids=torch.from_numpy(rows.token_ids[token_row, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        attention=attention,
        rows=row,
        num_computed=starts,
        query_start_loc=query_start_loc,
        sampling=sampling,
        logits_indices=torch.from_numpy(query_start_loc[1:][sampling] - 1),
    )


def embeds_of_step(rows: RequestRows, batch: InputBatch) -> Iterator[tuple[int, Tensor]]:
    """(first of the step's tokens, [n, hidden]) for each request whose embeddings belong to this step's tokens."""
    for request in np.flatnonzero(batch.num_computed < rows.num_embeds[batch.rows]):
        start, first, stop = batch.num_computed[request], *batch.query_start_loc[request : request + 2]
        # The slice ends by itself where the embeddings do.
        yield int(first), rows.prompt_embeds[int(batch.rows[request])][start : start + stop - first]
