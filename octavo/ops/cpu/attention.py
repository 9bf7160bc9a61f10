"""KV cache, rope and paged attention of the cpu platform: cheap checks here, the work in csrc/cpu/attention.

Layout: k [num_blocks, G, Dk, block_size], so K lies transposed in its block, and v [num_blocks, G, block_size, Dv]. In
8 bits the last dim but one of k, and the last of v, has 4 more: the bytes of the block's scales, [block_size] float32 a
head, which follow that head's values.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import InvalidInput
from octavo.ops.cpu import _native, memory
from octavo.ops.cpu.traits import HEAD_SIZE_MULTIPLE
from octavo.ops.interface import DTYPES, AttentionMetadata, KVCache
from octavo.protocol.kv_cache_spec import KVCacheSpec

_BLOCK_SIZE_MULTIPLE = 8
_MAX_BLOCK_SIZE = 128
_NO_WINDOW = 2**30  # more than any context, and sums with positions stay within 32 bits
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
"""KV dtypes and their numbers in csrc/cpu/attention/attention.h."""


_EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Those with a scale for each token and head."""


class _Shape(NamedTuple):
    """What the tensors of a cache say about it."""

    num_blocks: int
    type: int
    block_size: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


def allocate_kv_cache(spec: KVCacheSpec, num_blocks: int, block_size: int) -> KVCache:
    """See `Platform.allocate_kv_cache`.

    Raises:
        InvalidInput: a head size or block size that the kernels do not have.
    """
    for head_dim in (spec.head_dim_k, spec.head_dim_v):
        if head_dim < 1 or head_dim % HEAD_SIZE_MULTIPLE:
            raise InvalidInput(f"head sizes are multiples of {HEAD_SIZE_MULTIPLE} on the cpu platform, not {head_dim}")
    if not 0 < block_size <= _MAX_BLOCK_SIZE or block_size % _BLOCK_SIZE_MULTIPLE:
        raise InvalidInput(
            f"block_size is {block_size}, and the cpu platform takes multiples of {_BLOCK_SIZE_MULTIPLE} "
            f"up to {_MAX_BLOCK_SIZE}"
        )
    dtype = _EIGHT_BITS.get(spec.dtype) or DTYPES[spec.dtype]
    scales = 4 if spec.dtype in _EIGHT_BITS else 0
    blocks = num_blocks, spec.num_kv_heads
    k, v = (*blocks, spec.head_dim_k + scales, block_size), (*blocks, block_size, spec.head_dim_v + scales)
    return KVCache(*(memory.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape) for shape in (k, v)))


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """See `Platform.rope`. q and k are left as they are."""
    return _rotated(q, positions, cos_sin, interleaved), _rotated(k, positions, cos_sin, interleaved)


def write_kv(k: Tensor, v: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
    """See `Platform.write_kv`. k and v float32."""
    _write(k, v, kv_cache, slot_mapping, (0, 0, 0, 0, 0, 0, 0, False))


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: KVCache,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """See `Platform.rope_and_write_kv`. q is rotated in place and returned; k is left as it is."""
    q = _rows(q)
    num_tokens, num_heads, head_dim = q.shape
    if q.stride(0) < num_heads * head_dim:
        q = q.clone(memory_format=torch.contiguous_format)
    if k.shape[2] != head_dim or k.shape[0] != num_tokens:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} differ in tokens or head size")
    table = _checked_table(cos_sin, positions, num_tokens, head_dim)
    _write(k, v, kv_cache, slot_mapping, (q.data_ptr(), q.stride(0), num_heads, *table, interleaved))
    return q


