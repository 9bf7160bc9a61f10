"""From token ids to text, one token at a time, up to where a stop ends it. Touches the tokenizer only.

What always holds:
- a character whose bytes are split over tokens appears once it is complete, never as replacement characters;
- no text once handed out is taken back: what may become a stop is held back until that is decided;
- the work per token does not grow with the length of the text (bar the copy that appends to it).
"""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from octavo.engine.stop_search import SearchBudget, StopSearch
from octavo.protocol.sampling_params import SamplingParams
from octavo.tokenization.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_BROKEN = 3
"""An incomplete UTF-8 character has at most three bytes, each shown as at most one replacement character."""
MIN_CONTEXT, MAX_CONTEXT = 6, 32
"""Tokens that come before the ones to be decoded, so that these read as they do inside a text."""
MAX_PENDING = 32
"""Tokens that may wait for the end of a character; an honest one needs four at most, unless tokens cross characters."""


class IncrementalDetokenizer:
    """Text of one request as its tokens come.

    Args:
        tokenizer: decodes.
        prompt_token_ids: what precedes the output. Its text is not part of `text`.
        params: the fields about text and stops are used.
        budget: time for the stop expressions, shared by the samples of a request. None: one of its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        budget: SearchBudget | None = None,
    ) -> None:
        self.text = ""
        """Everything decoded so far, cut where a stop string or expression was found."""
        self.num_tokens = 0
        """Output tokens taken in, up to the one that completed a stop."""
        self._stops = StopSearch(params, budget)
        self._min_tokens = params.min_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._ended = False
        self._num_handed_out = 0
        self._stream = (
            _TextStream(tokenizer, prompt_token_ids, params.skip_special_tokens) if params.detokenize else None
        )
        joined = not (params.spaces_between_special_tokens or params.skip_special_tokens)
        self._joined_tokens = _added_tokens(tokenizer) if joined else {}
        self._follows_joined = bool(prompt_token_ids) and prompt_token_ids[-1] in self._joined_tokens

    def update(self, new_token_ids: Sequence[int], stopped_by_token: bool) -> str | None:
        """Take in output tokens.

        Args:
            stopped_by_token: the last of them ended the request by itself; its text is shown only with
                `include_stop_str_in_output`.

        Returns:
            The stop string, or the pattern of the expression, that one of them completed, if any. Tokens after that
            one are not taken in.

        Raises:
            SearchTimeout: a stop expression takes too long.
        """
        last = len(new_token_ids) - 1
        for index, token_id in enumerate(new_token_ids):
            self.num_tokens += 1
            if self._stream is None or (stopped_by_token and index == last and not self._keeps_stop):
                continue
            if (stop := self._append(self._step(self._stream, token_id))) is not None:
                return stop
        return None

    def finish(self) -> str | None:
        """Nothing follows: take in the whole characters that are still pending, and hold nothing back any more.

        Returns:
            The stop that this completed, if any, as `update` does.

        Raises:
            SearchTimeout: a stop expression takes too long.
        """
        if self._ended:
            return None
        self._ended = True
        return None if self._stream is None else self._append(self._stream.flush())

    def next_text(self, delta: bool) -> str:
        """The text to hand out now: everything so far, or with `delta` only what was not handed out before."""
        end = len(self.text) if self._ended else len(self.text) - self._stops.num_held_back(self.text)
        start = self._num_handed_out if delta else 0
        self._num_handed_out = end
        return self.text[start:end]

    def _step(self, stream: "_TextStream", token_id: int) -> str:
        """The text of one more token, without the space between two added tokens if that is not wanted."""
        piece = stream.step(token_id)
        content = self._joined_tokens.get(token_id)
        if self._follows_joined and content is not None and piece == f" {content}":
            piece = content
        self._follows_joined = content is not None
        return piece

    def _append(self, piece: str) -> str | None:
        if not piece:
            return None
        start = len(self.text)
        self.text += piece
        stop = self._stops.find(self.text, start, counts=self.num_tokens > self._min_tokens)
        if stop is None:
            return None
        # An expression may look further ahead than it matches: what is out already stays.
        self.text = self.text[: max(stop.end, start) if self._keeps_stop else stop.start]
        self._ended = True
        return stop.reason


def _added_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token.content for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()}


class _TextStream:
    """The tokenizers library's decode stream, started behind a prompt and never failing.

    The stream keeps its tokens back while their text ends inside a character (`pending`). Where it starts, some tokens
    of the prompt may be pending too: their whole characters (`_shown`) and the replacement characters that stand for
    the broken one (`_num_broken`) are taken off the first piece that comes out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending: list[int] = []
        self._context: list[int] = []
        self._start_behind(prompt_token_ids)

    def step(self, token_id: int) -> str:
        """The text that became complete with this token, possibly none."""
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library raises bare Exceptions, such as "Invalid prefix encountered"
            piece = self._restart()
        if piece is not None:
            self._context, self._pending = self._pending, []
            return self._take_off_shown(piece)
        return self._settle() if len(self._pending) > MAX_PENDING else ""

    def flush(self) -> str:
        """The whole characters that are pending. Nothing may follow."""
        piece, self._pending = self._pending_text(), []
        return self._take_off_shown(piece).rstrip(REPLACEMENT)

    def _start_behind(self, token_ids: Sequence[int]) -> None:
        context, waiting = self._split_context(token_ids)
        self._stream = self._new_stream(context)
        self._context, self._pending = context, []
        self._shown, self._num_broken = "", 0
        for token_id in waiting:
            self.step(token_id)
        if self._pending:
            text = self._pending_text()
            self._shown = text.rstrip(REPLACEMENT)
            self._num_broken = len(text) - len(self._shown)

    def _split_context(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The last tokens, cut where their text last ended with a whole character: (context, tokens behind it).

        As few tokens as make a text without a broken character: behind skipped special tokens alone a SentencePiece
        space would get lost, and a start inside a character would spoil the byte tokens that follow.
        """
        for length in range(MIN_CONTEXT, MAX_CONTEXT + 1):
            tokens = list(token_ids[-length:])
            cut = self._end_of_whole_text(tokens)
            text = self._decode(tokens[:cut])
            if text and REPLACEMENT not in text:
                return tokens[:cut], tokens[cut:]
            if length >= len(token_ids):
                break
        tokens = list(token_ids[-MIN_CONTEXT:])
        cut = self._end_of_whole_text(tokens)
        return tokens[:cut], tokens[cut:]

    def _end_of_whole_text(self, token_ids: list[int]) -> int:
        """How many tokens lie before a broken character at the end; 0 if that is longer than a character can be."""
        for cut in range(len(token_ids), max(0, len(token_ids) - MIN_CONTEXT), -1):
            if not self._decode(token_ids[:cut]).endswith(REPLACEMENT):
                return cut
        return 0

    def _settle(self) -> str:
        """Hand out what is pending, but for a last character that may still become complete, and start behind it.

        Only for many tokens that are no text, or that each end inside a character: the stream would decode all of them
        again and again and hand out nothing.
        """
        text = self._pending_text()
        if not text:
            self._stream, self._pending = self._new_stream(self._context), []
            return ""
        piece = self._take_off_shown(text)
        withheld = min(len(piece) - len(piece.rstrip(REPLACEMENT)), MAX_BROKEN)
        self._start_behind(self._pending)
        self._num_broken = max(0, self._num_broken - withheld)
        return piece[: len(piece) - withheld]

    def _restart(self) -> str | None:
        """A new stream for the pending tokens, after the old one has failed."""
        self._shown, self._num_broken, self._context = "", 0, []
        self._stream = self._new_stream([])
        try:
            return self._stream.step(self._tokenizer.backend, self._pending)
        except Exception:
            self._stream = self._new_stream([])
            return ""

    def _take_off_shown(self, piece: str) -> str:
        if not self._shown and not self._num_broken:
            return piece
        piece = piece.removeprefix(self._shown)
        broken = min(self._num_broken, len(piece) - len(piece.lstrip(REPLACEMENT)))
        self._shown, self._num_broken = "", 0
        return piece[broken:]

    def _pending_text(self) -> str:
        before, whole = self._decode(self._context), self._decode(self._context + self._pending)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _new_stream(self, context: list[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
