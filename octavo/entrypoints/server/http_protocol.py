"""HttpProtocol: HTTP/1.1 as uvicorn speaks it, within bounds that hold before any request is known.

What is no HTTP gets the answer that all errors have. What holds: a connection costs a bounded amount of memory and work
before a request's head is complete, and it does not stay open for ever without one. The parser joins the pieces of a
long header anew with each piece, so without a bound one client could keep the event loop busy for minutes.

A client may close its half of the connection once it has asked, and still wants its answer. On the wire this looks like
one that went away; what tells them apart is that the other end resets the connection when something more is sent to it.
So something is sent: the answer's next piece, or, before its first, the interim status 100, which every client of
HTTP/1.1 passes over.
"""

import asyncio
import re
import select
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.entrypoints.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's first line and headers together, and of trailers. One more piece off the wire may come on top."""
HEAD_SECONDS = 30.0
"""From the opening of a connection, or the first byte of a further request, to the end of its head."""


HALF_CLOSED_SECONDS = (0.02, 1.0)
"""Between two looks whether a client that has closed its half is still there: at first, and at most."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bare_bytes = 0
        """Since the last sign of progress: the end of a head, a piece of a body, the end of a message."""
        self._is_in_message = False
        """Whether the head of a message has begun and its end has not come."""
        self._is_answered = False
        """An error has been sent, and the connection is being closed."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        """Set while the client has closed its half, and is answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        if self._look_timer is not None:
            self._look_timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: there may be somebody who waits for an answer."""
        waits = self._is_answering() and not self.cycle.more_body and not self.pipeline and not self._is_answered
        if not waits or self.scheme == "https" or self.scope["http_version"] == "1.0":
            return False
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._look(HALF_CLOSED_SECONDS[0])
        return True

    def _look(self, seconds: float) -> None:
        """Close the connection once the client is gone, or has its answer."""
        if _is_dead(self.transport):
            self.transport.abort()
        elif not self._is_answering():
            self.transport.close()
        else:
            self._look_timer = self.loop.call_later(seconds, self._look, min(2 * seconds, HALF_CLOSED_SECONDS[1]))

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._bare_bytes += len(data)
        super().data_received(data if self._is_in_message else _without_upgrade(data))
        if self._bare_bytes > MAX_HEAD_BYTES:
            message = f"the head of the request is longer than {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_message = True
        self._watch_head()

    def on_headers_complete(self) -> None:
        self._unwatch_head()
        self._bare_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bare_bytes = 0
        self._is_in_message = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless another answer is under way, and close the connection."""
        if self._is_answered:
            return
        self._is_answered = True
        if not self._is_answering() or self._is_before_answer():
            body = msgspec.json.encode(error.body())
            head = f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\ncontent-type: application/json\r\n"
            head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_before_answer(self) -> bool:
        """Whether the body of the one request that is in progress is still coming, and nothing was said to it yet."""
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering():  # the next request of a pipeline may take its time
            self._watch_head()
            return
        message = f"the head of the request did not come within {HEAD_SECONDS:g} s; send it at once"
        self._refuse(ApiError(408, message, code="request_timeout"))


def _is_dead(transport: asyncio.Transport) -> bool:
    """Whether the other end has reset the connection."""
    if transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)  # errors and hang-ups are always told
    return bool(poll.poll(0))


def _without_upgrade(data: bytes) -> bytes:
    """The bytes that a head begins with, the offer to go on with another protocol renamed. A server may pass over such
    an offer, but the parser would not read the body then; some clients make one with every request."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + data[len(head) :]


_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
