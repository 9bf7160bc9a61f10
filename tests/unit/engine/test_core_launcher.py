"""Where a core's server runs: the folder of its sockets, and how its end is told."""

import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from octavo.engine.core_launcher import CoreProcess
from octavo.errors import InvalidInput


@pytest.fixture(autouse=True)
def short_temp_dir(monkeypatch, tmp_path_factory):
    tmp_path_factory.getbasetemp()  # pytest's own folder must not lie in the one that goes away
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_the_sockets_are_in_a_folder_that_only_this_user_may_enter(short_temp_dir):
    process = CoreProcess()
    (folder,) = short_temp_dir.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert process.inbox != process.outbox
    for address in (process.inbox, process.outbox):
        assert address.startswith(f"ipc://{folder}/")
    assert process.stop(1)
    assert not folder.exists()


def test_a_temporary_folder_too_deep_for_a_socket_is_gone_round(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    process = CoreProcess()
    assert len(process.outbox.removeprefix("ipc://")) < 100
    process.stop(1)
    assert list(deep.iterdir()) == []
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/tmp")
    with pytest.raises(InvalidInput, match="TMPDIR"):
        CoreProcess()


def start_instead(program: str, monkeypatch, folder: Path) -> tuple[CoreProcess, list[str]]:
    """Start a process that runs `program` in place of the core's server; and where its end is told."""
    module = folder / "octavo" / "engine" / "core_process.py"
    module.parent.mkdir(parents=True)
    for package in (module.parent, module.parent.parent):
        (package / "__init__.py").touch()
    module.write_text(program)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    process, ends = CoreProcess(), []
    process.start(ends.append)
    return process, ends


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "signal 15"),
    ],
)
def test_an_end_is_told_with_its_cause(monkeypatch, tmp_path, program, told):
    process, ends = start_instead(program, monkeypatch, tmp_path)
    assert process.stop(60)
    assert len(ends) == 1
    assert told in ends[0]
    assert str(process.pid) in ends[0]


def test_a_process_that_does_not_end_when_told_is_killed(monkeypatch, tmp_path):
    process, ends = start_instead("import time; time.sleep(60)", monkeypatch, tmp_path)
    assert process.stop(0.1)
    assert "SIGKILL" in ends[0]
