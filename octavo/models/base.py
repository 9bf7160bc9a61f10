"""What the worker asks of a model."""

from abc import ABC, abstractmethod

from torch import Tensor

from octavo.config.model import ModelConfig
from octavo.layers.context import LayerContext
from octavo.layers.forward_context import ForwardContext
from octavo.loader.weights import WeightSlot
from octavo.protocol.kv_cache_spec import KVCacheSpec


class CausalLM(ABC):
    """A decoder-only transformer. Built empty; `load_weights(model.slots(), ...)`, then `finish()`, then forward.

    Each row of the outputs is a function of its own request only.
    """

    @abstractmethod
    def __init__(self, config: ModelConfig, ctx: LayerContext, max_model_len: int) -> None:
        """max_model_len: positions are below this.

        Raises:
            InvalidInput: the config asks for something this architecture or this machine cannot do.
        """

    @abstractmethod
    def slots(self) -> dict[str, WeightSlot]:
        """Where each checkpoint tensor goes, by its Hugging Face name."""

    @abstractmethod
    def finish(self) -> None:
        """Pack the loaded weights. Called once, after loading."""

    @abstractmethod
    def kv_cache_specs(self, kv_dtype: str) -> list[KVCacheSpec]:
        """What each attention layer of this process keeps, in the order of `ForwardContext.kv_caches`."""

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64 -> [T, hidden] in the model's dtype, in memory of the caller's own."""

    @abstractmethod
    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden], what `embed` gives -> hidden states [T, hidden]; the KV of these tokens is written."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> logits [S, vocab] float32."""
