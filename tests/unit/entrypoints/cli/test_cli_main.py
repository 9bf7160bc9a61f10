import os
import subprocess
import sys
import time

import pytest

import octavo
from octavo.entrypoints.cli import main as module
from octavo.entrypoints.cli.main import COMMANDS, main
from octavo.errors import EngineDeadError, InvalidInput

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
COMMAND = [sys.executable, "-m", "octavo.entrypoints.cli.main"]


@pytest.fixture
def command(monkeypatch):
    """Put a command "work" in the table whose run() is the given function."""

    def install(run):
        fake = type(sys)("fake_command")
        fake.run = run
        monkeypatch.setattr(module, "import_module", lambda name: fake)
        monkeypatch.setitem(COMMANDS, "work", module.Command("fake_command", "work"))

    return install


def raising(error: BaseException):
    def run(argv):
        raise error

    return run


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and command.help in out for name, command in COMMANDS.items())


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from octavo.entrypoints.cli.main import main; main(['--help']); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    loaded = set(result.stderr.split())
    assert "octavo" in loaded
    assert not loaded & {"torch", "numpy", "tokenizers", "gguf", "huggingface_hub", "tyro", "msgspec", "tqdm"}


def test_help_is_there_at_once():
    fastest = min(_seconds([*COMMAND, "--help"]) for _ in range(5))
    python_alone = min(_seconds([sys.executable, "-c", ""]) for _ in range(3))
    assert fastest < max(0.3, 8 * python_alone)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_does_not_wait_for_torch(name):
    script = (
        f"import sys; from octavo.entrypoints.cli.main import main\ntry: main([{name!r}, '--help'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert result.stderr.split() == ["0", "False"]
    assert f"octavo {name}" in result.stdout


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("name", ["serv", "--nonsense", ""])
def test_an_unknown_command_is_one_paragraph_and_exit_2(name, capsys):
    assert main([name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert repr(name) in err
    assert "generate" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InvalidInput("block_size=3 is\nnot supported"), 2, "octavo: block_size=3 is not supported\n"),
        (EngineDeadError("the core is gone"), 1, "octavo: the core is gone\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_a_command_raises_becomes_a_status_without_a_traceback(command, capsys, error, status, said):
    command(raising(error))
    assert main(["work"]) == status
    assert capsys.readouterr() == ("", said)


def test_a_defect_is_not_hidden(command):
    command(raising(ZeroDivisionError("a defect")))
    with pytest.raises(ZeroDivisionError):
        main(["work"])


def test_arguments_reach_the_command(command):
    seen = []
    command(lambda argv: seen.extend(argv))
    assert main(["work", "--x", "a b"]) == 0
    assert seen == ["--x", "a b"]


def test_a_reader_that_has_had_enough_is_no_failure_of_ours():
    script = (
        "import sys\nfrom octavo.entrypoints.cli import main as m\n"
        "class fake:\n    @staticmethod\n    def run(argv):\n        print('x' * 10_000_000)\n"
        "m.import_module = lambda name: fake\nsys.exit(m.main(['pull']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True)
    return time.perf_counter() - started
