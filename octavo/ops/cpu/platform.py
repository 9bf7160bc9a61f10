"""CpuPlatform: each family of operators has its own file; this one puts them together."""

import gc
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from octavo.errors import InvalidInput
from octavo.logging import get_logger
from octavo.ops.cpu import _native, attention, elementwise, linear, quantized, recording, sampling, traits
from octavo.ops.cpu.linear import NativeWeight
from octavo.ops.cpu.quantized import QuantizedWeight
from octavo.ops.interface import AttentionMetadata, Forward, KVCache, Platform, QuantizedMatrix, SamplingBatch
from octavo.protocol.kv_cache_spec import KVCacheSpec

logger = get_logger(__name__)


class CpuPlatform(Platform):
    """Native kernels for x86-64 and arm64, chosen by what the processor has; OCTAVO_CPU_ISA names others.

    Weights are kept in their dtype; activations, norm weights and every sum are float32.
    """

    name = traits.NAME
    workspace = traits.WORKSPACE
    head_size_multiple = traits.HEAD_SIZE_MULTIPLE
    weight_bits = traits.WEIGHT_BITS

    _alive: ClassVar[WeakSet["CpuPlatform"]] = WeakSet()

    def __init__(self) -> None:
        isa, self.kernels_reason = traits.chosen_isa()
        self._require_one_isa(isa)
        _native.use_isa(isa)
        self._alive.add(self)

    @classmethod
    def _require_one_isa(cls, isa: str) -> None:
        """Weights are packed for the instruction set in use, which is one for the whole process."""
        if isa != _native.isa() and cls._alive:
            gc.collect()  # an engine that was let go may be part of a cycle
        if isa != _native.isa() and cls._alive:
            raise InvalidInput(
                f"the kernels would change to {isa}, but an engine of this process computes with {_native.isa()}: "
                "shut that one down first, or keep OCTAVO_CPU_ISA as it was"
            )

    def default_dtype(self, checkpoint_dtype: str) -> tuple[str, str]:
        return traits.default_dtype(_native.isa(), checkpoint_dtype)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    @property
    def kv_cache_dtypes(self) -> tuple[str, ...]:
        return traits.KV_CACHE_DTYPES

    def set_num_threads(self, count: int) -> None:
        _native.set_num_threads(count)
        # One pool in the hot path: beside ours torch's would only take the cores away.
        torch.set_num_threads(1)

    def kernel_report(self) -> dict[str, str]:
        return traits.kernel_report(_native.isa())

    def allocate_kv_cache(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> KVCache:
        return attention.allocate_kv_cache(spec, num_blocks, block_size)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> NativeWeight:
        return linear.pack_linear(weight, bias)

    def pack_quantized(self, parts: Sequence[QuantizedMatrix], bias: Tensor | None) -> QuantizedWeight:
        return quantized.pack_quantized(parts, bias)

    def linear(self, x: Tensor, weight: NativeWeight | QuantizedWeight) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            return quantized.linear(x, weight)
        return linear.linear(x, weight)

    def grouped_linear(self, x: Tensor, weights: Sequence[NativeWeight | QuantizedWeight], offsets: Tensor) -> Tensor:
        few_bits = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if few_bits and len(few_bits) == len(weights):
            return quantized.grouped_linear(x, few_bits, offsets)
        return super().grouped_linear(x, weights, offsets)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return linear.embedding(token_ids, table)

    def embedding_of_linear(self, token_ids: Tensor, weight: NativeWeight | QuantizedWeight) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            return quantized.embedding_of_linear(token_ids, weight)
        return linear.embedding_of_linear(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return elementwise.fused_add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return elementwise.layer_norm(x, weight, bias, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return elementwise.silu_and_mul(x)

    def gelu_and_mul(self, x: Tensor, approximate: str) -> Tensor:
        return elementwise.gelu_and_mul(x, approximate)

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        return attention.rope(q, k, positions, cos_sin, interleaved)

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
        attention.write_kv(k, v, kv_cache, slot_mapping)

    def rope_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: KVCache,
        slot_mapping: Tensor,
        interleaved: bool = False,
    ) -> Tensor:
        return attention.rope_and_write_kv(q, k, v, positions, cos_sin, kv_cache, slot_mapping, interleaved)

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return attention.paged_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap, sinks)

    def replayable(self, forward: Forward, examples: Sequence[tuple[Tensor, Tensor, AttentionMetadata]]) -> Forward:
        try:
            return recording.record(forward, examples)
        except recording.NotReplayable as reason:
            logger.info("the forward runs operator by operator: %s", reason)
            return forward

    def copy_blocks(self, src: KVCache, dst: KVCache, pairs: Tensor) -> None:
        attention.copy_blocks(src, dst, pairs)

    def export_block(self, kv_caches: list[KVCache], block_id: int) -> bytes:
        return attention.export_block(kv_caches, block_id)

    def import_block(self, kv_caches: list[KVCache], block_id: int, data: bytes) -> None:
        attention.import_block(kv_caches, block_id, data)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sampling.sample(logits, batch)

    def process_logits(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sampling.process_logits(logits, batch)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return sampling.log_softmax(logits)
