"""Messages between the front end and the engine core. Plain data: each can cross a process border as msgpack."""

import enum

import msgspec

from octavo.protocol.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class EngineCoreRequest(msgspec.Struct, kw_only=True):
    """A validated request: everything the core needs to serve it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """`seed` is never None here; `max_tokens` is never None and fits the room left."""
    eos_token_ids: list[int] = []
    """Every end-of-sequence id of the model; empty when the request ignores them."""
    arrival_time: float
    """`time.monotonic()` seconds."""
    priority: int = 0
    """Lower is served first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""


class TokenLogprobs(msgspec.Struct):
    """Log-probabilities at one output position: the sampled token first, then the top ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int
    """Rank of `token_ids[0]` in the vocabulary, 1 the most probable. The entries after it have ranks 1, 2, 3, ..."""


class RequestTimings(msgspec.Struct, kw_only=True):
    """When a request reached each phase, `time.monotonic()` seconds; 0 means not yet."""

    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class EngineCoreOutput(msgspec.Struct, kw_only=True):
    """What one step added to one request."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a new token, if the request asked for them."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The id out of `stop_token_ids` that ended the request."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timings: RequestTimings
