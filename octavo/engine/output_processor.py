"""OutputProcessor: what the core computed, turned into what users read.

Owns one state a live request: its detokenizer, its tokens and log-probabilities so far. Touches the tokenizer only.
What holds: text, token ids and log-probabilities of a request end at the token that completed its stop string, whatever
the core had computed beyond; and no list handed out is changed afterwards.
"""

from collections.abc import Iterable

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.errors import InvalidInput
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestTimings, TokenLogprobs
from octavo.protocol.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind
from octavo.tokenization.tokenizer import Tokenizer


class OutputProcessor:
    """Builds the RequestOutputs of all live requests.

    Args:
        tokenizer: turns ids into text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoded = _DecodedTokens(tokenizer)
        self._requests: dict[str, _RequestState] = {}

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        """Follow a request that the core has accepted. `prompt` is its text, if it came as text.

        Raises:
            InvalidInput: a live request has this id.
        """
        if request.request_id in self._requests:
            raise InvalidInput(
                f"request_id={request.request_id!r} belongs to a request that has not ended; use another"
            )
        self._requests[request.request_id] = _RequestState(request, prompt, self._tokenizer, self._decoded)

    def process(self, outputs: Iterable[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take in one step. Outputs of requests that have ended here are ignored.

        Returns:
            What to hand to users now, and the ids of requests ended by a stop string: the core does not know of it, so
            the caller must abort them there.
        """
        request_outputs = []
        stopped = []
        for output in outputs:
            state = self._requests.get(output.request_id)
            if state is None:
                continue
            state.append(output)
            if state.finish_reason is not None:
                del self._requests[output.request_id]
                if output.finish_reason is None:
                    stopped.append(output.request_id)
            if (request_output := state.take_output()) is not None:
                request_outputs.append(request_output)
        return request_outputs, stopped

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests here; each gets its last output, with finish_reason "abort". Unknown ids are ignored."""
        aborted = []
        for request_id in request_ids:
            state = self._requests.pop(request_id, None)
            if state is not None:
                state.finish_reason = FinishReason.ABORT
                aborted.append(state.take_output())
        return [output for output in aborted if output is not None]

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id has not ended yet."""
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)


class _DecodedTokens(dict[int, str]):
    """Text of single tokens. Filled when asked: `logprobs=-1` asks for the whole vocabulary at every position."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode_token(token_id)
        return text


class _RequestState:
    """One live request: everything generated so far, and how much of it has been handed out."""

    def __init__(
        self, request: EngineCoreRequest, prompt: str | None, tokenizer: Tokenizer, decoded: _DecodedTokens
    ) -> None:
        params = request.sampling_params
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._request_id = request.request_id
        self._prompt = prompt
        self._prompt_token_ids = list(request.prompt_token_ids)
        self._kind = params.output_kind
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params) if params.detokenize else None
        )
        self._decoded = decoded
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._num_emitted = 0
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._timings = RequestTimings(arrival=request.arrival_time)

    def append(self, output: EngineCoreOutput) -> None:
        """Take in what one step added, up to the token that completes a stop string."""
        self._timings = output.timings
        self._num_preemptions = output.num_preemptions
        self._num_cached_tokens = output.num_cached_tokens
        last = len(output.new_token_ids) - 1
        for index, token_id in enumerate(output.new_token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None and output.logprobs is not None:
                self._append_logprobs(self._logprobs, output.logprobs[index])
            stopped_by_token = output.finish_reason is FinishReason.STOP and index == last
            if (stop := self._detokenize(token_id, stopped_by_token)) is not None:
                self.finish_reason, self._stop_reason = FinishReason.STOP, stop
                return
        self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason

    def _detokenize(self, token_id: int, stopped_by_token: bool) -> str | None:
        if self._detokenizer is None:
            return None
        return self._detokenizer.update([token_id], stopped_by_token)

    def _append_logprobs(self, positions: list[dict[int, Logprob]], entry: TokenLogprobs) -> None:
        decoded = self._decoded if self._detokenizer is not None else None
        self._cumulative_logprob += entry.logprobs[0]
        position: dict[int, Logprob] = {}
        for index, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token_id not in position:
                rank = index or entry.sampled_rank
                position[token_id] = Logprob(logprob, rank, None if decoded is None else decoded[token_id])
        positions.append(position)

    def take_output(self) -> RequestOutput | None:
        """What the request's output kind shows now; None if that is nothing."""
        finished = self.finish_reason is not None
        if self._kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = self._kind is RequestOutputKind.DELTA
        text = "" if self._detokenizer is None else self._detokenizer.next_text(finished, delta)
        start = self._num_emitted if delta else 0
        if not finished and self._is_empty(text, delta):
            return None
        self._num_emitted = len(self._token_ids)
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=self._token_ids[start:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
        )
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=_metrics(self._timings, self._num_preemptions),
        )

    def _is_empty(self, text: str, delta: bool) -> bool:
        """A delta without text waits for its text (half a character, a possible stop string); its tokens come along."""
        if delta and self._detokenizer is not None:
            return not text
        return len(self._token_ids) == self._num_emitted


def _metrics(timings: RequestTimings, num_preemptions: int) -> RequestMetrics:
    return RequestMetrics(
        queue_time=_span(timings.arrival, timings.scheduled),
        prefill_time=_span(timings.scheduled, timings.first_token),
        decode_time=_span(timings.first_token, timings.last_token),
        num_preemptions=num_preemptions,
    )


def _span(start: float, end: float) -> float:
    """Seconds between two phases; 0 if either has not been reached."""
    return end - start if start and end else 0.0
