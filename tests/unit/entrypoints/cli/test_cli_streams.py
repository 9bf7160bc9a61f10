"""Closed, full and vanished standard streams, and the signal to end."""

import os
import signal
import subprocess
import sys
import time

import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
OCTAVO = f"{sys.executable} -m octavo.entrypoints.cli.main"
FAKE = (
    "import sys, time\nfrom octavo.entrypoints.cli import main as m\n"
    "class fake:\n    @staticmethod\n    def run(argv):\n        {}\n"
    "m.import_module = lambda name: fake\nsys.exit(m.main(['pull']))"
)


def shell(command):
    return subprocess.run(["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("what", ["--help", "pull --list", "generate --help"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_failure(what, closed):
    result = shell(f"{OCTAVO} {what} {closed}")
    assert (result.returncode, result.stderr) == (0, "")


def test_an_error_never_goes_to_stdout():
    result = shell(f"{OCTAVO} generate --model /nope hi 2>&-")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


def test_a_file_opened_later_does_not_take_the_place_of_a_closed_stream(tmp_path):
    code = FAKE.format(f"f = open({str(tmp_path / 'f')!r}, 'w'); print('text', flush=True); f.close()")
    (tmp_path / "run.py").write_text(code)
    assert shell(f"{sys.executable} {tmp_path / 'run.py'} >&-").returncode == 0
    assert (tmp_path / "f").read_text() == ""


def test_reading_from_a_closed_stdin_is_its_end(tmp_path):
    (tmp_path / "run.py").write_text(FAKE.format("print(repr(sys.stdin.read()))"))
    result = shell(f"{sys.executable} {tmp_path / 'run.py'} <&-")
    assert (result.returncode, result.stdout, result.stderr) == (0, "''\n", "")


@pytest.mark.parametrize("what", ["--help", "pull --list", "generate --help"])
def test_a_full_output_is_exit_1_and_one_paragraph(what):
    result = shell(f"{OCTAVO} {what} >/dev/full")
    assert result.returncode == 1
    assert result.stderr == "octavo: input or output failed: No space left on device\n"


def test_a_full_stderr_does_not_change_the_status():
    assert shell(f"{OCTAVO} nope 2>/dev/full").returncode == 2


def test_a_file_name_that_is_no_unicode_can_be_printed(tmp_path):
    (tmp_path / "run.py").write_text(FAKE.format("print(chr(0xdcff))"))
    result = subprocess.run(
        [sys.executable, tmp_path / "run.py"], env={**ENVIRONMENT, "PYTHONUTF8": "1"}, capture_output=True
    )
    assert (result.returncode, result.stdout) == (0, b"\xff\n")


def test_an_error_of_a_file_is_not_taken_for_one_of_the_output(tmp_path):
    (tmp_path / "run.py").write_text(FAKE.format("open('/no/such/file')"))
    assert "FileNotFoundError" in shell(f"{sys.executable} {tmp_path / 'run.py'}").stderr


def test_the_signal_to_end_runs_the_clean_up_and_is_exit_143(tmp_path):
    body = "\n        ".join(
        ("try:", "    print('started', flush=True); time.sleep(60)", "finally:", "    print('cleaned up')")
    )
    with subprocess.Popen(
        [sys.executable, "-c", FAKE.format(body)],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "started\n"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30) == ("cleaned up\n", "")
    assert process.returncode == 143
    assert time.monotonic() - started < 20
