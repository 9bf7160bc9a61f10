"""Shapes of answers: plain dicts with checked keys, for the documentation and for those who write them.

Values are never non-finite numbers: JSON has none.
"""

import math
from typing import Any, NotRequired

from typing_extensions import TypedDict

LOWEST_LOGPROB = -9999.0
"""Stands for a probability of 0."""


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(TypedDict):
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class CompletionLogprobs(TypedDict):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class Completion(TypedDict):
    """An answer, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]
    timings: NotRequired[Timings]
    warnings: NotRequired[list[str]]


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


def finite(value: float) -> float:
    """A log-probability as JSON can carry it."""
    return value if math.isfinite(value) else math.copysign(-LOWEST_LOGPROB, value) if value > 0 else LOWEST_LOGPROB


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "The request is refused."),
        (401, "No valid API key."),
        (404, "No such model."),
        (413, "The body is too long."),
        (415, "The body is no JSON."),
        (429, "Too much is waiting; see Retry-After."),
        (503, "No work is taken now; see Retry-After."),
    )
}
"""What every route that takes work may answer."""
