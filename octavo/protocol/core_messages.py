"""Messages between the front end of an AsyncLLM and the server of its engine core. Each crosses a socket as msgpack.

A request and what comes of it are in `messages`; here is what carries them, and the life of the core around them.
"""

import enum
from typing import TypeAlias

import msgspec

from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest
from octavo.protocol.stats import EngineStats


class StartEngine(msgspec.Struct, kw_only=True, tag=True):
    """The first message: build the core."""

    config: msgspec.Raw
    """The EngineConfig, as msgpack."""
    vocab_size: int
    """Tokens the tokenizer knows."""
    heartbeat_interval: float
    """Seconds between two `Heartbeat`s."""


class AddRequest(msgspec.Struct, tag=True):
    request: EngineCoreRequest


class AbortRequests(msgspec.Struct, tag=True):
    """End these. Each gets a last output, unless it has ended; unknown ids are ignored."""

    request_ids: list[str]


class CoreMethod(enum.Enum):
    STATS = "stats"
    AUDIT = "audit"
    RESET_PREFIX_CACHE = "reset_prefix_cache"


class CoreCall(msgspec.Struct, kw_only=True, tag=True):
    """A question to the core; answered between two steps, after every message sent before it was followed."""

    call_id: int
    method: CoreMethod


class Shutdown(msgspec.Struct, tag=True):
    """Free everything and end."""


ToCore: TypeAlias = StartEngine | AddRequest | AbortRequests | CoreCall | Shutdown


class EngineReady(msgspec.Struct, kw_only=True, tag=True):
    """The model is loaded."""

    stats: EngineStats
    kernels: dict[str, str]
    """Kernel name of each kind of layer."""


class EngineFailed(msgspec.Struct, kw_only=True, tag=True):
    """The core could not be built, or cannot go on. The last message; the core then waits for `Shutdown`."""

    message: str
    is_invalid_input: bool
    """What the user gave is the reason: raise InvalidInput."""


class RequestFailure(msgspec.Struct, kw_only=True):
    """A request, or one of its samples, that ended with an error instead of a last output."""

    request_id: str
    message: str
    is_invalid_input: bool


class StepOutputs(msgspec.Struct, kw_only=True, tag=True):
    """What one turn of the core's loop came to: its messages followed and, if anything was to do, one step."""

    outputs: list[EngineCoreOutput]
    stats: EngineStats
    failures: list[RequestFailure] = []
    first_scheduled: list[str] = []
    """Requests that the step computed anything of for the first time: they have left the queue."""


class CallResult(msgspec.Struct, kw_only=True, tag=True):
    """The answer to a `CoreCall`."""

    call_id: int
    value: EngineStats | bool | None = None
    error: str | None = None
    """AUDIT: what is off."""


class Heartbeat(msgspec.Struct, kw_only=True, tag=True):
    """Sent at a fixed interval from a thread of its own, whatever the core computes."""

    seconds_in_step: float
    """How long the step in progress has been running; 0 if there is none."""


FromCore: TypeAlias = EngineReady | EngineFailed | StepOutputs | CallResult | Heartbeat
