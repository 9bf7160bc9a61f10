"""What `octavo doctor` may find wrong: small functions over facts. They look at nothing themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.config.memory import format_bytes

LITTLE_MEMORY = 2**30
LITTLE_DISK = 2**30


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was seen. Sizes in bytes; None: not there, or not to be had."""

    system: str
    cpu_model: str
    cpu_features: tuple[str, ...]
    """Those of the CPU's features that kernels ask for."""
    cores_online: int
    cores_used: int
    cores_source: str
    """What set cores_used: "affinity", "cgroup CPU quota" or "OMP_NUM_THREADS"."""
    cores_quota: float | None
    """Cores' worth of CPU time the cgroup allows."""
    memory_limit: int
    memory_source: str
    gpus: tuple[str, ...] = ()
    driver_cuda: str | None = None
    """Newest CUDA version the GPU's driver supports."""
    torch_cuda: str | None = None
    """CUDA version torch is built for; None: a build for the CPU."""
    platform: str = "cpu"
    platform_reason: str = ""
    native_installed: bool = True
    native_error: str | None = None
    """Why the extension cannot be loaded."""
    isas: tuple[str, ...] = ()
    """Instruction sets that the extension and this machine have, the widest first."""
    torch_error: str | None = None
    openmp: tuple[str, ...] = ()
    """Files of OpenMP runtimes in a process that has imported torch and the extension."""
    probe_error: str | None = None
    """Why that process ended before it could tell."""
    versions: dict[str, str | None] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    """Packages of `versions` that must be there."""
    compilers: dict[str, str | None] = field(default_factory=dict)
    """Tool -> its version line."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that change how Octavo computes, as far as they are set."""
    cache_dir: str = ""
    cache_writable: bool = True
    cache_free: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the way out."""

    what: str
    way_out: str


Check = Callable[[Facts], Problem | None]


def find_problems(facts: Facts) -> list[Problem]:
    """Everything that is wrong, the worst first."""
    return [problem for check in CHECKS if (problem := check(facts)) is not None]


def check_packages(facts: Facts) -> Problem | None:
    missing = [name for name in facts.required if facts.versions.get(name) is None]
    if not missing:
        return None
    names = " ".join(missing)
    return Problem(f"packages that Octavo needs are not installed: {', '.join(missing)}", f"pip install {names}")


def check_torch(facts: Facts) -> Problem | None:
    if facts.torch_error is None or facts.versions.get("torch") is None:  # a missing one is told as such
        return None
    return Problem(
        f"torch is installed but cannot be imported: {facts.torch_error}",
        "install torch again, for this Python and this machine",
    )


def check_probe(facts: Facts) -> Problem | None:
    if facts.probe_error is None:
        return None
    return Problem(
        f"a process that imports torch and the native kernels {facts.probe_error}",
        "try each alone (python -c 'import torch'; python -c 'import octavo.ops.cpu._native') and install again the "
        "one that fails",
    )


def check_native_installed(facts: Facts) -> Problem | None:
    if facts.native_installed:
        return None
    has_compiler = any(facts.compilers.get(name) for name in ("g++", "clang++", "c++"))
    first = "" if has_compiler else "there is no C++ compiler either: install g++ 11 or clang 13 or newer, then "
    return Problem(
        "this installation has no native kernels: it computes with torch, which is slower",
        f"{first}install Octavo again without OCTAVO_NATIVE=0 (in a checkout: make native)",
    )


def check_native_loads(facts: Facts) -> Problem | None:
    if not facts.native_installed or facts.native_error is None:
        return None
    return Problem(
        f"the native kernels are installed but cannot be loaded: {facts.native_error}",
        "install Octavo again (in a checkout: make native), or use --platform reference",
    )


def check_isa(facts: Facts) -> Problem | None:
    wanted = facts.environment.get("OCTAVO_CPU_ISA")
    if not facts.isas:
        return None
    if wanted and wanted not in facts.isas:
        return Problem(
            f"OCTAVO_CPU_ISA={wanted} cannot run here; this machine and this build have {', '.join(facts.isas)}",
            "unset OCTAVO_CPU_ISA, or give one of these",
        )
    if facts.isas[0] == "baseline" and {"avx2", "fma"} <= set(facts.cpu_features):
        return Problem(
            "this CPU has AVX2, but the native kernels were built without it",
            "install Octavo again with a compiler that knows AVX2: g++ 11 or clang 13 or newer",
        )
    return None


def check_openmp(facts: Facts) -> Problem | None:
    if len(facts.openmp) < 2:
        return None
    return Problem(
        f"two OpenMP runtimes are loaded together, whose threads take the cores from each other: "
        f"{', '.join(facts.openmp)}",
        "keep one: look for the package that brings the second one, and for LD_PRELOAD",
    )


def check_omp_threads(facts: Facts) -> Problem | None:
    value = facts.environment.get("OMP_NUM_THREADS")
    if value is None:
        return None
    first = value.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return Problem(f"OMP_NUM_THREADS={value} is no number of threads and is ignored", "unset it, or give a number")
    if int(first) > facts.cores_used:
        return Problem(
            f"OMP_NUM_THREADS={value} asks for more threads than the {facts.cores_used} cores this process may use",
            f"unset it, or set it to {facts.cores_used} or less",
        )
    return None


def check_quota(facts: Facts) -> Problem | None:
    if facts.cores_quota is None or facts.cores_quota >= 1:
        return None
    return Problem(
        f"the cgroup gives this process {facts.cores_quota:g} of one core: it is stopped again and again",
        "raise the CPU quota of the container to one core or more",
    )


def check_memory(facts: Facts) -> Problem | None:
    if facts.memory_limit >= LITTLE_MEMORY:
        return None
    return Problem(
        f"only {format_bytes(facts.memory_limit)} of memory are left ({facts.memory_source})",
        "end other programs or raise the container's limit; octavo plan MODEL says what a model takes",
    )


def check_driver(facts: Facts) -> Problem | None:
    have, need = _version(facts.driver_cuda), _version(facts.torch_cuda)
    # within one major version a newer toolkit runs on an older driver
    if not have or not need or have[0] >= need[0]:
        return None
    return Problem(
        f"the GPU's driver is too old: it supports CUDA {facts.driver_cuda}, torch is built for {facts.torch_cuda}",
        f"install a newer driver, or a torch that is built for CUDA {have[0]}",
    )


def check_cache(facts: Facts) -> Problem | None:
    if not facts.cache_writable:
        return Problem(
            f"the folder for models, {facts.cache_dir}, cannot be written",
            "set OCTAVO_CACHE to a folder that can be",
        )
    if facts.cache_free is not None and facts.cache_free < LITTLE_DISK:
        return Problem(
            f"only {format_bytes(facts.cache_free)} are free where models are kept, in {facts.cache_dir}",
            "free some space, or set OCTAVO_CACHE to a folder on another disk",
        )
    return None


def _version(text: str | None) -> tuple[int, ...]:
    parts = (text or "").split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


CHECKS: tuple[Check, ...] = (
    check_packages,
    check_torch,
    check_probe,
    check_native_installed,
    check_native_loads,
    check_isa,
    check_openmp,
    check_omp_threads,
    check_quota,
    check_memory,
    check_driver,
    check_cache,
)
