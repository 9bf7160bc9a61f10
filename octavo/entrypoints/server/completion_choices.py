"""Choices of a completion, in the format of /v1/completions: text, log-probabilities, how it ended.

One `CompletionWriter` an answer. It is fed the outputs in order, whole or in deltas, and may be used in a thread: what
many log-probabilities take to write must not hold up the event loop.
"""

import math
from collections.abc import Iterable, Iterator

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.entrypoints.server.errors import ApiError
from octavo.entrypoints.server.schema.completions import CompletionRequest
from octavo.entrypoints.server.schema.responses import CompletionChoice, CompletionLogprobs, PromptLogprob, finite
from octavo.protocol.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.tokenization.tokenizer import Tokenizer

INLINE_ENTRIES = 1000
"""Up to so many log-probabilities, or tokens of a prompt, writing takes less than a hand-over to a thread is worth."""


class CompletionWriter:
    """Writes the choices of one answer."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._prompts: dict[int, _PromptPart] = {}
        self._choices: dict[int, _ChoiceWriter] = {}

    def is_much(self, prompt_index: int, output: RequestOutput) -> bool:
        """Whether `write` of this output is better called in a thread."""
        body = self._body
        if body.logprobs is None and body.prompt_logprobs is None and not body.echo:
            return False
        width = max(_width(body.logprobs, self._tokenizer), _width(body.prompt_logprobs, self._tokenizer))
        rows = 0 if body.logprobs is None else sum(len(completion.token_ids) for completion in output.outputs)
        if prompt_index not in self._prompts and (body.echo or body.prompt_logprobs is not None):
            rows += len(output.prompt_token_ids)
        return rows * width > INLINE_ENTRIES

    def write(self, prompt_index: int, output: RequestOutput) -> Iterator[CompletionChoice]:
        """The choices of one output, or their next pieces.

        Raises:
            ApiError: a sample was ended because it could not go on.
        """
        part = self._prompts.get(prompt_index)
        if part is None:
            part = self._prompts[prompt_index] = _PromptPart(self._body, self._tokenizer, output)
        for completion in self._chosen(output):
            index = prompt_index * self._body.num_choices + completion.index
            writer = self._choices.get(index)
            if writer is None:
                writer = self._choices[index] = _ChoiceWriter(self._body, self._tokenizer, index, part)
            yield writer.write(completion)

    def _chosen(self, output: RequestOutput) -> list[CompletionOutput]:
        """All samples, or the best of them, the most probable first and with the places of the choices."""
        if self._body.best_of is None:
            return output.outputs
        ranked = sorted(output.outputs, key=lambda completion: -(completion.cumulative_logprob or 0.0))
        best = ranked[: self._body.num_choices]
        for place, completion in enumerate(best):
            completion.index = place
        return best


class _PromptPart:
    """What the choices of one prompt show of it."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, output: RequestOutput) -> None:
        tokens = output.prompt_token_ids
        skip = body.skip_special_tokens is not False
        self.token_ids = tokens
        self.logprobs = output.prompt_logprobs or []
        self.echo = ""
        self.echo_offsets: list[int] = []
        if not body.echo:
            return
        self.echo = tokenizer.decode(tokens, skip_special_tokens=skip) if output.prompt is None else output.prompt
        if body.logprobs is not None:
            offsets = _TextOffsets(tokenizer, [], skip)
            self.echo_offsets = [min(offsets.add(token), len(self.echo)) for token in tokens]


class _ChoiceWriter:
    """Writes the pieces of one choice."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, index: int, part: _PromptPart) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._index = index
        self._part = part
        self._is_first = True
        self._offsets: _TextOffsets | None = None
        if body.logprobs is not None and not body.wants_prompt_only:
            skip = body.skip_special_tokens is not False
            self._offsets = _TextOffsets(tokenizer, part.token_ids, skip, start=len(part.echo))

    def write(self, completion: CompletionOutput) -> CompletionChoice:
        if completion.finish_reason == "abort" and isinstance(completion.stop_reason, str):
            raise ApiError(400, completion.stop_reason, code="request_failed")
        hides = self._body.wants_prompt_only
        choice: CompletionChoice = {
            "index": self._index,
            "text": "" if hides else completion.text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(completion),
            "finish_reason": "length" if hides and completion.finish_reason == "stop" else completion.finish_reason,
            "stop_reason": None if hides else completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [] if hides else completion.token_ids
        if self._is_first:
            self._is_first = False
            self._add_prompt(choice)
        return choice

    def _add_prompt(self, choice: CompletionChoice) -> None:
        choice["text"] = self._part.echo + choice["text"]
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._part.token_ids
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = format_prompt_logprobs(self._part.logprobs)

    def _logprobs(self, completion: CompletionOutput) -> CompletionLogprobs:
        written: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        part = self._part
        if self._is_first and self._body.echo:
            for token, entry, offset in zip(part.token_ids, part.logprobs, part.echo_offsets, strict=False):
                self._add_position(written, token, entry, offset)
        if self._offsets is not None:
            for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=False):
                self._add_position(written, token, entry, self._offsets.add(token))
        return written

    def _add_position(
        self, written: CompletionLogprobs, token: int, entry: dict[int, Logprob] | None, offset: int
    ) -> None:
        written["text_offset"].append(offset)
        written["tokens"].append(self._text(token, None if entry is None else entry.get(token)))
        written["token_logprobs"].append(None if entry is None else finite(entry[token].logprob))
        written["top_logprobs"].append(None if entry is None else self._top(entry.items()))

    def _top(self, entries: Iterable[tuple[int, Logprob]]) -> dict[str, float]:
        """By text; of tokens with the same text, such as parts of characters, the most probable."""
        top: dict[str, float] = {}
        for token, logprob in entries:
            text = self._text(token, logprob)
            top[text] = max(top.get(text, -math.inf), finite(logprob.logprob))
        return top

    def _text(self, token: int, logprob: Logprob | None) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        known = None if logprob is None else logprob.decoded_token
        return self._tokenizer.decode_token(token) if known is None else known


class _TextOffsets:
    """Where in a text the tokens begin, as they come.

    Args:
        prompt_token_ids: what precedes them.
        start: length of the text before the first one.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: list[int], skip_special_tokens: bool, start: int = 0
    ) -> None:
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
        self._start = start

    def add(self, token_id: int) -> int:
        """Take in the next token; returns where it begins: at the first character that was not complete before."""
        offset = self._start + len(self._detokenizer.text)
        self._detokenizer.update([token_id], stopped_by_token=False)
        return offset


def format_prompt_logprobs(entries: list[dict[int, Logprob] | None]) -> list[dict[str, PromptLogprob] | None]:
    """`prompt_logprobs` as they are in an answer: one object a prompt token, by token id; the first null."""
    return [
        None if entry is None else {str(token): _format_logprob(one) for token, one in entry.items()}
        for entry in entries
    ]


def _format_logprob(logprob: Logprob) -> PromptLogprob:
    return {"logprob": finite(logprob.logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _width(num_logprobs: int | None, tokenizer: Tokenizer) -> int:
    """Entries a position."""
    if num_logprobs is None:
        return 1
    return tokenizer.vocab_size if num_logprobs < 0 else num_logprobs + 1
