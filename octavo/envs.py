"""Every environment variable Octavo reads, in one place. Each is read when asked for, never at import."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """OCTAVO_CACHE: where downloaded models are kept (default: ~/.cache/octavo)."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo")


def logging_level() -> str:
    """OCTAVO_LOGGING_LEVEL: level of the `octavo` logger: DEBUG, INFO (default), WARNING, ERROR."""
    return os.environ.get("OCTAVO_LOGGING_LEVEL", "INFO").upper()


def log_interval() -> float:
    """OCTAVO_LOG_INTERVAL: seconds between two statistics lines under load (default 5)."""
    return float(os.environ.get("OCTAVO_LOG_INTERVAL", "5"))
