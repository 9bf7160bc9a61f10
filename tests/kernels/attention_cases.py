"""What the attention kernel tests share: ragged batches over a poisoned, guarded cache, and attention in float64.

Every byte of a cache that no token was written to is 0xff, which is NaN in each dtype (in 8 bits: a NaN scale), and a
guard block lies on either side of it.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from octavo.ops.interface import AttentionMetadata, KVCache
from octavo.protocol.kv_cache_spec import KVCacheSpec

native = pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")
from octavo.ops.cpu import attention  # noqa: E402

ISAS = native.supported_isas()
DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")
NO_BLOCK = 2**30


@dataclass
class Shape:
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 3
    dk: int = 16
    dv: int = 24
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def num_heads(self):
        return self.num_kv_heads * self.group


def poisoned_cache(shape, num_blocks):
    """(cache, base): the cache is all of `base` but its first and last block."""
    spec = KVCacheSpec(num_kv_heads=shape.num_kv_heads, head_dim_k=shape.dk, head_dim_v=shape.dv, dtype=shape.dtype)
    base = attention.allocate_kv_cache(spec, num_blocks + 2, shape.block_size)
    for part in base:
        part.view(torch.uint8).fill_(0xFF)
    return KVCache(base.k[1:-1], base.v[1:-1]), base


def assert_guards_intact(base):
    for part in base:
        for guard in (part[0], part[-1]):
            assert (guard.contiguous().view(torch.uint8) == 0xFF).all()


def stored(x, dtype):
    """x [..., D] float32 as the cache gives it back, in float64."""
    if dtype == "fp8":
        scale = x.abs().amax(-1, keepdim=True) / 448
        return ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).double()
    if dtype != "int8":
        return x.to(getattr(torch, dtype)).double()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return ((x / scale).round().clamp(-127, 127) * scale).double()


@dataclass
class World:
    """Requests of given lengths with the KV of all their tokens in the cache, in blocks of random order.

    shared[r] = (other, n): the first n tokens, whole blocks, of request r are those of another, in the same blocks
    if `reuse`, else in blocks of its own.
    """

    shape: Shape
    lengths: list[int]
    seed: int = 0
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)
    reuse: bool = True

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        s = self.shape
        self.q = [torch.randn(n, s.num_heads, s.dk, generator=generator) for n in self.lengths]
        self.k = [torch.randn(n, s.num_kv_heads, s.dk, generator=generator) for n in self.lengths]
        self.v = [torch.randn(n, s.num_kv_heads, s.dv, generator=generator) for n in self.lengths]
        self.sinks = torch.randn(s.num_heads, generator=generator) * 3 if s.has_sinks else None
        self.scale = 1 / math.sqrt(s.dk)
        for row, (other, n) in self.shared.items():
            self.k[row][:n], self.v[row][:n] = self.k[other][:n], self.v[other][:n]
        counts = [-(-n // s.block_size) for n in self.lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(self.seed + 1)).tolist()
        self.num_blocks = len(order)
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        if self.reuse:
            for row, (other, n) in self.shared.items():
                count = n // s.block_size
                self.blocks[row][:count] = self.blocks[other][:count]
        self.cache, self.base = poisoned_cache(s, self.num_blocks)
        for row, n in enumerate(self.lengths):
            if n:
                attention.write_kv(self.k[row], self.v[row], self.cache, self.slots(row, 0, n))

    def slots(self, row, begin, end):
        positions = torch.arange(begin, end)
        blocks = torch.tensor(self.blocks[row] + [0])[positions // self.shape.block_size]
        return blocks * self.shape.block_size + positions % self.shape.block_size

    def metadata(self, step):
        """step: (request, tokens computed before, tokens of the step) each."""
        width = max([len(self.blocks[row]) for row, _, _ in step], default=0) + 1
        tables = torch.full((len(step), width), NO_BLOCK, dtype=torch.int32)
        for i, (row, begin, n) in enumerate(step):
            used = self.blocks[row][: -(-(begin + n) // self.shape.block_size)]
            tables[i, : len(used)] = torch.tensor(used, dtype=torch.int32)
        counts = torch.tensor([0] + [n for _, _, n in step])
        return AttentionMetadata(
            block_tables=tables,
            query_start_loc=counts.cumsum(0).int(),
            seq_lens=torch.tensor([begin + n for _, begin, n in step], dtype=torch.int32),
            slot_mapping=torch.empty(0, dtype=torch.int64),
        )

    def attend(self, step, metadata=None):
        """Outputs [n, H, dv] of each entry of the step."""
        s = self.shape
        q = torch.cat([self.q[row][begin : begin + n] for row, begin, n in step] or [torch.empty(0, s.num_heads, s.dk)])
        metadata = metadata or self.metadata(step)
        out = attention.paged_attention(q, self.cache, metadata, self.scale, s.window, s.soft_cap, self.sinks)
        assert_guards_intact(self.base)
        return out.split([n for _, _, n in step])

    def one_by_one(self, row, begin, n):
        return torch.cat([self.attend([(row, p, 1)])[0] for p in range(begin, begin + n)])

    def expected(self, row, begin, n):
        s = self.shape
        k, v = (stored(x[row][: begin + n], s.dtype).transpose(0, 1) for x in (self.k, self.v))
        q = self.q[row][begin : begin + n].double().view(n, s.num_kv_heads, s.group, s.dk)
        scores = torch.einsum("nghd,gkd->nghk", q, k) * self.scale
        if s.soft_cap is not None:
            scores = s.soft_cap * torch.tanh(scores / s.soft_cap)
        distance = torch.arange(begin, begin + n).unsqueeze(1) - torch.arange(begin + n)
        hidden = distance < 0
        if s.window is not None:
            hidden |= distance >= s.window
        scores.masked_fill_(hidden.view(n, 1, 1, -1), -math.inf)
        if self.sinks is not None:
            column = self.sinks.double().view(1, s.num_kv_heads, s.group, 1).expand(n, -1, -1, -1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : begin + n]
        return torch.einsum("nghk,gkd->nghd", weights, v).reshape(n, s.num_heads, s.dv)


def chunks_of(total, cuts):
    """(begin, n) of the pieces that `cuts` leave of 0 .. total."""
    edges = sorted({0, total, *(cut for cut in cuts if 0 < cut < total)})
    return [(a, b - a) for a, b in pairwise(edges)]


@pytest.fixture(autouse=True)
def kernels_as_before():
    isa, threads = native.isa(), native.num_threads()
    yield
    native.use_isa(isa)
    native.set_num_threads(threads)
