"""Linear layers that know their shard: column-parallel (outputs split), row-parallel (inputs split), fused Q, K and V.

A process holds only its shard: a slot takes the whole checkpoint tensor and copies its part out. One process is the
case of size 1. A column-parallel output stays split; the row-parallel layer that follows it adds up the parts.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.layers.context import LayerContext
from octavo.loader.weights import LoadedTensor, WeightSlot
from octavo.ops.interface import PackedWeight, QuantizedMatrix
from octavo.quantization.groups import quantize
from octavo.quantization.parts import take_columns, take_rows


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a fused weight that come from one checkpoint tensor."""

    name: str
    """After the layer's prefix; empty: the prefix is the whole name."""
    full_rows: int
    """Rows of the checkpoint tensor."""
    first_row: int
    """Where this process's rows begin in it."""
    rows: int
    """How many this process holds."""


class _LinearBase:
    """Weight [N, K] and optional bias [N] of this process's shard, packed by `finish`.

    The weight is a stack of parts, each a checkpoint tensor's; those in few bits are kept as they come, the others lie
    in one float buffer.
    """

    def __init__(self, ctx: LayerContext, part_rows: Sequence[int], columns: int, bias: bool) -> None:
        self.ctx = ctx
        self._platform = ctx.platform
        self._part_rows = tuple(part_rows)
        rows = sum(part_rows)
        # Memory that is allocated but not written costs nothing, so a layer may be built before its weights are known.
        self._weight: Tensor | None = torch.empty(rows, columns, dtype=ctx.dtype)
        self._bias: Tensor | None = torch.empty(rows, dtype=ctx.activation_dtype) if bias else None
        self._few_bits: dict[int, QuantizedMatrix] = {}
        self._packed: PackedWeight = None

    def finish(self) -> None:
        """Pack the loaded weight for the platform; the raw one is given up."""
        assert self._weight is not None, "finish() is called once"
        if self._few_bits:
            self._packed = self._platform.pack_quantized(self._parts_in_few_bits(self._weight), self._bias)
        else:
            self._packed = self._platform.pack_linear(self._weight, self._bias)
        self._weight = self._bias = None
        self._few_bits.clear()

    def __call__(self, x: Tensor) -> Tensor:
        return self._platform.linear(x, self._packed)

    def _float_part(self, index: int) -> Tensor:
        """Where a part in floats goes."""
        assert self._weight is not None, "weights are loaded before finish()"
        return self._weight.split(self._part_rows)[index]

    def _parts_in_few_bits(self, weight: Tensor) -> list[QuantizedMatrix]:
        """A part in floats beside others in few bits gets 8 bits: less is lost than the others have lost already, and
        as floats all of them would take and read several times as much."""
        parts = zip(weight.split(self._part_rows), range(len(self._part_rows)), strict=True)
        with ThreadPoolExecutor(1) as pool:
            return [self._few_bits.get(index) or quantize(floats, 8, pool) for floats, index in parts]


class _FusedColumns(_LinearBase):
    """Several checkpoint tensors [N_i, K] stacked into one weight, each split by rows."""

    def __init__(self, ctx: LayerContext, in_features: int, parts: Sequence[_Part], bias: bool) -> None:
        super().__init__(ctx, [part.rows for part in parts], in_features, bias)
        self._in_features = in_features
        self._parts = tuple(parts)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {}
        for index, part in enumerate(self._parts):
            name = f"{prefix}.{part.name}" if part.name else prefix
            load = partial(self._load_weight, index, part)
            slots[f"{name}.weight"] = WeightSlot((part.full_rows, self._in_features), load)
            if self._bias is not None:
                slots[f"{name}.bias"] = WeightSlot((part.full_rows,), partial(self._load_bias, index, part))
        return slots

    def _load_weight(self, index: int, part: _Part, tensor: LoadedTensor) -> None:
        if isinstance(tensor, QuantizedMatrix):
            self._few_bits[index] = take_rows(tensor, part.first_row, part.rows)
        else:
            self._float_part(index).copy_(tensor[part.first_row : part.first_row + part.rows])

    def _load_bias(self, index: int, part: _Part, tensor: LoadedTensor) -> None:
        assert isinstance(tensor, Tensor)
        assert self._bias is not None, "slots() comes before finish()"
        self._bias.split(self._part_rows)[index].copy_(tensor[part.first_row : part.first_row + part.rows])


