"""LLMEngine: the front end around an in-process core, driven step by step by its caller.

Not thread-safe, except `stats()`.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

from octavo import envs
from octavo.config.engine_args import EngineArgs
from octavo.engine.assemble import FrontEnd, make_core, make_front_end
from octavo.engine.core_client import InprocClient
from octavo.engine.input_processor import Prompt
from octavo.metrics.stat_logger import StatLogger
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.protocol.stats import EngineStats


class LLMEngine:
    """Requests in, outputs out, one step at a time."""

    def __init__(self, front_end: FrontEnd) -> None:
        """Load the model and allocate the KV cache. Raises InvalidInput if the files do not hold the model."""
        self.config = front_end.config
        self.tokenizer = front_end.tokenizer
        self.input_processor = front_end.input_processor
        self.output_processor = front_end.output_processor
        self.client = InprocClient(make_core(self.config, front_end.vocab_size))
        self._stat_logger = StatLogger(envs.log_interval()) if self.config.log_stats else None
        self._undelivered: list[RequestOutput] = []

    @classmethod
    def from_args(cls, args: EngineArgs) -> "LLMEngine":
        """Find the model, plan the memory, print the plan, then load. Raises InvalidInput for anything refused."""
        return cls(make_front_end(args))

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Queue a request. `params` None: the model's own defaults.

        Raises:
            InvalidInput: the prompt or a parameter is refused, or a live request has this id.
        """
        self.submit(*self.prepare(request_id, prompt, params, priority))

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Validate and tokenise without queueing: (request, prompt text if the prompt was text).

        `output_kind` replaces the one of `params` if it is given.
        """
        with self.all_or_nothing():
            request, text = self.input_processor.process(request_id, prompt, params, priority)
            self.output_processor.check_ids(request)
        if output_kind is not None:
            request.sampling_params.output_kind = output_kind
        return request, text

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Around `prepare`: what is refused must not shift the random streams of later requests."""
        num_arrivals = self.input_processor.num_arrivals
        try:
            yield
        except BaseException:
            self.input_processor.num_arrivals = num_arrivals
            raise

    def submit(self, request: EngineCoreRequest, prompt: str | None) -> None:
        """Queue what `prepare` returned."""
        self.client.add_request(request)
        self.output_processor.add_request(request, prompt)

    def step(self) -> list[RequestOutput]:
        """Compute one step; the outputs that changed, as each request's `output_kind` says."""
        self.advance()
        return self.collect()

    def advance(self) -> None:
        """Compute one step and keep its outputs until they are collected."""
        outputs, stopped = self.output_processor.process(self.client.step())
        if stopped:
            self.client.abort_requests(stopped)
        if self._stat_logger is not None:
            self._stat_logger.record(self.client.stats())
        self._undelivered += outputs

    def collect(self, request_ids: Set[str] | None = None) -> list[RequestOutput]:
        """Take the outputs of these requests (None: of all); those of others wait for their own caller."""
        if request_ids is None:
            taken, self._undelivered = self._undelivered, []
            return taken
        taken = [output for output in self._undelivered if output.request_id in request_ids]
        self._undelivered = [output for output in self._undelivered if output.request_id not in request_ids]
        return taken

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests and free their blocks now; unknown ids are ignored. One id may be given alone.

        The next `step` returns their last outputs, with finish_reason "abort".
        """
        request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.client.abort_requests(request_ids)
        self._undelivered += self.output_processor.abort(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self.client.has_unfinished_requests()

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id is queued or running."""
        return self.output_processor.is_live(request_id)

    def stats(self) -> EngineStats:
        """The state after the last step; callable from another thread."""
        return self.client.stats()

    def shutdown(self) -> None:
        """Free everything; every later call raises EngineDeadError."""
        self.client.shutdown()
