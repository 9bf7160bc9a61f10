"""What the reference platform is, as plain data. Needs no torch.

ReferencePlatform answers from here, so that a plan made without torch and the engine cannot differ.
"""

from importlib.metadata import version

from octavo.config.platform_traits import PlatformTraits, WorkspaceTraits

NAME = "reference"
KV_CACHE_DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("linear", "embedding", "norm", "rope", "attention", "sample")
KERNELS_REASON = "plain torch, which every other platform is checked against"
MAX_SCORES = 1 << 24
"""Attention scores of one chunk of queries, all heads together, at most."""
# probabilities are float64, scores have weights and a mask beside them
WORKSPACE = WorkspaceTraits(scores_at_once=MAX_SCORES, score_bytes=12, gathers_kv=True, sampling_bytes=40)


def default_dtype(checkpoint_dtype: str) -> tuple[str, str]:
    """See `Platform.default_dtype`."""
    return "float32", f"the reference operators are fastest in float32 (checkpoint: {checkpoint_dtype})"


def kernel_report() -> dict[str, str]:
    """See `Platform.kernel_report`."""
    return dict.fromkeys(KINDS, f"reference (torch {version('torch')})")


def platform_traits(checkpoint_dtype: str) -> PlatformTraits:
    """What `ReferencePlatform().traits(checkpoint_dtype)` is."""
    return PlatformTraits(
        name=NAME,
        auto_dtype=default_dtype(checkpoint_dtype),
        kv_cache_dtypes=KV_CACHE_DTYPES,
        workspace=WORKSPACE,
        kernels=kernel_report(),
        kernels_reason=KERNELS_REASON,
    )
