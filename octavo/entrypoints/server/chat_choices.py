"""Choices of a chat completion, in the format of /v1/chat/completions: messages, deltas, log-probabilities.

What holds: every number is finite, and the bytes of a choice's tokens, joined, are its text, also where a token ends
inside a character. In a stream the first piece of a choice has the role, and only the last one a finish_reason.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from octavo.entrypoints.server.completion_choices import format_prompt_logprobs
from octavo.entrypoints.server.errors import ApiError
from octavo.entrypoints.server.schema.chat import ChatCompletionRequest
from octavo.entrypoints.server.schema.chat_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
)
from octavo.entrypoints.server.schema.responses import finite
from octavo.protocol.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.tokenization.token_bytes import TokenBytes
from octavo.tokenization.tokenizer import Tokenizer

INLINE_ENTRIES = 1000
"""Up to so many log-probabilities writing takes less than a hand-over to a thread is worth."""


class ChatWriter:
    """Writes the choices of one answer, whole or in pieces."""

    def __init__(self, body: ChatCompletionRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._token_bytes = _token_bytes(tokenizer)
        self._begun: set[int] = set()
        self._prompt_was_shown = False

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """What the answer shows of the prompt, once."""
        if self._prompt_was_shown:
            return {}
        self._prompt_was_shown = True
        shown: dict[str, Any] = {}
        if self._body.return_token_ids:
            shown["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            shown["prompt_logprobs"] = format_prompt_logprobs(output.prompt_logprobs)
        return shown

    def choice(self, completion: CompletionOutput) -> ChatChoice:
        """A whole one. Raises ApiError if the sample was ended because it could not go on."""
        _check_ending(completion)
        choice: ChatChoice = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason or "",
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def pieces(self, completion: CompletionOutput) -> Iterator[ChatChunkChoice]:
        """What is new of one. Raises ApiError as `choice` does."""
        if completion.index not in self._begun:
            self._begun.add(completion.index)
            yield {
                "index": completion.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        _check_ending(completion)
        piece: ChatChunkChoice = {
            "index": completion.index,
            "delta": {"content": completion.text} if completion.text else {},
            "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason,
        }
        if self._body.return_token_ids:
            piece["token_ids"] = completion.token_ids
        if completion.finish_reason is not None:
            piece["stop_reason"] = completion.stop_reason
        yield piece

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None or not self._body.logprobs:
            return None
        return format_chat_logprobs(
            completion.logprobs,
            self._body.num_top_logprobs,
            self._token_bytes,
            as_ids=self._body.return_tokens_as_token_ids,
        )


def format_chat_logprobs(
    positions: Iterable[Mapping[int, Logprob]], num_top: int, token_bytes: Mapping[int, bytes], *, as_ids: bool = False
) -> ChatLogprobs:
    """`logprobs` of a choice.

    Args:
        positions: as in `CompletionOutput.logprobs`: the chosen token first.
        num_top: entries of `top_logprobs` at each position; -1: all there are.
        token_bytes: of each token.
        as_ids: show token_id:N instead of the tokens' texts.
    """

    def entry(token_id: int, found: Logprob) -> TopLogprob:
        return {
            "token": f"token_id:{token_id}" if as_ids else found.decoded_token or "",
            "logprob": finite(found.logprob),
            "bytes": list(token_bytes[token_id]),
        }

    def position_entry(position: Mapping[int, Logprob]) -> TokenLogprob:
        chosen = next(iter(position.items()))
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)  # of equal ranks the chosen one leads
        top = [entry(*item) for item in (ranked if num_top < 0 else ranked[:num_top])]
        return {**entry(*chosen), "top_logprobs": top}

    return {"content": [position_entry(position) for position in positions], "refusal": None}


def num_logprob_entries(output: RequestOutput) -> int:
    """How much there is to write beside the text."""
    positions = [position for completion in output.outputs for position in completion.logprobs or ()]
    return sum(map(len, positions)) + sum(len(position or ()) for position in output.prompt_logprobs or ())


@lru_cache(maxsize=4)
def _token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


def _check_ending(completion: CompletionOutput) -> None:
    if completion.finish_reason == "abort" and isinstance(completion.stop_reason, str):
        raise ApiError(400, completion.stop_reason, code="request_failed")
