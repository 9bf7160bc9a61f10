"""RequestRecord: what is remembered of one request once it has been answered. Metrics, log and trace are made of it.

Holds counts, times and reasons only: never a prompt, an answer or a key.
"""

import hashlib
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One answered request. Times are seconds; None: that phase was not reached."""

    request_id: str
    endpoint: str
    """Path of the route."""
    status: int = 200
    """HTTP status that the client was sent; of a stream that failed later, that of the failure."""
    prompt_tokens: int = 0
    """Of all its prompts."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    generation_tokens: int = 0
    """Of all its samples."""
    queue_seconds: float | None = None
    """From arrival to being first scheduled; of several prompts, the longest."""
    prefill_seconds: float | None = None
    """From first being scheduled to the first token; of several prompts, the longest."""
    decode_seconds: float | None = None
    """From the first token to the last; of several prompts, the longest."""
    e2e_seconds: float = 0.0
    """From arrival to the end of the answer."""
    time_to_first_token: float | None = None
    """From arrival to the first token of all."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of each sample that ended: stop, length, abort, ..."""
    client_aborted: bool = False
    """The client went away before the answer was complete."""
    streamed: bool = False
    tenant: str | None = None
    """Hashed, see `hash_tenant`."""
    error: str | None = None
    """Kind of the error that was answered, such as a status' name; never its message: that may quote the prompt."""
    start_time_ns: int | None = None
    """Arrival by the wall clock, nanoseconds since 1970."""
    trace_headers: dict[str, str] = field(default_factory=dict)
    """The request's W3C trace context: `traceparent` and `tracestate`, where it came with one."""


def hash_tenant(tenant: str | None) -> str | None:
    """A short name that tells tenants apart and does not give them away."""
    if tenant is None:
        return None
    return hashlib.sha256(b"octavo-tenant\0" + tenant.encode("utf-8", "surrogatepass")).hexdigest()[:12]
