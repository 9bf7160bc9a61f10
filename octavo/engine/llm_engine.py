"""LLMEngine: the front end around an in-process core, driven step by step by its caller.

Not thread-safe, except `stats()`.
"""

from collections.abc import Sequence, Set

from octavo import envs
from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import EngineConfig, LoadConfig
from octavo.config.machine import detect
from octavo.config.resolve import resolve
from octavo.engine.core import EngineCore
from octavo.engine.core_client import InprocClient
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import InvalidInput
from octavo.executor.uniproc import UniProcExecutor
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.pull import find_model
from octavo.logging import configure_logging, get_logger
from octavo.metrics.stat_logger import StatLogger
from octavo.ops.registry import get_platform
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.protocol.stats import EngineStats
from octavo.scheduler.scheduler import Scheduler
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

logger = get_logger(__name__)


class LLMEngine:
    """Requests in, outputs out, one step at a time."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        """Load the model and allocate the KV cache. Raises InvalidInput if the files do not hold the model."""
        self.config = config
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(
            tokenizer=tokenizer,
            model=config.model,
            max_model_len=config.scheduler.max_model_len,
            num_blocks=config.cache.num_blocks,
            block_size=config.cache.block_size,
            engine_seed=config.seed,
        )
        self.output_processor = OutputProcessor(tokenizer)
        vocab_size = min(tokenizer.vocab_size, config.model.vocab_size)
        executor = UniProcExecutor(config, vocab_size)
        self.client = InprocClient(EngineCore(Scheduler(config.scheduler, config.cache), executor))
        self._stat_logger = StatLogger(envs.log_interval()) if config.log_stats else None
        self._undelivered: list[RequestOutput] = []

    @classmethod
    def from_args(cls, args: EngineArgs) -> "LLMEngine":
        """Find the model, plan the memory, print the plan, then load. Raises InvalidInput for anything refused."""
        configure_logging()
        path = find_model(args.model, args.revision)
        checkpoint = open_checkpoint(path, args.load_format)
        tokenizer = load_tokenizer(find_model(args.tokenizer) if args.tokenizer else path)
        platform = get_platform(args.platform)
        load = LoadConfig(path=path, load_format=checkpoint.load_format, seed=args.seed)
        config = resolve(
            args,
            model=checkpoint.config,
            load=load,
            weight_bytes=checkpoint.weight_bytes,
            machine=detect(),
            platform=platform.name,
            auto_dtype=platform.default_dtype(checkpoint.config.dtype),
        )
        for note in config.notes:
            logger.info("%s", note)
        logger.info("kernels: %s", ", ".join(f"{k}={v}" for k, v in platform.kernel_report().items()))
        if tokenizer.chat_template is None:
            logger.warning("%s has no chat template: it can complete texts but not chat", args.model)
        engine = cls(config, tokenizer)
        defaults = engine.input_processor.default_sampling_params()
        shown = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
        logger.info("default sampling: %s", ", ".join(f"{name}={getattr(defaults, name)}" for name in shown))
        return engine

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
        if isinstance(request_id, str) and self.output_processor.is_live(request_id):
            raise InvalidInput(f"request id {request_id!r} is in use by a live request; choose another")
        request, text = self.input_processor.process(request_id, prompt, params, priority)
        if output_kind is not None:
            request.sampling_params.output_kind = output_kind
        return request, text

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

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """End requests and free their blocks now; unknown ids are ignored.

        The next `step` returns their last outputs, with finish_reason "abort".
        """
        request_ids = list(request_ids)
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