class ColumnParallelLinear(_FusedColumns):
    """x [T, K] -> [T, N / size]: process r computes outputs r * N / size and on."""

    def __init__(self, ctx: LayerContext, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(ctx, in_features, [_even_part(ctx, "", out_features)], bias)


class MergedColumnParallelLinear(_FusedColumns):
    """Several column-parallel layers of one input in one product: x [T, K] -> [T, sum(N_i) / size], part after part.

    parts: checkpoint name after the prefix -> N_i, such as {"gate_proj": 1536, "up_proj": 1536}.
    """

    def __init__(self, ctx: LayerContext, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(ctx, in_features, [_even_part(ctx, name, rows) for name, rows in parts.items()], bias)


def _even_part(ctx: LayerContext, name: str, full_rows: int) -> _Part:
    rows = ctx.split(full_rows, "output size of a column-parallel layer")
    return _Part(name, full_rows, ctx.rank * rows, rows)


class QKVParallelLinear(_FusedColumns):
    """Query, key and value projections in one product, split by heads: x [T, hidden] -> q, k, v.

    With fewer KV heads than processes, neighbouring processes hold copies of one KV head.
    Checkpoint names after the prefix: q_proj, k_proj, v_proj.
    """

    def __init__(
        self, ctx: LayerContext, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False
    ) -> None:
        self.num_heads = ctx.split(num_heads, "num_heads")
        self.num_kv_heads, first_kv_head = kv_heads_of_rank(ctx, num_kv_heads)
        self.head_dim = head_dim
        q_rows, kv_rows = self.num_heads * head_dim, self.num_kv_heads * head_dim
        kv_part = (num_kv_heads * head_dim, first_kv_head * head_dim, kv_rows)
        q_part = _Part("q_proj", num_heads * head_dim, ctx.rank * q_rows, q_rows)
        super().__init__(ctx, hidden_size, [q_part, _Part("k_proj", *kv_part), _Part("v_proj", *kv_part)], bias)
        self._splits = [q_rows, kv_rows, kv_rows]

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output as q [T, H, D], k [T, G, D], v [T, G, D] of this process."""
        q, k, v = qkv.split(self._splits, dim=-1)
        heads = (-1, self.head_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)


def kv_heads_of_rank(ctx: LayerContext, num_kv_heads: int) -> tuple[int, int]:
    """(how many KV heads this process holds, which is the first)."""
    if num_kv_heads >= ctx.size:
        count = ctx.split(num_kv_heads, "num_kv_heads")
        return count, ctx.rank * count
    copies = ctx.size // num_kv_heads
    if copies * num_kv_heads != ctx.size:
        ctx.split(num_kv_heads, "num_kv_heads")
    return 1, ctx.rank // copies


class RowParallelLinear(_LinearBase):
    """x [T, K / size], split as a column-parallel layer leaves it -> [T, N], whole on every process."""

    def __init__(self, ctx: LayerContext, in_features: int, out_features: int, bias: bool = False) -> None:
        columns = ctx.split(in_features, "input size of a row-parallel layer")
        # The bias may enter the sum once.
        super().__init__(ctx, [out_features], columns, bias and ctx.rank == 0)
        self._shape = (out_features, in_features)
        self._has_bias = bias
        self._first_column, self._columns = ctx.rank * columns, columns

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {f"{prefix}.weight": WeightSlot(self._shape, self._load_weight)}
        if self._has_bias:
            slots[f"{prefix}.bias"] = WeightSlot(self._shape[:1], self._load_bias)
        return slots

    def _load_weight(self, tensor: LoadedTensor) -> None:
        if isinstance(tensor, QuantizedMatrix):
            self._few_bits[0] = take_columns(tensor, self._first_column, self._columns)
        else:
            self._float_part(0).copy_(tensor[:, self._first_column : self._first_column + self._columns])

    def _load_bias(self, tensor: LoadedTensor) -> None:
        assert isinstance(tensor, Tensor)
        if self._bias is not None:
            self._bias.copy_(tensor)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ctx.group.all_reduce(self._platform.linear(x, self._packed))
