"""The operators a decoder needs, and the platform that provides them. Models and layers call only these.

Shapes: T tokens of this step, R requests, H query heads, G KV heads, D head size, B blocks a request at most.
Every output row depends on its own input row only: neighbours and padding never enter a sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.config.platform_traits import PACKED_GROUP_BYTES, PlatformTraits, WorkspaceTraits
from octavo.protocol.kv_cache_spec import KVCacheSpec

PackedWeight = Any
"""A weight matrix [N, K] in the form the platform's `linear` wants. Opaque to everybody else."""


class KVCache(NamedTuple):
    """KV cache of one layer. The layout inside a block is the platform's choice; dim 0 is always the block."""

    k: Tensor
    v: Tensor


QUANTIZATION_GROUP = 32
"""Neighbours along K that share a scale in a `QuantizedMatrix`."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A weight [N, K] in few bits: weight[n, k] = scales[n, k // 32] * value[n, k] + minima[n, k // 32]."""

    bits: int
    """8 or 4."""
    values: Tensor
    """8 bits: int8 [N, K], -127 to 127. 4 bits: uint8 [N, K // 2], 0 to 15, element 2 i in the low half of byte i."""
    scales: Tensor
    """float16 or float32 [N, K // 32]."""
    minima: Tensor | None
    """float16 or float32 [N, K // 32]; None: zeros. 8 bits have none."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * (8 // self.bits)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the KV of this step's requests lies. One a KV group and step, shared by the group's layers."""

    block_tables: Tensor
    """[R, B] int32. Entries beyond a request's blocks are undefined and must not be read."""
    query_start_loc: Tensor
    """[R + 1] int32: tokens of request r are query_start_loc[r] .. query_start_loc[r + 1]."""
    seq_lens: Tensor
    """[R] int32: tokens of each request including this step's."""
    slot_mapping: Tensor
    """[T] int64: block_table[p // block_size] * block_size + p % block_size of each token's position p."""
    plans: dict[Any, Any] = field(default_factory=dict)
    """What a platform works out once a step for all layers of one shape; nobody else looks into it."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the rows to sample, one entry a row of the logits. Tensors, so that they can stay on the device."""

    temperature: Tensor
    """[R] float64; 0: greedy."""
    top_k: Tensor
    """[R] int64; 0: off."""
    top_p: Tensor
    """[R] float64; 1: off; 0: the top token."""
    min_p: Tensor
    """[R] float64; 0: off."""
    uniform: Tensor
    """[R] float64 in [0, 1): this position's draw of each row's own random stream."""
    all_greedy: bool


def dequantized(matrix: QuantizedMatrix) -> Tensor:
    """The matrix in float32 [N, K]."""
    values = matrix.values
    if matrix.bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=-1)
    rows, columns = matrix.shape
    groups = values.reshape(rows, -1, QUANTIZATION_GROUP).float() * matrix.scales.float().unsqueeze(-1)
    if matrix.minima is not None:
        groups += matrix.minima.float().unsqueeze(-1)
    return groups.reshape(rows, columns)


Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]
"""x [T, hidden], positions [T], this step's metadata -> hidden [T, hidden]: a model without its two ends."""


