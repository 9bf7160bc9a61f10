"""Messages between the front end and the engine core. Plain data: each can cross a process border as msgpack."""

import enum

import msgspec

from octavo.protocol.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def sample_request_ids(request_id: str, n: int) -> list[str]:
    """Ids of a request's samples. With n > 1 each sample is scheduled by itself, under an id of its own."""
    return [request_id] if n == 1 else [f"{index}_{request_id}" for index in range(n)]


class PromptEmbeds(msgspec.Struct, frozen=True):
    """A prompt as embeddings [num_tokens, hidden], row-major."""

    data: bytes
    dtype: str
    """float32, bfloat16 or float16."""
    shape: tuple[int, int]


class EngineCoreRequest(msgspec.Struct, kw_only=True):
    """A validated request: everything the core needs to serve it."""

    request_id: str
    prompt_token_ids: list[int]
    """Zeros that only count if the prompt is given as `prompt_embeds`."""
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
    tenant: str | None = None
    """Whom the request is for, where tenants share the engine fairly; None is one of them."""
    prompt_embeds: PromptEmbeds | None = None
    bad_words_token_ids: list[list[int]] = []
    """The token sequences that `bad_words` stand for: the last id of one may not follow the others."""
    clamps: list[str] = []
    """Receipt, see `octavo.protocol.outputs.RequestMetrics`."""
    ignored: list[str] = []


class TokenLogprobs(msgspec.Struct):
    """Log-probabilities at one position: its own token first, then the top ones in order."""

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
    """With n > 1 that of a sample, see `sample_request_ids`."""
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a new token, if the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One entry a prompt token but the first, once, with the first output token of the request."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The id out of `stop_token_ids` that ended the request."""
    error: str | None = None
    """Why the request was ended if it could not go on, through its own fault. Then `finish_reason` is ABORT."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timings: RequestTimings
