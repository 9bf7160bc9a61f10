"""Server-sent events: a stream of JSON chunks, an error event if it fails, `data: [DONE]` if it does not.

What holds: the first chunk is there before the status line is sent, so what is refused by then gets a proper status.
Each send waits until the client has taken what came before, so a slow reader holds a few chunks here at most; what
comes meanwhile is merged in the engine's stream. Whatever ends the stream closes its source at once.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.server.errors import ApiError, ClientGone, from_exception

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def encode_event(data: Mapping[str, Any]) -> bytes:
    """One event of a stream, as bytes."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def encode_error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + msgspec.json.encode(error.body()) + b"\n\n"


class JsonResponse(Response):
    """A JSON answer out of plain data. Faster than the framework's."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EventStream(Response):
    """The answer that `stream_events` makes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[BaseException], ApiError],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone as gone:
            self._on_error(gone)
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        chunk = self._first
        try:
            while True:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await anext(self._events)
        except StopAsyncIteration:
            last = DONE
        except Exception as error:
            last = encode_error_event(self._on_error(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def stream_events(
    request: Request, events: AsyncGenerator[bytes, None], on_error: Callable[[BaseException], ApiError] | None = None
) -> Response:
    """Wait for the first event and make the answer that sends it and the rest.

    Args:
        events: encoded events; without the error event and [DONE], which are added. It is closed in every case.
        on_error: what the client is told of an error in mid-stream; also called, for the record, with `ClientGone`.

    Raises:
        whatever `events` raises before the first event; ClientGone: the client went away before it.
    """
    try:
        first = await unless_gone(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, on_error or from_exception)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    The request's body must have been read.

    Raises:
        ClientGone: it went away.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
