"""RMSNorm, alone and fused with the residual addition before it."""

import torch
from torch import Tensor

from octavo.layers.context import LayerContext
from octavo.loader.weights import LoadedTensor, WeightSlot


class RMSNorm:
    """Root-mean-square norm over the last dim (Zhang & Sennrich 2019). Held whole by every process."""

    def __init__(self, ctx: LayerContext, size: int, eps: float) -> None:
        self._platform = ctx.platform
        self._weight = torch.empty(size, dtype=ctx.activation_dtype)
        self._eps = eps

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {f"{prefix}.weight": WeightSlot(tuple(self._weight.shape), self._load)}

    def _load(self, tensor: LoadedTensor) -> None:
        assert isinstance(tensor, Tensor), "only matrices come in few bits"
        self._weight.copy_(tensor)

    def finish(self) -> None:
        """Nothing to pack."""

    def __call__(self, x: Tensor) -> Tensor:
        """norm(x), [T, hidden]."""
        return self._platform.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); None: nothing was added up yet."""
        if residual is None:
            return self._platform.rms_norm(x, self._weight, self._eps), x
        return self._platform.fused_add_rms_norm(x, residual, self._weight, self._eps)
