"""One step of the model: update the rows, gather, forward; then sample. The two halves are separate calls, so that
whatever a mask needs can be computed while the forward runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.forward_context import ForwardContext
from octavo.models.base import CausalLM
from octavo.ops.interface import KVCache
from octavo.protocol.messages import TokenLogprobs
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.sampling.sampler import Sampler
from octavo.worker.input_batch import InputBatch, gather_inputs, gather_sampling
from octavo.worker.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose forward has run and whose tokens are not drawn yet."""

    request_ids: list[str]
    batch: InputBatch
    logits: Tensor
    """[S, V] float32."""


class ModelRunner:
    """Runs steps over one model and its KV caches."""

    def __init__(self, model: CausalLM, kv_caches: list[KVCache], rows: RequestRows, sampler: Sampler) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.rows = rows
        self._sampler = sampler
        self._pending: _PendingStep | None = None

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Compute the scheduled tokens; `sample` must follow before the next `execute`."""
        assert self._pending is None, "the step before was not sampled"
        self.rows.apply(step)
        batch = gather_inputs(self.rows, step)
        context = ForwardContext(batch.positions, batch.attention, self.kv_caches)
        hidden = self.model.forward(batch.input_ids, context)
        logits = self.model.compute_logits(hidden[batch.logits_indices])
        self._pending = _PendingStep(step.request_ids, batch, logits)

    @torch.inference_mode()
    def sample(self) -> ModelRunnerOutput:
        """Draw the tokens of the step that was executed last."""
        assert self._pending is not None, "nothing was executed"
        pending, self._pending = self._pending, None
        sampled_tokens: list[list[int]] = [[] for _ in pending.request_ids]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        if len(pending.batch.sampling):
            rows = pending.batch.rows[pending.batch.sampling]
            token_ids, entries = self._sampler(pending.logits, gather_sampling(self.rows, rows))
            self.rows.append_tokens(rows, token_ids)
            for index, token_id, entry in zip(pending.batch.sampling, token_ids.tolist(), entries, strict=True):
                sampled_tokens[index] = [token_id]
                if entry is not None:
                    logprobs[pending.request_ids[index]] = [entry]
        return ModelRunnerOutput(request_ids=pending.request_ids, sampled_token_ids=sampled_tokens, logprobs=logprobs)

    def reset(self) -> None:
        """Forget every request, after a step that failed half-way."""
        self.rows.clear()
        self._pending = None