class Platform(ABC):
    """One set of operators with its memory and dtypes. Third parties add theirs as `octavo.platforms` entry points."""

    name: str
    workspace: WorkspaceTraits
    head_size_multiple: int = 1
    """What the head sizes of its attention are multiples of."""
    kernels_reason: str = ""
    """Why it computes with these kernels, for people."""
    weight_bits: tuple[int, ...] = ()
    """Bits that `pack_quantized` keeps: 8, 4. It dequantises others."""
    weight_group_bytes: Mapping[int, int] = MappingProxyType(PACKED_GROUP_BYTES)
    """Those bits -> bytes that 32 packed weights take, their scale and minimum among them."""

    def traits(self, checkpoint_dtype: str) -> PlatformTraits:
        """What the plan must know. checkpoint_dtype: float32, bfloat16, float16 or quantized."""
        return PlatformTraits(
            name=self.name,
            auto_dtype=self.default_dtype(checkpoint_dtype),
            kv_cache_dtypes=self.kv_cache_dtypes,
            workspace=self.workspace,
            head_size_multiple=self.head_size_multiple,
            kernels=self.kernel_report(),
            kernels_reason=self.kernels_reason,
            weight_bits=self.weight_bits,
            weight_group_bytes=self.weight_group_bytes,
        )

    @abstractmethod
    def default_dtype(self, checkpoint_dtype: str) -> tuple[str, str]:
        """(dtype, reason) for `dtype="auto"`."""

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """dtype of the activations, norm weights and biases of a model whose weights are kept in `dtype`."""
        return dtype

    @property
    def kv_cache_dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that `allocate_kv_cache` takes."""
        return tuple(DTYPES)

    @abstractmethod
    def set_num_threads(self, count: int) -> None:
        """Compute with this many threads, the caller's among them."""

    @abstractmethod
    def kernel_report(self) -> dict[str, str]:
        """Kernel name of each kind of layer."""

    @abstractmethod
    def allocate_kv_cache(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> KVCache:
        """Memory for `num_blocks` blocks of one layer."""

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        """Bring weight [N, K] and bias [N] into the form `linear` wants. Done once, at load."""

    def pack_quantized(self, parts: Sequence[QuantizedMatrix], bias: Tensor | None) -> PackedWeight:
        """Bring weights [N_i, K] in few bits, stacked to [sum(N_i), K], and bias [sum(N_i)] into a form for `linear`,
        `embedding_of_linear`. Parts may differ in bits. A platform without such kernels dequantises them."""
        return self.pack_linear(torch.cat([dequantized(part) for part in parts]), bias)

    @abstractmethod
    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x [T, K] -> [T, N]."""

    def grouped_linear(self, x: Tensor, weights: Sequence[PackedWeight], offsets: Tensor) -> Tensor:
        """Rows offsets[e] .. offsets[e + 1] of x [T, K] times weight e, of E -> [T, N]: the experts of a layer.

        offsets: int64 [E + 1], rising from 0 to T. The weights have one shape. A row gets the bits that `linear` gives.

        Raises:
            ValueError: there are no weights, or the offsets do not cut x into E parts.
        """
        if not weights or offsets.dtype is not torch.int64 or offsets.shape != (len(weights) + 1,):
            raise ValueError(
                f"offsets must be int64 [{len(weights) + 1}] for {len(weights)} weights, of which there must be one, "
                f"not {offsets.dtype} {list(offsets.shape)}"
            )
        bounds = offsets.tolist()
        if bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, len(x)):
            raise ValueError(f"offsets must rise from 0 to {len(x)}, not be {bounds}")
        parts = zip(bounds, bounds[1:], weights, strict=False)
        return torch.cat([self.linear(x[begin:end], weight) for begin, end, weight in parts])

    @abstractmethod
    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids [T], table [V, hidden] -> [T, hidden]."""

    @abstractmethod
    def embedding_of_linear(self, token_ids: Tensor, weight: PackedWeight) -> Tensor:
        """Rows token_ids [T] of a packed weight [V, hidden] -> [T, hidden]: embedding and head share one copy."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32 (Zhang & Sennrich 2019)."""

    @abstractmethod
    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * N] -> silu(x[:, :N]) * x[:, N:]."""

    @abstractmethod
    def gelu_and_mul(self, x: Tensor, approximate: str) -> Tensor:
        """x [T, 2 * N] -> gelu(x[:, :N]) * x[:, N:]; approximate "none": by erf, "tanh" (Hendrycks & Gimpel 2016)."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim, in float32 (Ba et al. 2016)."""

    @abstractmethod
    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, G, D] by positions [T].

        cos_sin [max_positions, rot] float32: rot / 2 cosines, then rot / 2 sines. If rot < D the rest is kept.
        Pairs: (x[i], x[i + rot / 2]) as in GPT-NeoX, or interleaved (x[2 i], x[2 i + 1]) as in GPT-J.
        Source: Su et al. 2021 (RoFormer).
        """

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
        """`rope`, then `write_kv`, in one; returns the rotated q. q and k may be changed in place."""
        q, k = self.rope(q, k, positions, cos_sin, interleaved)
        self.write_kv(k, v, kv_cache, slot_mapping)
        return q

    @abstractmethod
    def write_kv(self, k: Tensor, v: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
        """Store k [T, G, Dk] and v [T, G, Dv] at slot_mapping [T]. Rows may be strided, heads are contiguous."""

    @abstractmethod
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
        """Causal attention of q [T, H, Dk] over each request's own KV -> [T, H, Dv]; prefill and decode in one call.

        The KV of this step's tokens is already written. sliding_window: a token sees itself and the window - 1
        tokens before it. soft_cap: scores become cap * tanh(score / cap). sinks [H]: one more score a head in the
        softmax's denominator.
        """

    @abstractmethod
    def copy_blocks(self, src: KVCache, dst: KVCache, pairs: Tensor) -> None:
        """dst[pairs[i, 1]] = src[pairs[i, 0]] for pairs [P, 2], no target twice.

        src and dst may be one cache (copy-on-write) or two (swap). Every source is read before any target is written.
        """

    @abstractmethod
    def export_block(self, kv_caches: list[KVCache], block_id: int) -> bytes:
        """One block of every layer in its canonical byte form: per layer K then V, [block_size, G, D], row-major.

        A part in int8 or fp8 is followed by its scales, [block_size, G] float32.
        """

    @abstractmethod
    def import_block(self, kv_caches: list[KVCache], block_id: int, data: bytes) -> None:
        """The inverse of `export_block`.

        Raises:
            ValueError: data is not as long as a block.
        """

    def replayable(self, forward: Forward, examples: Sequence[tuple[Tensor, Tensor, AttentionMetadata]]) -> Forward:
        """The same function, cheaper to call where the platform can record what `forward` does and do it again.

        The next call may overwrite the result. examples: two inputs of different T whose KV may be written.
        """
        return forward

    @abstractmethod
    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """logits [R, V] float32 (-inf: never) -> token ids [R] int64. Each row is a function of its own row alone.

        Greedy rows take the most probable token, the lowest id among equals. Others: temperature, then top-k, then
        top-p, then min-p; the draw inverts the cumulative distribution, in token-id order, at `uniform`.
        """

    @abstractmethod
    def process_logits(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """The logits [R, V] float64 whose softmax `sample` draws from; `logits` [R, V] float32 is left as it is.

        Divided by the temperature; -inf for what the filters leave out. A greedy row counts as temperature 1. A token
        that `sample` may return is finite.
        """

    @abstractmethod
    def log_softmax(self, logits: Tensor) -> Tensor:
        """log_softmax over the last dim of logits [R, V], float32 or float64; each row a function of itself alone."""


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""dtype names of the options and their torch types."""
