"""The two ends of a model, split by vocabulary: token embedding and LM head, which may be one table (tied)."""

import torch
from torch import Tensor

from octavo.layers.context import LayerContext
from octavo.loader.weights import WeightSlot
from octavo.logging import get_logger
from octavo.ops.interface import PackedWeight

logger = get_logger(__name__)


class _VocabShard:
    """Rows rank * S .. (rank + 1) * S of a [vocab_size, hidden] table; rows beyond the vocabulary are 0."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        self.shape = (vocab_size, hidden_size)
        rows = -(-vocab_size // ctx.size)
        self.first = ctx.rank * rows
        self.count = max(0, min(rows, vocab_size - self.first))
        self.table: Tensor | None = torch.empty(rows, hidden_size, dtype=ctx.dtype)

    def load(self, tensor: Tensor) -> None:
        assert self.table is not None, "load() comes before packing"
        self.table[: self.count].copy_(tensor[self.first : self.first + self.count])
        self.table[self.count :] = 0


class VocabParallelEmbedding:
    """token ids [T] -> [T, hidden]; each process looks up the ids of its shard and the sum is everybody's."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        self.ctx = ctx
        self._shard = _VocabShard(ctx, vocab_size, hidden_size)
        self._packed: PackedWeight = None

    def has_table(self, table: Tensor) -> bool:
        """Whether this process's rows are equal to `table`."""
        return torch.equal(table, self._table())

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {f"{prefix}.weight": WeightSlot(self._shard.shape, self._shard.load)}

    def pack_as_head(self) -> PackedWeight:
        """The table as the weight of a linear layer. From then on the packed form is the only one."""
        self._packed = self.ctx.platform.pack_linear(self._table(), None)
        self._shard.table = None
        return self._packed

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.ctx.size == 1:
            return self._look_up(token_ids)
        local = token_ids - self._shard.first
        absent = (local < 0) | (local >= self._shard.count)
        rows = self._look_up(local.masked_fill(absent, 0))
        return self.ctx.group.all_reduce(rows.masked_fill(absent.unsqueeze(1), 0))

    def _table(self) -> Tensor:
        assert self._shard.table is not None, "the table was packed"
        return self._shard.table

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._packed is not None:
            return self.ctx.platform.embedding_of_linear(token_ids, self._packed)
        return self.ctx.platform.embedding(token_ids, self._table())


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

    def _load(self, tensor: Tensor) -> None:
        self._shard.load(tensor)
        self._loaded = True

    def finish(self) -> None:
        """Decide which table is the head and pack it. The embedding must be loaded."""
        table = self._shard.table
        assert table is not None, "finish() is called once"
        if self._tied_to is not None and (not self._loaded or self._tied_to.has_table(table)):
            self._packed = self._tied_to.pack_as_head()
        else:
            if self._tied_to is not None:
                logger.warning(
                    "tie_word_embeddings is set but lm_head.weight differs from the embedding: the file's head is used"
                )
            self._packed = self.ctx.platform.pack_linear(table, None)
        del self._shard

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.ctx.group.all_gather(self.ctx.platform.linear(hidden, self._packed))
        return logits[:, : self._vocab_size].float()
