"""Shapes of the answers of /v1/chat/completions: plain dicts, for the documentation and for those who write them."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from octavo.entrypoints.server.schema.responses import PromptLogprob, Timings, Usage


class TopLogprob(TypedDict):
    """One of the most probable tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]
    """The token's own; part of a character where it ends inside one."""


class TokenLogprob(TopLogprob):
    """The chosen token at a position, and the most probable ones there in order."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """An entry a token."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """An answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    timings: NotRequired[Timings]
    warnings: NotRequired[list[str]]


class AssistantDelta(TypedDict):
    """What is new in the message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    index: int
    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """One event of a stream. The first one of an index has its role, the last one its finish_reason."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    timings: NotRequired[Timings]
    warnings: NotRequired[list[str]]
