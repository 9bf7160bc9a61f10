"""`octavo bench rival-env`: an environment of its own for an engine that `octavo bench compare` measures."""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

from octavo.bench.children import ChildFailed, run_command
from octavo.bench.rivals import RIVALS, RivalKind
from octavo.config.command_line import parse_arguments
from octavo.errors import InvalidInput, short_repr

RivalName = Literal["transformers", "llama-cpp", "openvino"]


@dataclass(frozen=True, kw_only=True)
class RivalEnvArgs:
    """Make a virtual environment with another engine in it and print what to give to `octavo bench compare`.

    pip and its settings (PIP_INDEX_URL, pip.conf) are used as they are. llama-cpp is compiled there, which takes
    minutes and a C++ compiler; CMAKE_ARGS reaches its build.
    """

    rival: tyro.conf.Positional[RivalName]
    """Which engine."""
    folder: tyro.conf.Positional[str]
    """Where; a folder that is not there yet, or one that this command made."""
    jobs: int = 2
    """Compilers at once."""


def run(argv: Sequence[str]) -> int:
    """Make it, check that it imports, print the option."""
    args = parse_arguments(RivalEnvArgs, "octavo bench rival-env", argv)
    if args.jobs < 1:
        raise InvalidInput(f"jobs={args.jobs} must be at least 1")
    folder, rival = Path(args.folder), RIVALS[args.rival]
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise InvalidInput(f"folder={short_repr(args.folder, 200)} is there and no virtual environment; give a new one")
    python = make(folder, rival, args.jobs)
    found = subprocess.run([python, "-c", f"import {rival.module}"], capture_output=True, text=True)
    if found.returncode:
        raise InvalidInput(f"{rival.module} was installed in {folder} and cannot be imported: {found.stderr[-500:]}")
    print(f"--env {args.rival}={folder}")
    return 0


def make(folder: Path, rival: RivalKind, jobs: int) -> str:
    """The environment's Python, once everything is installed."""
    python = interpreter(folder)
    if not Path(python).exists():
        try:
            venv.create(folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InvalidInput(f"folder={folder} cannot be made an environment: {error}") from error
    environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    installed = [package.format(torch=version("torch").split("+")[0]) for package in rival.packages]
    for package in tqdm(installed, desc="installing", delay=2, disable=None, leave=False):
        try:
            run_command([python, "-m", "pip", "install", package], environment)
        except ChildFailed as error:
            raise InvalidInput(f"pip cannot install {package}: {error}") from error
    return python


def python_of(place: Path) -> str:
    """The interpreter of an environment's folder; a file is taken as it is."""
    return interpreter(place) if place.is_dir() else str(place)


def interpreter(folder: Path) -> str:
    """Where an environment has it, or will have."""
    return str(folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
