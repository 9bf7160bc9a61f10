"""One step of the model: update the rows, gather, forward; then sample. The two halves are separate calls, so that
whatever a mask needs can be computed while the forward runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.forward_context import ForwardContext
from octavo.models.base import CausalLM
from octavo.ops.interface import AttentionMetadata, KVCache, Platform
from octavo.protocol.messages import TokenLogprobs
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.sampling.sampler import Sampler
from octavo.worker.input_batch import InputBatch, embeds_of_step, gather_inputs
from octavo.worker.prompt_embeds import insert_embeds
from octavo.worker.prompt_logprobs import compute_prompt_logprobs, find_prompt_positions
from octavo.worker.request_rows import RequestRows
from octavo.worker.sampling_inputs import gather_sampling


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose forward has run and whose tokens are not drawn yet."""

    request_ids: list[str]
    batch: InputBatch
    logits: Tensor
    """[S, V] float32."""
    prompt_logprobs: dict[str, list[TokenLogprobs]]


class ModelRunner:
    """Runs steps over one model and its KV caches."""

    def __init__(
        self, platform: Platform, model: CausalLM, kv_caches: list[KVCache], rows: RequestRows, sampler: Sampler
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.rows = rows
        self._platform = platform
        self._sampler = sampler
        self._pending: _PendingStep | None = None
        self._forward = platform.replayable(self._run_model, [self._example(2), self._example(3)])

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Compute the scheduled tokens; `sample` must follow before the next `execute`."""
        assert self._pending is None, "the step before was not sampled"
        self.rows.apply(step)
        self._copy_blocks(step.block_copies)
        batch = gather_inputs(self.rows, step)
        x = self.model.embed(batch.input_ids)
        insert_embeds(x, embeds_of_step(self.rows, batch))
        hidden = self._forward(x, batch.positions, batch.attention)
        sampling_all = len(batch.logits_indices) == len(hidden)  # a step of decoding: one token a request
        logits = self.model.compute_logits(hidden if sampling_all else hidden[batch.logits_indices])
        prompt_logprobs = self._compute_prompt_logprobs(step.request_ids, batch, hidden)
        self._pending = _PendingStep(step.request_ids, batch, logits, prompt_logprobs)

    @torch.inference_mode()
    def sample(self) -> ModelRunnerOutput:
        """Draw the tokens of the step that was executed last."""
        assert self._pending is not None, "nothing was executed"
        pending, self._pending = self._pending, None
        request_ids, batch = pending.request_ids, pending.batch
        output = ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=[[] for _ in request_ids],
            logprobs={},
            prompt_logprobs=pending.prompt_logprobs,
            failed=self._failures(request_ids, batch),
        )
        if len(batch.sampling):
            rows = batch.rows[batch.sampling]
            drawn = self._sampler(pending.logits, gather_sampling(self.rows, rows))
            self.rows.append_tokens(rows, drawn.token_ids)
            tokens = zip(batch.sampling, drawn.token_ids.tolist(), drawn.logprobs, strict=True)
            for row, (index, token_id, entry) in enumerate(tokens):
                request_id = request_ids[index]
                if row in drawn.failed:
                    output.failed.setdefault(request_id, drawn.failed[row])
                elif request_id not in output.failed:
                    output.sampled_token_ids[index] = [token_id]
                    if entry is not None:
                        output.logprobs[request_id] = [entry]
        return output

    def reset(self) -> None:
        """Forget every request, after a step that failed half-way."""
        self.rows.clear()
        self._pending = None

    def _run_model(self, x: Tensor, positions: Tensor, attention: AttentionMetadata) -> Tensor:
        return self.model.forward(x, ForwardContext(positions, attention, self.kv_caches))

    def _example(self, num_tokens: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """What the forward takes for a request of so many tokens that owns the first block."""
        order = torch.arange(num_tokens)
        # within the shortest context and the smallest vocabulary that there are
        positions, input_ids = order % self.rows.token_ids.shape[1], torch.zeros_like(order)
        attention = AttentionMetadata(
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            slot_mapping=order,
        )
        x = self.model.embed(input_ids)
        return x * (1 + order).to(x.dtype).unsqueeze(1), positions, attention

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            pairs_tensor = torch.tensor(pairs, dtype=torch.int64)
            for cache in self.kv_caches:
                self._platform.copy_blocks(cache, cache, pairs_tensor)

    def _compute_prompt_logprobs(
        self, request_ids: list[str], batch: InputBatch, hidden: Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        positions = find_prompt_positions(self.rows, batch)
        if positions is None:
            return {}
        return compute_prompt_logprobs(
            positions,
            self.rows,
            batch,
            request_ids,
            hidden,
            self.model.compute_logits,
            self._platform.log_softmax,
        )

    def _failures(self, request_ids: list[str], batch: InputBatch) -> dict[str, str]:
        """Requests of this step that could not be set up."""
        if not self.rows.failures:
            return {}
        rows = batch.rows.tolist()
        return {request_ids[i]: self.rows.failures[row] for i, row in enumerate(rows) if row in self.rows.failures}
