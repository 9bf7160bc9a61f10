"""Every environment variable Octavo reads or sets, in one place. Each is read when asked for, never at import."""

import os
from pathlib import Path

from octavo.errors import InvalidInput


def cache_dir() -> Path:
    """OCTAVO_CACHE: where downloaded models are kept (default: ~/.cache/octavo)."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo")


def logging_level() -> str:
    """OCTAVO_LOGGING_LEVEL: level of the `octavo` logger: DEBUG, INFO (default), WARNING, ERROR."""
    return os.environ.get("OCTAVO_LOGGING_LEVEL", "INFO").upper()


def log_interval() -> float:
    """OCTAVO_LOG_INTERVAL: seconds between two statistics lines under load (default 5)."""
    value = os.environ.get("OCTAVO_LOG_INTERVAL", "5")
    try:
        return float(value)
    except ValueError:
        raise InvalidInput(f"OCTAVO_LOG_INTERVAL={value!r} must be a number of seconds") from None


def bound_openmp_spin() -> None:
    """GOMP_SPINCOUNT: how long torch's OpenMP threads spin at the end of a parallel region before they sleep.

    By default they spin for milliseconds, which beside any other busy process slows everybody down many times over. A
    short spin keeps nearly all of the speed of an idle machine. Has an effect only before torch is imported; a value
    of the user's own, or OMP_WAIT_POLICY, is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def omp_num_threads() -> int | None:
    """OMP_NUM_THREADS: threads that compute at most, unless the num_threads option is given. No number: ignored."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdecimal() and int(value) > 0 else None


def cpu_isa() -> str | None:
    """OCTAVO_CPU_ISA: instruction set of the native kernels (avx512, avx2, baseline or neon); default: the best."""
    return os.environ.get("OCTAVO_CPU_ISA") or None
