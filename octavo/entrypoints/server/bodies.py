"""From the bytes of a request to a checked body, and how a body is documented.

What holds: nothing a client sends makes the event loop wait: bytes beyond a few thousand are parsed and checked in a
thread, and how many there may be is the middleware's matter. Only JSON that says it is JSON is read: a web page of
another origin cannot send that without asking first.
"""

import asyncio
import codecs
import re
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.entrypoints.server.errors import ApiError, ClientGone, named_field
from octavo.entrypoints.server.schema.common import Body, RequestBody, validate_body
from octavo.entrypoints.server.state import ServerState
from octavo.errors import printable

INLINE_BYTES = 16 * 1024
"""Up to this length parsing takes less than a hand-over to a thread is worth."""


_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
"""Those whose bytes are UTF-8."""


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The request's body, parsed and checked.

    Raises:
        InvalidInput: a field is refused. `request.state.fields` then has the names the message may be about.
        ApiError: it is no JSON.
        ClientGone: the client went away before it was whole.
    """
    request.state.fields = frozenset((*kind.model_fields, *kind.not_built))
    _check_content_type(request.headers.get("content-type"))
    _check_content_encoding(request.headers.get("content-encoding"))
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    if len(data) <= INLINE_BYTES:
        body = _parse(data, kind)
    else:
        state: ServerState = request.app.state.server
        body = await asyncio.get_running_loop().run_in_executor(state.parser, _parse, data, kind)
    request.state.fields = body.field_names()
    return body


def _check_content_type(content_type: str | None) -> None:
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"content-type {printable(kind, 80) or '(none)'} is not taken; send the body as application/json",
            code="unsupported_media_type",
        )
    charset = re.search(r""";\s*charset\s*=\s*"?([^";\s]*)""", content_type or "", re.IGNORECASE)
    if charset is not None and charset[1].lower() not in _CHARSETS:
        raise ApiError(
            415,
            f"charset {printable(charset[1], 80) or '(none)'} is not taken; send the body in UTF-8",
            code="unsupported_media_type",
        )


def _check_content_encoding(encoding: str | None) -> None:
    if (encoding or "identity").strip().lower() != "identity":
        raise ApiError(
            415,
            f"content-encoding {printable(encoding or '', 80)} is not taken; send the body as it is",
            code="unsupported_media_type",
        )


def _parse(data: bytes, kind: type[Body]) -> Body:
    try:
        parsed = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8))
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; no request needs that", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        reason = _reason(data) or str(error)
        message = f"the body is no valid JSON: {printable(reason)}; check it and send it again"
        raise ApiError(400, message, named_field(reason, kind.model_fields), "invalid_json") from None
    return validate_body(kind, parsed)


def _reason(data: bytes) -> str:
    """What the parser says of it in other words, or does not see."""
    if not data:
        return "it is empty"
    try:
        is_utf8 = b"\0" not in data[:4] and bool(data.decode())
    except UnicodeDecodeError:
        is_utf8 = False
    if not is_utf8:
        return "it is not in UTF-8"
    if (found := _NO_NUMBER.search(data[:_LONGEST_LOOK])) is not None:
        return f"{found[1].decode()}={found[2].decode()} is no number of JSON"
    return "it holds a lone surrogate, which is no character" if _has_lone_surrogate(data) else ""


_NO_NUMBER = re.compile(rb"""[{,]\s*"(\w{1,40})"\s*:\s*(-?Infinity|NaN)\s*[,}]""")
_LONGEST_LOOK = 2**20
"""Bytes."""


def _has_lone_surrogate(data: bytes) -> bool:
    """Whether an escape stands for half a character; the parser says something else then."""
    pair, half = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}", rb"\\u[dD][89a-fA-F]"
    return re.search(half, re.sub(pair, b"", data)) is not None


def json_body(kind: type[RequestBody]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is of this kind."""
    _documented.add(kind)
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def body_schemas() -> dict[str, Any]:
    """JSON schemas of all bodies of routes, by name."""
    schemas: dict[str, Any] = {}
    for kind in sorted(_documented, key=lambda kind: kind.__name__):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return schemas


_documented: set[type[RequestBody]] = set()
