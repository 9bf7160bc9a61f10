"""The client side of an OpenAI-compatible stream, with the time of every piece. Costs little, so that the server is
measured and not the client.
"""

import asyncio
import json
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools

from octavo.errors import InvalidInput, describe, printable, short_repr

_CHUNK = 1 << 16
_LONGEST_ERROR = 200
_GET_SECONDS = 30


@dataclass(slots=True)
class Answer:
    """What came back for one request. Times are seconds."""

    started: float = 0.0
    """After the start of the measurement."""
    ttft: float | None = None
    """From sending, with the making of the connection, to the first piece of text."""
    itls: list[float] = field(default_factory=list)
    """From each piece to the next; a piece is one token, seldom more."""
    latency: float = 0.0
    """From sending to the end of the stream."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server says in its usage; else the pieces that came."""
    cached_tokens: int = 0
    error: str | None = None
    """Why there is no whole answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    url: SplitResult
    headers: tuple[tuple[str, str], ...]
    timeout: float
    tls: ssl.SSLContext | None

    @property
    def host(self) -> str:
        return self.url.hostname or ""

    @property
    def port(self) -> int:
        return self.url.port or (443 if self.url.scheme == "https" else 80)


def make_target(base_url: str, api_key: str | None, timeout: float) -> Target:
    """Raises InvalidInput for what is no URL of a server. A trailing /v1 is taken off: endpoints begin with it."""
    try:
        url = urlsplit(base_url)
        whole = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        url, whole = urlsplit(""), False
    if not whole or url.query or url.fragment or url.username is not None:
        shown = short_repr(base_url, 200) if "@" not in base_url else "the URL"
        raise InvalidInput(f"base_url={shown} must be like http://127.0.0.1:8000, without user, query or fragment")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
        raise InvalidInput("OPENAI_API_KEY holds no key that can be sent; set it to printable ASCII characters, or not")
    path = url.path.rstrip("/").removesuffix("/v1")
    headers = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
    tls = ssl.create_default_context() if url.scheme == "https" else None
    return Target(url._replace(path=path), headers, timeout, tls)


def get_json(target: Target, path: str) -> Any:
    """The answer to a GET. Raises InvalidInput when there is none."""
    url = target.url._replace(path=target.url.path + path).geturl()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=dict(target.headers)), timeout=_GET_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise InvalidInput(f"{url} answers {error.code} {error.reason}; check base_url, and OPENAI_API_KEY") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{url} gives no answer: {describe(error, _LONGEST_ERROR)}; is a server there?") from error


def first_model(target: Target) -> str:
    """The name of the first model a server lists."""
    listed = get_json(target, "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise InvalidInput("the server lists no model under /v1/models; give its name as model") from error


async def stream(target: Target, path: str, body: dict[str, Any], started: float) -> Answer:
    """Send one request on a connection of its own and read its stream to the end. Errors are in the answer."""
    answer = Answer(started=started)
    reading = _Reading(answer)
    try:
        async with asyncio.timeout(target.timeout):
            await _exchange(target, path, body, reading)
        reading.check_end()
    except TimeoutError:
        answer.error = f"no end after {target.timeout:g} s"
    except (OSError, httptools.HttpParserError, asyncio.IncompleteReadError) as error:
        answer.error = answer.error or describe(error, _LONGEST_ERROR)
    answer.latency = time.perf_counter() - reading.sent
    return answer


async def _exchange(target: Target, path: str, body: dict[str, Any], reading: "_Reading") -> None:
    data = json.dumps(body).encode()
    fields = (
        ("host", target.url.netloc), ("content-type", "application/json"), ("content-length", str(len(data))),
        ("connection", "close"), *target.headers,
    )  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
    try:
        writer.write(f"POST {target.url.path}{path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        await writer.drain()
        parser = httptools.HttpResponseParser(reading)
        reading.parser = parser
        while not reading.complete and (chunk := await reader.read(_CHUNK)):
            parser.feed_data(chunk)
    finally:
        writer.close()


class _Reading:
    """Callbacks of the parser: bytes to events, events to times."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.sent = time.perf_counter()
        self.parser: Any = None
        self.complete = False
        self._pending = b""
        self._last: float | None = None
        self._pieces = 0
        self._done = False

    def on_body(self, data: bytes) -> None:
        if self.parser.get_status_code() != 200:
            self._pending = (self._pending + data)[:2000]
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self.complete = True

    def check_end(self) -> None:
        """Say what is wrong with an answer whose bytes have ended."""
        answer = self.answer
        status = self.parser.get_status_code() if self.parser is not None else 0
        if status and status != 200:
            answer.error = f"HTTP {status}: {_message(self._pending)}"
        elif answer.error is None and not self._done:
            answer.error = "the stream ended before its [DONE]"
        elif answer.error is None and answer.ttft is None and not answer.output_tokens:
            answer.error = "the answer is empty"
        answer.output_tokens = answer.output_tokens or self._pieces

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.answer.error = f"an event is not JSON: {printable(data.decode(errors='replace'), 80)}"
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self.answer.error = f"error in the stream: {_message(data)}"
        if isinstance(event.get("usage"), dict):
            self._usage(event["usage"])
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            self._piece(time.perf_counter())

    def _piece(self, now: float) -> None:
        self._pieces += 1
        if self._last is None:
            self.answer.ttft = now - self.sent
        else:
            self.answer.itls.append(now - self._last)
        self._last = now

    def _usage(self, usage: dict[str, Any]) -> None:
        self.answer.prompt_tokens = usage.get("prompt_tokens") or 0
        self.answer.output_tokens = usage.get("completion_tokens") or 0
        self.answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _has_text(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


def _message(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return printable(" ".join(str(text).split()), _LONGEST_ERROR)
