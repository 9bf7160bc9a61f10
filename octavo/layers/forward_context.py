"""What a forward pass needs besides its input tokens: one immutable value, handed down; there is no global state."""

from dataclasses import dataclass

from torch import Tensor

from octavo.ops.interface import AttentionMetadata, KVCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's positions and KV access. T tokens in this step."""

    positions: Tensor
    """[T] int64: position of each token in its own request."""
    attention: AttentionMetadata
    kv_caches: list[KVCache]
    """One a layer."""
