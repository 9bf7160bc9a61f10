"""What the cpu platform is, as plain data: which kernels run here, and what they take. Needs no torch.

CpuPlatform answers from here, so that a plan made without torch and the engine cannot differ.
"""

from octavo import envs
from octavo.config.platform_traits import PlatformTraits, WorkspaceTraits
from octavo.errors import InvalidInput
from octavo.ops.cpu import _native

NAME = "cpu"
KV_CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")
WEIGHT_BITS = (8, 4)
HEAD_SIZE_MULTIPLE = 8
KINDS = ("linear", "embedding", "norm", "rope", "attention", "sample")
# attention keeps results of partitions, never more than these; sampling works on the logits as they are
WORKSPACE = WorkspaceTraits(scores_at_once=2**22, score_bytes=4, gathers_kv=False, sampling_bytes=8)
_KEPT_AS_STORED = ("bfloat16", "float16")


def chosen_isa() -> tuple[str, str]:
    """(instruction set, reason): the widest that this build and this machine have, or the one OCTAVO_CPU_ISA names.

    Raises:
        InvalidInput: OCTAVO_CPU_ISA names one that cannot run here.
    """
    wanted, supported = envs.cpu_isa(), _native.supported_isas()
    if wanted is None:
        return supported[0], f"the widest this machine and this build have of {', '.join(supported)}"
    if wanted not in supported:
        raise InvalidInput(f"OCTAVO_CPU_ISA={wanted!r} cannot run here; this machine has {', '.join(supported)}")
    return wanted, f"OCTAVO_CPU_ISA={wanted}"


def default_dtype(isa: str, checkpoint_dtype: str) -> tuple[str, str]:
    """See `Platform.default_dtype`."""
    if checkpoint_dtype == "float32":
        return "float32", f"the checkpoint's own; with bfloat16 the {isa} kernels would read half as much"
    if checkpoint_dtype in _KEPT_AS_STORED:
        return checkpoint_dtype, f"the checkpoint's own, which the {isa} kernels compute in float32"
    return "bfloat16", f"half of what float32 reads, computed in float32 by the {isa} kernels"


def kernel_report(isa: str) -> dict[str, str]:
    """See `Platform.kernel_report`."""
    return dict.fromkeys(KINDS, f"cpu ({isa})")


def platform_traits(checkpoint_dtype: str) -> PlatformTraits:
    """What `CpuPlatform().traits(checkpoint_dtype)` is."""
    isa, reason = chosen_isa()
    return PlatformTraits(
        name=NAME,
        auto_dtype=default_dtype(isa, checkpoint_dtype),
        kv_cache_dtypes=KV_CACHE_DTYPES,
        workspace=WORKSPACE,
        head_size_multiple=HEAD_SIZE_MULTIPLE,
        kernels=kernel_report(isa),
        kernels_reason=reason,
        weight_bits=WEIGHT_BITS,
    )
