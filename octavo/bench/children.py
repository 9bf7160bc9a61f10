"""Measurements in processes of their own: what one leaves in memory, caches or threads does not meet the next."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LONGEST_TAIL = 600


class ChildFailed(Exception):
    """A measurement ended without a result; the text is the end of what it said."""


def run_module(module: str, argv: Sequence[str], path: Path) -> Any:
    """Run a module that writes a JSON file, and read that. Ends the child if it is itself interrupted.

    Raises:
        ChildFailed: there is no result.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    run_command([sys.executable, "-m", module, *argv], environment)
    return json.loads(path.read_text(encoding="utf-8"))


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program to its end.

    Raises:
        ChildFailed: it did not end well.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=environment
        ).returncode
        if status == 0:
            return
        log.seek(0)
        said = [line for line in log.read().splitlines() if line.strip() and not line.startswith("INFO ")]
    tail = " ".join(said)[-_LONGEST_TAIL:]
    raise ChildFailed(f"exit status {status}: {tail}" if tail else f"exit status {status}")


def flags(options: Any) -> list[str]:
    """The command line that gives these options (a dataclass of plain values) to a tool again."""
    found = []
    for option in dataclasses.fields(options):
        value, name = getattr(options, option.name), option.name.replace("_", "-")
        if value == option.default:
            continue
        found.append((f"--{name}" if value else f"--no-{name}") if isinstance(value, bool) else f"--{name}={value}")
    return found
