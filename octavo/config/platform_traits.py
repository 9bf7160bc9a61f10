"""What the plan must know of the platform that will compute, as plain data: so it can be made without the platform."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Kind of layer -> the kernel that computes it."""
    kernels_reason: str = ""
    """Why these kernels."""
