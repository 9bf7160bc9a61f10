"""Environments for other engines: what is installed, and what is refused."""

import sys
from pathlib import Path

import pytest

from octavo.bench import rival_env
from octavo.bench.rivals import RIVALS
from octavo.entrypoints.cli.main import main


@pytest.fixture
def installed(monkeypatch):
    """What pip was asked for; nothing is downloaded."""
    commands = []
    monkeypatch.setattr(rival_env, "run_command", lambda command, environment: commands.append((command, environment)))
    return commands


def test_an_environment_is_made_and_its_option_printed(tmp_path, installed, monkeypatch, capsys):
    monkeypatch.setitem(rival_env.RIVALS, "openvino", RIVALS["openvino"]._replace(module="json"))
    folder = tmp_path / "env"
    assert main(["bench", "rival-env", "openvino", str(folder), "--jobs", "3"]) == 0
    assert capsys.readouterr().out == f"--env openvino={folder}\n"
    ((command, environment),) = installed
    assert command[0] == rival_env.python_of(folder) and Path(command[0]).exists()
    assert command[1:] == ["-m", "pip", "install", "openvino-genai"]
    assert environment["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"


def test_the_torch_of_an_environment_is_the_one_that_is_here(tmp_path, installed, monkeypatch):
    monkeypatch.setattr(rival_env.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(rival_env, "version", lambda _: "2.9.1+cpu")
    rival_env.make(tmp_path, RIVALS["transformers"], 1)
    assert installed[0][0][-1] == "torch==2.9.1"


def test_what_cannot_be_imported_after_all_is_said(tmp_path, installed, capsys):
    assert main(["bench", "rival-env", "openvino", str(tmp_path / "env")]) == 2
    assert "No module named 'openvino_genai'" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path, installed, capsys):
    assert main(["bench", "rival-env", "openvino", str(tmp_path)]) == 2
    assert "no virtual environment" in capsys.readouterr().err and not installed


def test_a_file_is_taken_for_an_interpreter():
    assert rival_env.python_of(Path(sys.executable)) == sys.executable
