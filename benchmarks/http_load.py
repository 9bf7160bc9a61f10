"""For the benchmarks over HTTP: a server in a process of its own, and clients that cost little.

The clients speak just enough HTTP/1.1 and count events instead of parsing them, so that what is measured is the
server. Run them in a process of their own, as `stream_all` is meant to be.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READY = re.compile(r"ready: .* at http://(\S+):(\d+)")
START_SECONDS = 600.0
_LAST_BYTES = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Server:
    """A server on a free port of 127.0.0.1, ready. `flags` are those of `octavo serve`."""

    def __init__(self, model: str, *flags: str) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by `close`
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "octavo.entrypoints.server", "--model", model, "--host", "127.0.0.1",
                "--port", "0", "--dev-endpoints", "--disable-log-stats", "--disable-log-requests", *flags,
            ],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env={**os.environ, "OCTAVO_LOGGING_LEVEL": "INFO"},  # the log says where it listens
        )  # fmt: skip
        self.host, self.port = self._wait_until_ready()
        self.core_pid: int = self.get("/server_info")["core_pid"]

    def get(self, path: str) -> Any:
        """The JSON answer to a GET."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=60) as response:
            return json.load(response)

    def cpu_seconds(self) -> float:
        """Of the process that speaks HTTP, so far. The engine core is another."""
        return cpu_seconds(self.process.pid)

    def _wait_until_ready(self) -> tuple[str, int]:
        deadline = time.monotonic() + START_SECONDS
        while (found := READY.search(self.log())) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{self.log()}")
            time.sleep(0.1)
        return found.group(1), int(found.group(2))

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


@contextmanager
def running_server(model: str, *flags: str) -> Iterator[Server]:
    server = Server(model, *flags)
    try:
        yield server
    finally:
        server.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from Linux's /proc."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client(asyncio.Protocol):
    """One connection, on which one request follows another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        self._head = b""
        self.num_events = 0
        """Of the answer that is read, [DONE] included."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if len(self._head) < 12:
            self._head += data[:200]
        self.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-200:]
        if self._done is not None and not self._done.done():
            if self._tail.endswith(_LAST_BYTES):
                self._done.set_result(None)
            elif self._is_refused() or b"event: error" in self._tail:
                self._done.set_exception(RuntimeError(repr(self._tail)))

    def _is_refused(self) -> bool:
        return len(self._head) >= 12 and b" 200" not in self._head[:12]

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the connection ended; last: {self._tail!r}"))

    async def stream(self, path: str, body: bytes) -> int:
        """Send a request whose answer is a stream, and read it to its end; returns its number of events."""
        assert self._transport is not None
        self._tail = self._head = b""
        self.num_events = 0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(post(path, body) + body)
        await self._done
        return self.num_events - 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def post(path: str, body: bytes) -> bytes:
    """The head of a request."""
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


def stream_all(host: str, port: int, path: str, bodies: list[bytes], num_clients: int) -> tuple[float, int]:
    """Let so many clients take the requests one after the other.

    Returns:
        Seconds until the last one's end, and the events that came.
    """
    return asyncio.run(_stream_all(host, port, path, bodies, num_clients))


async def _stream_all(host: str, port: int, path: str, bodies: list[bytes], num_clients: int) -> tuple[float, int]:
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, host, port))[1] for _ in range(num_clients)]
    waiting = iter(bodies)

    async def work(client: Client) -> int:
        return sum([await client.stream(path, body) for body in waiting])

    started = time.perf_counter()
    num_events = sum(await asyncio.gather(*map(work, clients)))
    seconds = time.perf_counter() - started
    for client in clients:
        client.close()
    return seconds, num_events
