"""A server in a process of its own, for tests: started on a free port, ended by its own pid, nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 120.0
END_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"ready: .* at (\S+)")
ENDLESS = {"prompt": "abc", "max_tokens": 30_000, "ignore_eos": True, "temperature": 1.5, "seed": 1}
"""Of the endless model: it still runs whenever a test looks. Nobody waits for its end."""


class RunningServer:
    """One server process. `url` and `client` are there once it is ready."""

    def __init__(
        self, model: str, *flags: str, env: dict[str, str] | None = None, launcher: Sequence[str] = ()
    ) -> None:
        """`launcher`: words before the command, which then starts it in its own place."""
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by `close`
        self.process = subprocess.Popen(
            [
                *launcher, sys.executable, "-m", "octavo.entrypoints.server", "--model", model, "--host", "127.0.0.1",
                "--port", "0", "--dtype", "float32", "--disable-log-stats", *flags,
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OCTAVO_LOGGING_LEVEL": "INFO", **(env or {})},
        )  # fmt: skip
        self.url = ""
        self.client = httpx.Client()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """What the server has written so far."""
        position = self._log.tell()
        self._log.seek(0)
        text = self._log.read()
        self._log.seek(position)
        return text

    def wait_until_ready(self, **client_options: Any) -> "RunningServer":
        """Return once the server says that it is ready. Fails if it ends before."""
        deadline = time.monotonic() + START_SECONDS
        while (found := READY.search(self.log())) is None:
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{self.log()}"
            time.sleep(0.05)
        self.url = found.group(1)
        if self.url.startswith("http"):
            self.client = httpx.Client(base_url=self.url, timeout=60.0, **client_options)
        return self

    @property
    def is_exact(self) -> bool:
        """Whether its platform promises the same bits whatever runs beside a request. Needs --dev-endpoints."""
        kernels = self.client.get("/server_info").json()["kernels"]
        return any(name.startswith("cpu") for name in kernels.values())

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def wait(self, seconds: float = END_SECONDS) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(seconds)

    def terminate(self) -> int:
        """Tell it to end and wait for that; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not end:\n{self.log()}") from None

    def close(self) -> None:
        """End it, whatever it does."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


@contextmanager
def held_core(server: RunningServer) -> Iterator[None]:
    """Nothing is computed meanwhile, however long that takes: what runs still runs at the end, what waits still waits.

    Wants --dev-endpoints, and a --heartbeat-timeout that is longer than the test.
    """
    core_pid = server.client.get("/server_info").json()["core_pid"]
    os.kill(core_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(core_pid, signal.SIGCONT)


@contextmanager
def running_server(model: str, *flags: str, **options: Any) -> Iterator[RunningServer]:
    """A server that is ready; ended at the end."""
    server = RunningServer(model, *flags, **options)
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


def stream_chunks(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream. Fails unless it is well-formed, has no error event and ends with [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = "".join(response.iter_text())
    events = read_events(text)
    assert events[-1] == ("", "[DONE]"), text[-500:]
    assert all(name == "" for name, _ in events), text
    return [json.loads(data) for _, data in events[:-1]]


def read_events(text: str) -> list[tuple[str, str]]:
    """(event name, data) of each server-sent event."""
    events = []
    for block in text.split("\n\n"):
        if not block:
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) <= {"event", "data"}, block
        events.append((fields.get("event", ""), fields["data"]))
    return events
