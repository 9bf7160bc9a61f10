"""Gate: what every HTTP request passes before a route sees it, and after.

It gives the request an id and a record, closes every route but health to those without a key, refuses new work while
the server ends, and stops a body that is too long before anything of it is parsed. Whatever a route raises becomes an
answer here. Plain ASGI: nothing is buffered. What holds: one request leaves one line in the log.
"""

import asyncio
import re
import time
import uuid
from urllib.parse import unquote

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.server.errors import CLIENT_CLOSED_REQUEST, ApiError, ClientGone, from_exception
from octavo.entrypoints.server.state import ServerState
from octavo.metrics.request_log import log_request
from octavo.metrics.request_record import RequestRecord

OPEN_PATHS = frozenset(("/health", "/health/live", "/health/ready"))
"""Answered without a key, and always."""
WATCH_PATHS = OPEN_PATHS | {"/metrics", "/version", "/load", "/server_info"}
"""Answered while the server ends, too."""
_LONGEST_PATH = 200
BODY_SECONDS = 30.0
"""How long nothing more of a body may come, before it is whole."""
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Gate:
    """ASGI middleware. Sets `request_id`, `api_key`, `record` and `fields` in the request's state."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._root_path = unquote(state.args.root_path.rstrip("/"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        path = self._take_root_off(scope)
        if path in OPEN_PATHS:
            prepare(scope, path)
            await self._app(scope, receive, send)
            return
        record = prepare(scope, path)
        started = time.monotonic()
        try:
            await self._serve(scope, receive, send, record)
        finally:
            record.e2e_seconds = time.monotonic() - started
            self._close(scope, record)

    def _take_root_off(self, scope: Scope) -> str:
        """The path of the route. A proxy may leave in what --root-path names: it is taken off here, before anything is
        decided by the path, unless a route has such a path itself."""
        path, root = get_route_path(scope), self._root_path
        if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/") and not _is_route(scope):
            scope["path"] = scope["root_path"] + path[len(root) :]
            path = get_route_path(scope)
        return path

    async def _serve(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        """Let it pass or refuse it, and answer for what a route raises."""
        started = False
        request_id = scope["state"]["request_id"].encode()

        async def send_noted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self._check(scope, record)
            await self._app(scope, _limited(receive, self._state.args.max_request_bytes), send_noted)
        except ClientGone:
            record.status, record.client_aborted = CLIENT_CLOSED_REQUEST, True
        except Exception as error:
            refusal = from_exception(error, scope["state"]["fields"])
            record.error = refusal.code or "refused"
            if refusal.status == 429:
                self._state.metrics.reject("queue_full")
            if not started:
                await refusal.response()(scope, receive, send_noted)

    def _close(self, scope: Scope, record: RequestRecord) -> None:
        """Put the record where it belongs."""
        call = scope["state"].get("call")
        if call is not None and call.close_record(record):
            self._state.metrics.observe_request(record)
            if self._state.tracer is not None:
                self._state.tracer.record(record)
        if not self._state.args.disable_log_requests and record.endpoint not in WATCH_PATHS:
            log_request(record)

    def _check(self, scope: Scope, record: RequestRecord) -> None:
        """Raise ApiError if it is not to pass."""
        headers = Headers(scope=scope)
        if self._state.key_digests:
            authorization = headers.get("authorization")
            key = self._state.find_key(None if authorization is None else authorization.encode("latin-1"))
            if key is None:
                raise ApiError(
                    401,
                    "no valid API key was shown; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope["state"]["api_key"] = key
        if self._state.is_draining and record.endpoint not in WATCH_PATHS:
            self._state.metrics.reject("draining")
            self._state.require_ready()
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._state.args.max_request_bytes:
            raise _too_long(self._state.args.max_request_bytes)


def prepare(scope: Scope, path: str) -> RequestRecord:
    """Put what routes read into the request's state."""
    headers = Headers(scope=scope)
    asked = headers.get("x-request-id", "")
    request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
    record = RequestRecord(
        request_id=request_id,
        endpoint=path[:_LONGEST_PATH],
        start_time_ns=time.time_ns(),
        trace_headers={name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
    )
    scope.setdefault("state", {}).update(request_id=request_id, api_key=None, fields=frozenset(), record=record)
    return record


def _is_route(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _limited(receive: Receive, max_bytes: int, seconds: float = BODY_SECONDS) -> Receive:
    """`receive`, raising once a body grows beyond the limit, or stops coming before it is whole.

    Its length need not have been announced. What comes after a body, its client's end, may take as long as it likes.
    """
    num_bytes, is_whole = 0, False

    async def limited() -> Message:
        nonlocal num_bytes, is_whole
        try:
            async with asyncio.timeout(None if is_whole else seconds):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408, f"nothing of the body came for {seconds:g} s; send it whole", code="request_timeout"
            ) from None
        if message["type"] == "http.request":
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise _too_long(max_bytes)
        return message

    return limited


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {max_bytes} bytes; shorten it or raise --max-request-bytes",
        code="request_too_large",
    )