def paged_attention(
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `Platform.paged_attention`. q [T, H, Dk] float32 -> [T, H, Dv]; rows of no request are 0."""
    q = _rows(q)
    shape = _shape(kv_cache)
    num_tokens, num_heads, head_dim = q.shape
    if head_dim != shape.head_dim_k or num_heads % shape.num_kv_heads:
        raise ValueError(f"q {list(q.shape)} does not fit a cache of {shape}")
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
        if sinks.shape != (num_heads,):
            raise ValueError(f"sinks {list(sinks.shape)} are not one for each of {num_heads} heads")
    out = torch.empty(num_tokens, num_heads, shape.head_dim_v)
    _native.paged_attention(
        _plan(metadata, shape, num_tokens, num_heads, sliding_window),
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        kv_cache.k.data_ptr(),
        kv_cache.v.data_ptr(),
        shape.type,
        head_dim,
        scale,
        soft_cap or 0.0,
        0 if sinks is None else sinks.data_ptr(),
    )
    return out


def copy_blocks(src: KVCache, dst: KVCache, pairs: Tensor) -> None:
    """See `Platform.copy_blocks`."""
    pairs = pairs.to(torch.int64).contiguous()
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs {list(pairs.shape)} are not [P, 2]")
    for source, target in zip(src, dst, strict=True):
        if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
            raise ValueError(f"blocks of {source.dtype} {source.shape} and {target.dtype} {target.shape} differ")
        _require_contiguous(source, target)
        block_bytes = source.stride(0) * source.element_size()
        _native.copy_blocks(
            source.data_ptr(), len(source), target.data_ptr(), len(target), block_bytes, pairs.data_ptr(), len(pairs)
        )


def export_block(kv_caches: list[KVCache], block_id: int) -> bytes:
    """See `Platform.export_block`."""
    parts = (part for cache in kv_caches for part in _canonical_parts(cache, block_id))
    return b"".join(part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def import_block(kv_caches: list[KVCache], block_id: int, data: bytes) -> None:
    """See `Platform.import_block`."""
    parts = [part for cache in kv_caches for part in _canonical_parts(cache, block_id)]
    size = sum(part.nbytes for part in parts)
    if len(data) != size:
        raise InvalidInput(f"a block takes {size} bytes but {len(data)} were given; they belong to another model")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for part, piece in zip(parts, raw.split([part.nbytes for part in parts]), strict=True):
        part.copy_(piece.clone().view(part.dtype).view(part.shape))


def _canonical_parts(cache: KVCache, block_id: int) -> list[Tensor]:
    """Views of one block as [block_size, G, D], K then V; in 8 bits each with its scales after it, [block_size, G]."""
    k, v = cache.k[block_id], cache.v[block_id]
    if k.dtype not in _EIGHT_BITS.values():
        return [k.permute(2, 0, 1), v.permute(1, 0, 2)]
    num_kv_heads, head_dim_k, block_size = k.shape[0], k.shape[1] - 4, k.shape[2]
    head_dim_v = v.shape[2] - 4
    k, v = k.flatten(1), v.flatten(1)
    k_values, k_scales = k.split([head_dim_k * block_size, 4 * block_size], dim=1)
    v_values, v_scales = v.split([block_size * head_dim_v, 4 * block_size], dim=1)
    return [
        k_values.view(num_kv_heads, head_dim_k, block_size).permute(2, 0, 1),
        k_scales.view(torch.float32).t(),
        v_values.view(num_kv_heads, block_size, head_dim_v).permute(1, 0, 2),
        v_scales.view(torch.float32).t(),
    ]


def _plan(
    metadata: AttentionMetadata, shape: _Shape, num_tokens: int, num_heads: int, sliding_window: int | None
) -> _native.AttentionPlan:
    """How this step's work is split; made by the first layer of a shape, found by the others."""
    key = (shape, num_tokens, num_heads, sliding_window)
    found = metadata.plans.get(key)
    if found is not None:
        return found[0]
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}, and a token sees at least itself")
    tables, starts, lens = (
        part.to(torch.int32).contiguous()
        for part in (metadata.block_tables, metadata.query_start_loc, metadata.seq_lens)
    )
    if tables.dim() != 2 or len(tables) != len(lens) or len(starts) != len(lens) + 1:
        raise ValueError(f"{len(lens)} seq_lens, {len(starts)} query_start_loc, block_tables {list(tables.shape)}")
    plan = _native.plan_attention(
        tables.data_ptr(),
        tables.shape[1],
        starts.data_ptr(),
        lens.data_ptr(),
        len(lens),
        num_tokens,
        shape.num_blocks,
        shape.block_size,
        num_heads,
        shape.num_kv_heads,
        shape.head_dim_v,
        min(sliding_window or _NO_WINDOW, _NO_WINDOW),
    )
    metadata.plans[key] = plan, tables  # the plan points into the tables
    return plan


