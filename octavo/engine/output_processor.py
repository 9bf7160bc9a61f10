"""OutputProcessor: what the core computed, turned into what users read.

Owns one state a live request, with one state a sample in it. Touches the tokenizer only.
What holds: a request's outputs depend on its own tokens alone, and it ends here exactly once.
"""

from collections.abc import Iterable

from octavo.engine.sample_state import DecodedTokens, SampleState, read_logprobs
from octavo.engine.stop_search import SearchBudget
from octavo.errors import InvalidInput
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, TokenLogprobs, sample_request_ids
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
        self._decoded = DecodedTokens(tokenizer)
        self._requests: dict[str, _RequestState] = {}
        self._samples: dict[str, tuple[_RequestState, SampleState]] = {}
        """By the id under which the core knows them; as long as their request lives."""

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        """Follow a request that the core has accepted. `prompt` is its text, if it came as text.

        Raises:
            InvalidInput: see `check_ids`.
        """
        self.check_ids(request)
        state = _RequestState(request, prompt, self._tokenizer, self._decoded)
        self._requests[request.request_id] = state
        for sample_id, sample in state.samples.items():
            self._samples[sample_id] = (state, sample)

    def check_ids(self, request: EngineCoreRequest) -> None:
        """Whether the request's id and those of its samples are free.

        Raises:
            InvalidInput: a live request, or a sample of one, has such an id.
        """
        for request_id in (request.request_id, *sample_request_ids(request.request_id, request.sampling_params.n)):
            if self.is_live(request_id):
                raise InvalidInput(
                    f"request_id={request.request_id!r} needs the id {request_id!r}, which belongs to a request that "
                    "has not ended; use another"
                )

    def process(self, outputs: Iterable[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take in one step. Outputs of requests and samples that have ended here are ignored.

        Returns:
            What to hand to users now, at most one output a request; and the ids (of samples, if n > 1) that a stop
            ended here: the core does not know of it, so the caller must abort them there.
        """
        touched: dict[str, _RequestState] = {}
        stopped = []
        for output in outputs:
            state, sample = self._samples.get(output.request_id, (None, None))
            if state is None or sample is None or sample.finish_reason is not None:
                continue
            state.append(sample, output)
            touched[state.request_id] = state
            if sample.finish_reason is not None and output.finish_reason is None:
                stopped.append(output.request_id)
        return self._take_outputs(touched.values()), stopped

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests here, or single samples by their own ids. Unknown ids are ignored.

        Each request gets an output. Samples that had not ended have the finish_reason "abort" in it.
        """
        touched: dict[str, _RequestState] = {}
        for request_id in request_ids:
            if request_id in self._requests:
                state = self._requests[request_id]
                samples = list(state.samples.values())
            elif request_id in self._samples:
                state, sample = self._samples[request_id]
                samples = [sample]
            else:
                continue
            for sample in samples:
                if sample.finish_reason is None:
                    sample.abort()
                    touched[state.request_id] = state
        return self._take_outputs(touched.values())

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id, or one with a sample of this id, has not ended yet."""
        return request_id in self._requests or request_id in self._samples

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def _take_outputs(self, states: Iterable["_RequestState"]) -> list[RequestOutput]:
        outputs = []
        for state in states:
            if state.finished:
                del self._requests[state.request_id]
                for sample_id in state.samples:
                    del self._samples[sample_id]
            if (output := state.take_output()) is not None:
                outputs.append(output)
        return outputs


class _RequestState:
    """One live request: its samples, and what they have in common."""

    def __init__(
        self, request: EngineCoreRequest, prompt: str | None, tokenizer: Tokenizer, decoded: DecodedTokens
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self._decoded = decoded if params.detokenize else None
        budget = SearchBudget()
        self.samples = {
            sample_id: SampleState(request, index, tokenizer, self._decoded, budget)
            for index, sample_id in enumerate(sample_request_ids(request.request_id, params.n))
        }
        """By the id under which the core knows them, in order."""
        self._first_sample = next(iter(self.samples.values()))
        self._prompt = prompt
        self._prompt_token_ids = list(request.prompt_token_ids)
        self._kind = params.output_kind
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._clamps, self._ignored = list(request.clamps), list(request.ignored)
        self._between_tokens: list[float] = []
        """Of tokens that no output has shown yet."""

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples.values())

    def append(self, sample: SampleState, output: EngineCoreOutput) -> None:
        """Take in what one step added to one sample."""
        if self._wants_prompt_logprobs and output.new_token_ids:  # they come with the first token of any sample
            self._wants_prompt_logprobs = False
            self._prompt_logprobs = self._read_prompt_logprobs(output.prompt_logprobs or [])
        before = sample.timings.last_token
        sample.append(output)
        if before and output.new_token_ids:
            self._between_tokens.append(output.timings.last_token - before)

    def _read_prompt_logprobs(self, entries: list[TokenLogprobs]) -> list[dict[int, Logprob] | None]:
        return [None, *(read_logprobs(entry, self._decoded) for entry in entries)]

    def take_output(self) -> RequestOutput | None:
        """What the request's output kind shows now; None if that is nothing."""
        completions = self._take_completions()
        if not completions:
            return None
        prompt_logprobs = self._prompt_logprobs
        if self._kind is RequestOutputKind.DELTA:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            num_cached_tokens=self._first_sample.num_cached_tokens,
            metrics=self._metrics(),
            prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
        )

    def _take_completions(self) -> list[CompletionOutput]:
        samples = self.samples.values()
        if self._kind is RequestOutputKind.DELTA:
            return [delta for sample in samples if (delta := sample.take_delta()) is not None]
        if self._kind is RequestOutputKind.FINAL_ONLY:
            shows = self.finished
        else:
            shows = any(sample.has_news for sample in samples)
        return [sample.take_all() for sample in samples] if shows else []

    def _metrics(self) -> RequestMetrics:
        """Of several samples: the first to be scheduled, the first token of all, the last token of all."""
        times = self._first_sample.timings
        scheduled, first_token, last_token = times.scheduled, times.first_token, times.last_token
        if len(self.samples) > 1:
            timings = [sample.timings for sample in self.samples.values()]
            scheduled = _earliest(t.scheduled for t in timings)
            first_token = _earliest(t.first_token for t in timings)
            last_token = max(t.last_token for t in timings)
        between_tokens, self._between_tokens = self._between_tokens, []
        return RequestMetrics(
            queue_time=_span(times.arrival, scheduled),
            prefill_time=_span(scheduled, first_token),
            decode_time=_span(first_token, last_token),
            time_to_first_token=_span(times.arrival, first_token),
            between_tokens=between_tokens,
            num_preemptions=sum(sample.num_preemptions for sample in self.samples.values()),
            clamps=list(self._clamps),
            ignored=list(self._ignored),
        )


def _earliest(times: Iterable[float]) -> float:
    """The first of the times that have come; 0 if none has."""
    return min((time for time in times if time), default=0.0)


def _span(start: float, end: float) -> float:
    """Seconds between two phases; 0 if either has not been reached."""
    return end - start if start and end else 0.0
