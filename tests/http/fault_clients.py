"""Clients for the tests of faults: many at once, each on a connection of its own, over plain sockets."""

import asyncio
import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from http_driver import RunningServer, read_events

ANSWER_SECONDS = 120.0
PATH = "/v1/completions"


@dataclass
class Answer:
    """What came of one request."""

    status: int
    headers: dict[str, str]
    text: str
    seconds: float = 0.0
    """From the request to the answer's end."""
    events: list[tuple[str, str]] = field(default_factory=list)
    """Of a stream."""

    @property
    def is_complete(self) -> bool:
        """Whether it is a whole answer, streamed or not, and no error."""
        return self.status == 200 and (not self.events or self.events[-1] == ("", "[DONE]"))

    @property
    def error(self) -> dict[str, Any]:
        """The error that it ends with."""
        if self.events:
            name, data = self.events[-1]
            assert name == "error", self.text[-300:]
            return json.loads(data)["error"]
        return json.loads(self.text)["error"]


def request_bytes(body: dict[str, Any], path: str = PATH) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + data


def address(server: RunningServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


async def ask(server: RunningServer, body: dict[str, Any], begun: asyncio.Event | None = None) -> Answer:
    """The answer to one request. Fails if there is none. `begun` is set when its first bytes come."""
    started = time.monotonic()
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(request_bytes(body))
        data = await reader.read(1 << 16)
        if begun is not None:
            begun.set()
        data += await reader.read()
        writer.close()
    return _parse(data, time.monotonic() - started)


def ask_all(server: RunningServer, bodies: Iterable[dict[str, Any]]) -> list[Answer]:
    """All at once."""

    async def run() -> list[Answer]:
        return await asyncio.gather(*(ask(server, body) for body in bodies))

    return asyncio.run(run())


async def vanish(server: RunningServer, body: dict[str, Any], rng: random.Random, longest: float) -> None:
    """Go away at a random moment: inside the request, before the answer, or in its middle."""
    reader, writer = await asyncio.open_connection(*address(server))
    data = request_bytes(body)
    writer.write(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
    try:
        async with asyncio.timeout(rng.uniform(0, longest)):
            await reader.read()
    except (TimeoutError, ConnectionError):
        pass
    writer.transport.abort()


def _parse(data: bytes, seconds: float) -> Answer:
    head, _, rest = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    assert status_line.startswith("HTTP/1.1 "), f"no answer: {data[:200]!r}"
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = _dechunk(rest)
    else:
        assert len(rest) == int(headers["content-length"]), "the answer is cut off"
    text = rest.decode()
    events = read_events(text) if headers["content-type"].startswith("text/event-stream") else []
    return Answer(int(status_line.split()[1]), headers, text, seconds, events)


def _dechunk(data: bytes) -> bytes:
    pieces = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(pieces)
        pieces.append(data[:length])
        data = data[length + 2 :]
    raise AssertionError("the answer is cut off")


def wait_for(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def assert_nothing_is_left(server: RunningServer, seconds: float = 120.0) -> None:
    """No request is held anywhere, and every block of the KV cache is free or evictable."""
    wait_for(lambda: set(server.client.get("/load").json().values()) == {0}, seconds, "requests are left")
    wait_for(lambda: server.client.get("/server_info").json()["stats"]["num_running"] == 0, seconds, "the core goes on")
    info = server.client.get("/server_info").json()
    stats = info["stats"]
    assert (stats["num_running"], stats["num_waiting"], stats["kv_blocks_in_use"]) == (0, 0, 0)
    assert stats["kv_blocks_free"] + stats["kv_blocks_cached"] == stats["kv_blocks_total"]
    assert info["kv_cache_audit"] == "ok"
