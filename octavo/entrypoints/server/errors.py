"""Every answer that is an error: its status, its headers, and the one body they all have.

    {"error": {"message", "type", "param", "code"}}

What holds: the message is one readable paragraph, and what a client did is never a 5xx.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.entrypoints.server.json_words import in_json_words
from octavo.errors import EngineDeadError, InvalidInput, Overloaded, PromptTooLong, describe, encodable
from octavo.logging import get_logger

logger = get_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What the log calls a request whose client went away. No client ever sees it."""
RETRY_SECONDS = 5
"""What a client is told to wait for a server that ends, loads or starts its core anew."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error. Routes may raise it."""

    status: int
    message: str
    param: str | None = None
    """The field of the request that it is about."""
    code: str | None = None
    """A name for programs."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The body, as it is in an answer and in an event of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": encodable(self.message), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        data = msgspec.json.encode(self.body())
        return Response(data, self.status, dict(self.headers), media_type="application/json")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def unavailable(message: str, code: str, retry_seconds: float = RETRY_SECONDS) -> ApiError:
    """503: not now, but perhaps later or elsewhere."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, round(retry_seconds)))})


def from_exception(error: BaseException, fields: Collection[str] = ()) -> ApiError:
    """The answer to whatever was raised while a request was served.

    Args:
        fields: names that the request has; the first one that a refusal mentions is its `param`.
    """
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            param = "messages" if "messages" in fields else "prompt"
            return ApiError(400, in_json_words(str(error)), param=param, code="context_length_exceeded")
        case InvalidInput():
            return ApiError(400, in_json_words(str(error)), param=named_field(str(error), fields))
        case Overloaded(retry_after=seconds):
            headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case EngineDeadError():
            return unavailable(f"the engine is not there: {error}", "engine_dead")
    logger.error("A request failed: %s", describe(error), exc_info=error)
    return ApiError(500, "the request failed inside the server, whose log says why", code="internal_error")


def from_status(status: int, detail: object, headers: Mapping[str, str] | None) -> ApiError:
    """The answer to what the web framework itself refuses, such as a path or a method."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "refused"
    text = phrase if detail in (None, phrase) else f"{phrase}: {detail}"
    return ApiError(status, text, code=phrase.lower().replace(" ", "_"), headers=dict(headers or {}))


def named_field(message: str, fields: Collection[str]) -> str | None:
    """The first word of the message that is the name of a field."""
    return next((word for word in re.findall(r"[A-Za-z_]\w*", message) if word in fields), None)
