"""One sample of a live request: everything generated so far, and how much of it has been handed out.

What holds: text, token ids and log-probabilities end at the token that completed a stop, whatever the core had computed
beyond; and no list handed out is changed afterwards.
"""

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.stop_search import SearchBudget, SearchTimeout
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestTimings, TokenLogprobs
from octavo.protocol.outputs import CompletionOutput, Logprob
from octavo.tokenization.tokenizer import Tokenizer


class DecodedTokens(dict[int, str]):
    """Text of single tokens. Filled when asked: `logprobs=-1` asks for the whole vocabulary at every position."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode_token(token_id)
        return text


def read_logprobs(entry: TokenLogprobs, decoded: DecodedTokens | None) -> dict[int, Logprob]:
    """One position as users read it: its own token first. `decoded` None: without texts."""
    position: dict[int, Logprob] = {}
    for index, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in position:
            rank = index or entry.sampled_rank
            position[token_id] = Logprob(logprob, rank, None if decoded is None else decoded[token_id])
    return position


class SampleState:
    """What came of one sample.

    Args:
        decoded: texts of tokens for the log-probabilities; None: without.
        budget: time for the stop expressions of all samples of the request.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        tokenizer: Tokenizer,
        decoded: DecodedTokens | None,
        budget: SearchBudget,
    ) -> None:
        params = request.sampling_params
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.timings = RequestTimings(arrival=request.arrival_time)
        self._index = index
        self._stop_reason: int | str | None = None
        known = request.prompt_token_ids if request.prompt_embeds is None else []
        self._detokenizer = IncrementalDetokenizer(tokenizer, known, params, budget) if params.detokenize else None
        self._decoded = decoded
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._num_handed_out = 0
        self._end_handed_out = False

    def append(self, output: EngineCoreOutput) -> None:
        """Take in what one step added, up to the token that completes a stop."""
        self.timings = output.timings
        self.num_preemptions = output.num_preemptions
        self.num_cached_tokens = output.num_cached_tokens
        try:
            stop = self._take_in(output)
            if stop is None and output.finish_reason is not None and self._detokenizer is not None:
                stop = self._detokenizer.finish()
        except SearchTimeout as error:
            self.end(FinishReason.ABORT, str(error))
            return
        if stop is None or output.finish_reason is FinishReason.ABORT:
            self.end(output.finish_reason, output.stop_reason if output.error is None else output.error)
        else:
            self.end(FinishReason.STOP, stop)

    def end(self, reason: FinishReason | None, stop_reason: int | str | None = None) -> None:
        """Nothing more is taken in, unless `reason` is None."""
        self.finish_reason, self._stop_reason = reason, stop_reason

    def abort(self) -> None:
        """End it from outside."""
        self.end(FinishReason.ABORT)
        if self._detokenizer is not None:
            try:
                self._detokenizer.finish()
            except SearchTimeout:
                return

    def _take_in(self, output: EngineCoreOutput) -> str | None:
        last = len(output.new_token_ids) - 1
        for index, token_id in enumerate(output.new_token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None and output.logprobs is not None:
                self._cumulative_logprob += output.logprobs[index].logprobs[0]
                self._logprobs.append(read_logprobs(output.logprobs[index], self._decoded))
            stopped_by_token = output.finish_reason is FinishReason.STOP and index == last
            if self._detokenizer is not None:
                stop = self._detokenizer.update([token_id], stopped_by_token)
                if stop is not None:
                    return stop
        return None

    @property
    def has_news(self) -> bool:
        """Whether there is something that was not handed out yet; its text may still be held back."""
        ended = self.finish_reason is not None and not self._end_handed_out
        return ended or len(self._token_ids) > self._num_handed_out

    def take_all(self) -> CompletionOutput:
        """Everything so far."""
        return self._take("" if self._detokenizer is None else self._detokenizer.next_text(delta=False), 0)

    def take_delta(self) -> CompletionOutput | None:
        """What is new; None if that is nothing.

        Tokens without text (half a character, a possible stop string) wait until there is text, or the end.
        """
        if not self.has_news:
            return None
        text = "" if self._detokenizer is None else self._detokenizer.next_text(delta=True)
        if not text and self._detokenizer is not None and self.finish_reason is None:
            return None
        return self._take(text, self._num_handed_out)

    def _take(self, text: str, start: int) -> CompletionOutput:
        self._num_handed_out = len(self._token_ids)
        self._end_handed_out = self.finish_reason is not None
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=self._token_ids[start:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
        )
