"""What every test may use."""

import os
import signal

# Two OpenMP threads that spin on two busy cores slow each other down many times over; set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fetch_models import NotAvailable, fetch

# A job in the background of a shell ignores Ctrl-C, and so would whatever the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _fetched(name: str) -> Path | str:
    """The path, or why it cannot be had; asked only once a run."""
    try:
        return fetch(name)
    except NotAvailable as error:
        return str(error)


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """Path of a real model: smollm2, qwen05, or vocab (a folder); fetched when needed.

    A test skips where it cannot be had, and fails instead when OCTAVO_REQUIRE_MODELS=1.
    """

    def path_of(name: str) -> Path:
        found = _fetched(name)
        if isinstance(found, Path):
            return found
        if os.environ.get("OCTAVO_REQUIRE_MODELS") == "1":
            pytest.fail(f"{name} is required and cannot be had: {found}")
        pytest.skip(f"{name} cannot be had: {found}")

    return path_of
