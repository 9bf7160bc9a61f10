"""The two ends of a model, split by vocabulary: token embedding and LM head, which may be one table (tied)."""

import torch
from torch import Tensor

from octavo.layers.context import LayerContext
from octavo.loader.weights import LoadedTensor, WeightSlot
from octavo.logging import get_logger
from octavo.ops.interface import PackedWeight, Platform, QuantizedMatrix
from octavo.quantization.parts import equal, pad_rows, take_rows

logger = get_logger(__name__)


class _VocabShard:
    """Rows rank * S .. (rank + 1) * S of a [vocab_size, hidden] table; rows beyond the vocabulary are 0."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        self.shape = (vocab_size, hidden_size)
        self.rows = -(-vocab_size // ctx.size)
        self.first = ctx.rank * self.rows
        self.count = max(0, min(self.rows, vocab_size - self.first))
        self.table: Tensor | QuantizedMatrix | None = torch.empty(self.rows, hidden_size, dtype=ctx.dtype)

    def load(self, tensor: LoadedTensor) -> None:
        if isinstance(tensor, QuantizedMatrix):
            first = min(self.first, self.shape[0])  # a shard may be all padding
            self.table = pad_rows(take_rows(tensor, first, self.count), self.rows)
            return
        assert isinstance(self.table, Tensor), "load() comes before packing, and once"
        self.table[: self.count].copy_(tensor[self.first : self.first + self.count])
        self.table[self.count :] = 0

    def equals(self, other: "_VocabShard") -> bool:
        one, two = self.loaded(), other.loaded()
        if isinstance(one, QuantizedMatrix) or isinstance(two, QuantizedMatrix):
            return isinstance(one, QuantizedMatrix) and isinstance(two, QuantizedMatrix) and equal(one, two)
        return torch.equal(one, two)

    def loaded(self) -> Tensor | QuantizedMatrix:
        assert self.table is not None, "the table was packed"
        return self.table

    def pack(self, platform: Platform) -> PackedWeight:
        """The table as the weight of a linear layer. From then on the packed form is the only one."""
        table, self.table = self.loaded(), None
        if isinstance(table, QuantizedMatrix):
            return platform.pack_quantized([table], None)
        return platform.pack_linear(table, None)


class VocabParallelEmbedding:
    """token ids [T] -> [T, hidden]; each process looks up the ids of its shard and the sum is everybody's."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        self.ctx = ctx
        self._shard = _VocabShard(ctx, vocab_size, hidden_size)
        self._packed: PackedWeight = None

    def has_table(self, shard: _VocabShard) -> bool:
        """Whether this process's rows are equal to those of `shard`."""
        return self._shard.equals(shard)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {f"{prefix}.weight": WeightSlot(self._shard.shape, self._shard.load)}

    def pack_as_head(self) -> PackedWeight:
        """The table as the weight of the head; both share it."""
        self._packed = self._shard.pack(self.ctx.platform)
        return self._packed

    def finish(self) -> None:
        """Pack a table in few bits, unless it was packed as the head. One in floats is looked up as it is."""
        if self._packed is None and isinstance(self._shard.loaded(), QuantizedMatrix):
            self._packed = self._shard.pack(self.ctx.platform)

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.ctx.size == 1:
            return self._look_up(token_ids)
        local = token_ids - self._shard.first
        absent = (local < 0) | (local >= self._shard.count)
        rows = self._look_up(local.masked_fill(absent, 0))
        return self.ctx.group.all_reduce(rows.masked_fill(absent.unsqueeze(1), 0))

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._packed is not None:
            return self.ctx.platform.embedding_of_linear(token_ids, self._packed)
        table = self._shard.loaded()
        assert isinstance(table, Tensor), "finish() comes before the first use"
        return self.ctx.platform.embedding(token_ids, table)


class ParallelLMHead:
    """hidden [S, hidden] -> logits [S, vocab] float32, whole on every process.

    tied_to: the embedding whose table is the head. A checkpoint may hold a head all the same: an equal one is dropped,
    another one is used, with a warning.
    """

    def __init__(
        self, ctx: LayerContext, vocab_size: int, hidden_size: int, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        self.ctx = ctx
        self._vocab_size = vocab_size
        self._shard = _VocabShard(ctx, vocab_size, hidden_size)
        self._tied_to = tied_to
        self._loaded = False
        self._packed: PackedWeight = None

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {f"{prefix}.weight": WeightSlot(self._shard.shape, self._load, optional=self._tied_to is not None)}

    def _load(self, tensor: LoadedTensor) -> None:
        self._shard.load(tensor)
        self._loaded = True

    def finish(self) -> None:
        """Decide which table is the head and pack it. The embedding must be loaded, and not finished."""
        if self._tied_to is not None and (not self._loaded or self._tied_to.has_table(self._shard)):
            self._packed = self._tied_to.pack_as_head()
        else:
            if self._tied_to is not None:
                logger.warning(
                    "tie_word_embeddings is set but lm_head.weight differs from the embedding: the file's head is used"
                )
            self._packed = self._shard.pack(self.ctx.platform)
        del self._shard

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.ctx.group.all_gather(self.ctx.platform.linear(hidden, self._packed))
        return logits[:, : self._vocab_size].float()