def plan_like(metadata: AttentionMetadata, key: tuple, num_tokens: int) -> _native.AttentionPlan:
    """The plan of this step for the layers that had the plan with `key` in another step (`AttentionMetadata.plans`)."""
    shape, _, num_heads, sliding_window = key
    return _plan(metadata, shape, num_tokens, num_heads, sliding_window)


def _shape(cache: KVCache) -> _Shape:
    k, v = cache
    num_blocks, num_kv_heads, head_dim_k, block_size = k.shape
    head_dim_v = v.shape[3]
    if v.shape[:3] != (num_blocks, num_kv_heads, block_size) or k.dtype != v.dtype:
        raise ValueError(f"k {k.dtype} {list(k.shape)} and v {v.dtype} {list(v.shape)} are not one cache")
    _require_contiguous(k, v)
    if k.dtype in _EIGHT_BITS.values():
        head_dim_k, head_dim_v = head_dim_k - 4, head_dim_v - 4
    return _Shape(num_blocks, _TYPES[k.dtype], block_size, num_kv_heads, head_dim_k, head_dim_v)


def _require_contiguous(*parts: Tensor) -> None:
    for part in parts:
        if not part.is_contiguous():
            raise ValueError(f"a cache of shape {list(part.shape)} and strides {part.stride()} is not contiguous")


def _rows(x: Tensor) -> Tensor:
    """x [T, H, D] with contiguous heads in every row, as the kernels read it. Rows may be strided."""
    if x.dtype != torch.float32:
        raise ValueError(f"activations are float32 on the cpu platform, not {x.dtype}")
    strides = x.stride()
    return x if strides[2] == 1 and strides[1] == x.shape[2] else x.contiguous()


def _checked_table(cos_sin: Tensor, positions: Tensor, num_tokens: int, head_dim: int) -> tuple[int, int, int, int]:
    """(positions, cos_sin, max_positions, rotated) for the kernels that rotate [T, heads, D]."""
    max_positions, rotated = cos_sin.shape
    if rotated % 2 or rotated > head_dim or positions.shape != (num_tokens,):
        raise ValueError(
            f"cos_sin {list(cos_sin.shape)} and positions {list(positions.shape)} do not fit {num_tokens} tokens of "
            f"head size {head_dim}"
        )
    if cos_sin.dtype != torch.float32 or positions.dtype != torch.int64:
        raise ValueError(f"cos_sin is {cos_sin.dtype} and positions {positions.dtype}, not float32 and int64")
    if not cos_sin.is_contiguous() or not positions.is_contiguous():
        raise ValueError("cos_sin and positions must be contiguous")
    return positions.data_ptr(), cos_sin.data_ptr(), max_positions, rotated


def _rotated(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    x = _rows(x)
    out = torch.empty(x.shape)
    num_tokens, num_heads, head_dim = x.shape
    table = _checked_table(cos_sin, positions, num_tokens, head_dim)
    _native.rope(x.data_ptr(), x.stride(0), out.data_ptr(), num_heads, head_dim, num_tokens, *table, interleaved)
    return out


def _write(k: Tensor, v: Tensor, kv_cache: KVCache, slot_mapping: Tensor, query: tuple) -> None:
    """query: what the native function takes for rotating q and k, zeros for neither."""
    k, v = _rows(k), _rows(v)
    shape = _shape(kv_cache)
    _, _, _, num_kv_heads, head_dim_k, head_dim_v = shape
    num_tokens = slot_mapping.shape[0]
    if k.shape != (num_tokens, num_kv_heads, head_dim_k) or v.shape != (num_tokens, num_kv_heads, head_dim_v):
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} do not fit {num_tokens} slots of a cache of {shape}")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError("slot_mapping must be int64 and contiguous")
    _native.write_kv(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        kv_cache.k.data_ptr(),
        kv_cache.v.data_ptr(),
        *shape,
        slot_mapping.data_ptr(),
        num_tokens,
        *query,
    )
