"""The README's examples for curl and for the openai package run as they are printed, against a server at port 8000."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fetch_models import NotAvailable, fetch
from http_driver import RunningServer, read_events, running_server

README = Path(__file__).parents[2] / "README.md"
SECTION = README.read_text(encoding="utf-8").split("## Serve it over HTTP\n")[1].split("\n## ")[0]
COMMANDS = re.findall(r"```bash\n(curl .*?)```", SECTION, flags=re.DOTALL)
SCRIPTS = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
PORT = 8000
"""Of the examples."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def readme_server(tiny_chat_model: str) -> Iterator[RunningServer]:
    """Serves the README's model under its name, or a tiny one if that cannot be had."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            pytest.skip(f"port {PORT}, which the README's examples use, is taken")
    try:
        model = str(fetch("smollm2"))
    except NotAvailable:
        model = tiny_chat_model
    flags = ("--port", str(PORT), "--served-model-name", "smollm2", "--num-kv-blocks", "128", "--max-model-len", "512")
    with running_server(model, *flags) as server:
        yield server


def run(*command: str) -> str:
    """What it prints; fails if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_has_examples_of_both_kinds():
    assert len(COMMANDS) >= 4
    assert SCRIPTS


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_curl_example_is_answered(readme_server, number):
    command = COMMANDS[number]
    printed = run("bash", "-ec", command)
    if "/metrics" in command:
        assert "octavo_num_requests_running" in printed
    elif '"stream": true' in command:
        assert read_events(printed)[-1] == ("", "[DONE]")
        assert '"choices":[]' in printed
        assert "warnings" not in printed
    else:
        answer = json.loads(printed)
        assert "error" not in answer, answer
        assert not answer.get("warnings"), answer
        assert answer.get("choices") or answer.get("tokens")


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_python_example_prints_an_answer(readme_server, number, tmp_path):
    pytest.importorskip("openai", reason="the openai package is not installed")
    script = tmp_path / "example.py"
    script.write_text(SCRIPTS[number], encoding="utf-8")
    assert run(sys.executable, str(script)).strip()


def test_every_flag_of_the_readme_exists():
    shown = subprocess.run(
        [sys.executable, "-m", "octavo.entrypoints.server", "--help"], capture_output=True, text=True, timeout=100
    ).stdout
    named = set(re.findall(r"`(--[a-z-]+)", SECTION)) - {"--help"}
    assert {flag for flag in named if flag not in shown} == set()


def test_every_endpoint_of_the_readme_is_served(server):
    (paragraph,) = re.findall(r"\*\*Endpoints\.\*\*(.*?)Besides", SECTION, flags=re.DOTALL)
    named = set(re.findall(r"`(/[a-z_0-9/-]+)`", paragraph)) - {"/docs"}
    served = set(server.client.get("/openapi.json").json()["paths"])
    assert named <= served
    assert served - named <= {"/v1/models/{name}"}
