"""ReferencePlatform: memory and the simple operators here, attention and sampling in their own files.

KV layout: k [num_blocks, block_size, G, Dk], v [num_blocks, block_size, G, Dv], so a slot is a row of the two first
dims taken together. What a block holds beyond a request's tokens is never read.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.errors import InvalidInput
from octavo.ops.interface import DTYPES, AttentionMetadata, KVCache, Platform, SamplingBatch
from octavo.ops.reference import traits
from octavo.ops.reference.attention import paged_attention
from octavo.ops.reference.sampling import process_logits, sample
from octavo.protocol.kv_cache_spec import KVCacheSpec


class DenseWeight(NamedTuple):
    """A weight as it came: weight [N, K], bias [N] or None, both of one float dtype."""

    weight: Tensor
    bias: Tensor | None


class ReferencePlatform(Platform):
    """Plain torch on the CPU. Norms, rotation and attention compute in float32 whatever the dtype of the tensors."""

    name = traits.NAME
    workspace = traits.WORKSPACE
    kernels_reason = traits.KERNELS_REASON

    def default_dtype(self, checkpoint_dtype: str) -> tuple[str, str]:
        return traits.default_dtype(checkpoint_dtype)

    def set_num_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def kernel_report(self) -> dict[str, str]:
        return traits.kernel_report()

    def allocate_kv_cache(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> KVCache:
        shape = (num_blocks, block_size, spec.num_kv_heads)
        dtype = DTYPES[spec.dtype]
        return KVCache(
            torch.empty(*shape, spec.head_dim_k, dtype=dtype), torch.empty(*shape, spec.head_dim_v, dtype=dtype)
        )

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> DenseWeight:
        return DenseWeight(weight.contiguous(), bias)

    def linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        return F.linear(x, weight.weight, weight.bias)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table.index_select(0, token_ids)

    def embedding_of_linear(self, token_ids: Tensor, weight: DenseWeight) -> Tensor:
        return weight.weight.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
        return (x32 * inverse).mul_(weight).to(x.dtype)

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_and_mul(self, x: Tensor, approximate: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate=approximate) * up

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x32 = x.float()
        centred = x32 - x32.mean(-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True).add_(eps))
        scaled = (centred * inverse).mul_(weight)
        return (scaled if bias is None else scaled.add_(bias)).to(x.dtype)

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        rotate = _rotate_pairs if interleaved else _rotate_halves
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
        kv_cache.k.flatten(0, 1).index_copy_(0, slot_mapping, k.to(kv_cache.k.dtype))
        kv_cache.v.flatten(0, 1).index_copy_(0, slot_mapping, v.to(kv_cache.v.dtype))

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
        return paged_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap, sinks)

    def copy_blocks(self, src: KVCache, dst: KVCache, pairs: Tensor) -> None:
        source, target = pairs.long().unbind(1)
        # The gather makes a copy first, so that a block may be the source of one pair and the target of another.
        dst.k[target] = src.k[source]
        dst.v[target] = src.v[source]

    def export_block(self, kv_caches: list[KVCache], block_id: int) -> bytes:
        return b"".join(
            part[block_id].contiguous().view(torch.uint8).numpy().tobytes() for cache in kv_caches for part in cache
        )

    def import_block(self, kv_caches: list[KVCache], block_id: int, data: bytes) -> None:
        blocks = [part[block_id] for cache in kv_caches for part in cache]
        size = sum(block.nbytes for block in blocks)
        if len(data) != size:
            raise InvalidInput(f"a block takes {size} bytes but {len(data)} were given; they belong to another model")
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for block, part in zip(blocks, raw.split([block.nbytes for block in blocks]), strict=True):
            block.copy_(part.clone().view(block.dtype).view(block.shape))

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sample(logits, batch)

    def process_logits(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return process_logits(logits, batch)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(dim=-1)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + half]) of x [T, H, D]; cos and sin [T, 1, half]."""
    half = cos.shape[-1]
    x32 = x.float()
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    out = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return out.to(x.dtype)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[2 i], x[2 i + 1]) of x [T, H, D]; cos and sin [T, 1, half]."""
    x32, rotated = x.float(), 2 * cos.shape[-1]
    first, second = x32[..., 0:rotated:2], x32[..., 1:rotated:2]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((pairs, x32[..., rotated:]), dim=-1).to(x.dtype)
