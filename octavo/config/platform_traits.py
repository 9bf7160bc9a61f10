"""What the plan must know of the platform that will compute, as plain data: so it can be made without the platform."""

from collections.abc import Mapping
from dataclasses import dataclass, field

PACKED_GROUP_BYTES = {8: 34, 4: 20}
"""Bits -> bytes of 32 weights with a scale, and in 4 bits a minimum, in float16."""


@dataclass(frozen=True, kw_only=True)
class WorkspaceTraits:
    """What one step takes besides activations."""

    scores_at_once: int
    """Attention scores, of all heads, that are kept together at most."""
    score_bytes: int
    """Bytes a score: the score itself, and what is made of it."""
    gathers_kv: bool
    """Whether the K and V of one request are copied out of their blocks, in float32."""
    sampling_bytes: int
    """Bytes per sampled row and vocabulary entry at the peak: logits, probabilities and their filters."""


@dataclass(frozen=True, kw_only=True)
class PlatformTraits:
    """One platform, for one checkpoint."""

    name: str
    auto_dtype: tuple[str, str]
    """What dtype "auto" means, and why."""
    kv_cache_dtypes: tuple[str, ...]
    workspace: WorkspaceTraits
    head_size_multiple: int = 1
    """What the head sizes of its attention are multiples of."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Kind of layer -> the kernel that computes it."""
    kernels_reason: str = ""
    """Why these kernels."""
    weight_bits: tuple[int, ...] = ()
    """Bits of weights that there are kernels for: 8, 4. What comes in others is dequantised."""
    weight_group_bytes: Mapping[int, int] = field(default_factory=lambda: dict(PACKED_GROUP_BYTES))
    """Those bits -> bytes that 32 packed weights take, their scale and minimum among them."""
