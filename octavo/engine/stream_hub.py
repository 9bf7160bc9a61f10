"""StreamHub: all open streams of an engine, between those who read them and the client of its core.

Three threads meet here: the event loop of each reader, which only hands out and never waits for the others; the
tokenizer's thread, which checks and tokenises requests in their order of arrival; and the client's, which turns what
the core computed into outputs. A stream belongs to the event loop that reads it, the hub to none.

What always holds: a request that was sent to the core gets exactly one end from there, whoever asked for it: a last
output, a failure, or the death of the core. Only that end removes its state here; only its reader removes the stream.
"""

import itertools
import threading
from collections.abc import Callable
from typing import TypeAlias

from octavo import envs
from octavo.engine.admission import AdmissionQueue, PromptGroup
from octavo.engine.assemble import FrontEnd
from octavo.engine.core_client import SocketClient
from octavo.engine.input_processor import Prompt
from octavo.engine.prompts import parse_text
from octavo.engine.request_stream import RequestStream, wake
from octavo.errors import InvalidInput
from octavo.metrics.stat_logger import StatLogger
from octavo.protocol.core_messages import AbortRequests, AddRequest, RequestFailure, StepOutputs
from octavo.protocol.messages import EngineCoreRequest, sample_request_ids
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams

PromptMaker: TypeAlias = Callable[[], tuple[Prompt, str | None]]
"""Makes a prompt, and its text if that is not in the prompt. Runs in the tokenizer's thread."""


USUAL_LOGPROBS = 64
"""A token. An answer with more is a wide one."""


class StreamHub:
    """The front end of an AsyncLLM; the listener of its client, which is to be set as `client` before anything else."""

    client: SocketClient

    def __init__(self, front_end: FrontEnd, admission: AdmissionQueue, is_core_elsewhere: bool) -> None:
        """`is_core_elsewhere`: the core runs in another process."""
        self._admission = admission
        self._input_processor = front_end.input_processor
        self._output_processor = front_end.output_processor
        self._vocab_size = front_end.vocab_size
        self._resolve_lock = threading.Lock()
        self._output_lock = threading.Lock()
        self._is_core_elsewhere = is_core_elsewhere
        self._stat_logger = StatLogger(envs.log_interval()) if front_end.config.log_stats else None
        self._request_ids = map(str, itertools.count())
        self.streams: dict[str, RequestStream] = {}
        """By the requests' own ids."""

    # Called by readers. Nothing here waits for another thread.

    def open(self, user_id: str | None, tenant: str | None = None, group: PromptGroup | None = None) -> RequestStream:
        """A stream for the event loop that runs now. Raises what ended the core, InvalidInput, or Overloaded."""
        self.client.check()
        if user_id is not None and not isinstance(user_id, str):
            raise InvalidInput(f"request_id={user_id!r} must be a string, or None for one that is made up")
        if tenant is not None:
            parse_text("tenant", tenant)
        request_id = next(self._request_ids)
        stream = RequestStream(request_id, request_id if user_id is None else user_id)
        self._admission.enter(request_id, tenant, group)
        self.streams[request_id] = stream
        return stream

    def leave(self, stream: RequestStream) -> None:
        """Nobody reads this stream any more: its request ends, unless it has ended."""
        stream.is_left = True
        self.streams.pop(stream.request_id, None)
        self._admission.leave(stream.request_id)
        if stream.is_sent:
            self.client.post(AbortRequests([stream.request_id]))

    def abort(self, user_ids: set[str]) -> None:
        """Ask for the end of every request of these ids. Raises what ended the core."""
        self.client.check()
        named = [stream for stream in list(self.streams.values()) if stream.user_id in user_ids]
        for stream in named:
            stream.is_abort_wanted = True
        if sent := [stream.request_id for stream in named if stream.is_sent]:
            self.client.send(AbortRequests(sent))

    # Called in the tokenizers' threads.

    def submit(
        self,
        stream: RequestStream,
        make_prompt: PromptMaker,
        params: SamplingParams | None,
        priority: int,
        tenant: str | None,
    ) -> None:
        """Check, tokenise and send one request."""
        if stream.is_left:
            return
        self.client.check()
        if self._is_core_elsewhere:
            _check_importable(params)
        prompt, rendered = make_prompt()
        processor = self._input_processor
        parse_text("request_id", stream.user_id)
        parsed = processor.parse(prompt)
        self._admission.set_tokens(stream.request_id, processor.min_tokens(parsed))
        tokenized = processor.tokenize(parsed)
        self._admission.set_tokens(stream.request_id, len(tokenized.token_ids))
        with self._resolve_lock:
            request = processor.resolve(stream.user_id, tokenized, params, priority)
        self._admission.set_logprobs(stream.request_id, _num_wide_logprobs(request, self._vocab_size))
        request.request_id, request.tenant = stream.request_id, tenant
        request.arrival_time = stream.arrival_time
        stream.n = request.sampling_params.n
        stream.is_delta = request.sampling_params.output_kind is RequestOutputKind.DELTA
        with self._output_lock:
            self._output_processor.add_request(request, rendered or tokenized.text)
        stream.is_sent = True  # before it is, so that whoever ends the stream meanwhile aborts, or is seen below
        try:
            self.client.send(AddRequest(request))
        except BaseException:
            stream.is_sent = False
            with self._output_lock:
                self._output_processor.abort([stream.request_id])
            raise
        if stream.is_left or stream.is_abort_wanted:
            self.client.post(AbortRequests([stream.request_id]))

    # Called by the client, from its threads.

    def step_done(self, step: StepOutputs) -> None:
        self._admission.scheduled(step.first_scheduled)
        self._fail(step.failures)
        with self._output_lock:
            outputs, stopped = self._output_processor.process(step.outputs)
        if stopped:
            self.client.post(AbortRequests(stopped))
        self._deliver(outputs)
        if self._stat_logger is not None:
            self._stat_logger.record(step.stats)

    def tick(self) -> None:
        for stream in list(self.streams.values()):
            if stream.loop.is_closed():
                self.leave(stream)

    def core_ended(self, error: Exception) -> None:
        streams = list(self.streams.values())
        for stream in streams:
            stream.fail(type(error)(*error.args))
        wake(streams)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand outputs to their streams. What comes for a stream that was left is dropped."""
        streams = []
        for output in outputs:
            if (stream := self.streams.get(output.request_id)) is not None:
                output.request_id = stream.user_id
                if output.finished:
                    stream.is_sent = False
                    self._admission.leave(stream.request_id)
                stream.put(output)
                streams.append(stream)
        for stream in wake(streams):
            self.leave(stream)

    def _fail(self, failures: list[RequestFailure]) -> None:
        """End the streams of requests that failed in the core, with all their samples."""
        if not failures:
            return
        with self._output_lock:
            self._output_processor.abort([failure.request_id for failure in failures])
        streams = {
            sample_id: stream
            for stream in list(self.streams.values())
            for sample_id in (stream.request_id, *sample_request_ids(stream.request_id, stream.n))
        }
        for failure in failures:
            if (stream := streams.get(failure.request_id)) is not None:
                stream.fail((InvalidInput if failure.is_invalid_input else RuntimeError)(failure.message))
                self._admission.leave(stream.request_id)
                self.client.post(AbortRequests([stream.request_id]))  # its other samples
                wake([stream])


def _num_wide_logprobs(request: EngineCoreRequest, vocab_size: int) -> int:
    """Log-probabilities of an answer at most, if there are many for each token."""
    params = request.sampling_params
    num_tokens = params.n * (params.max_tokens or 0)
    wanted = ((params.logprobs, num_tokens), (params.prompt_logprobs, len(request.prompt_token_ids)))
    widths = ((vocab_size if number == -1 else number or 0, tokens) for number, tokens in wanted)
    return sum(width * tokens for width, tokens in widths if width > USUAL_LOGPROBS)


def _check_importable(params: SamplingParams | None) -> None:
    """A class of the main program has no name that another process could import it by."""
    for path in getattr(params, "logits_processors", None) or ():
        if isinstance(path, str) and path.startswith("__main__:"):
            raise InvalidInput(
                f"logits_processors={path!r} is defined in the main program, which the engine core's process cannot "
                'import; move it to a module of its own, or use core="thread"'
            )
