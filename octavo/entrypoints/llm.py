"""LLM: the engine for offline use, in the caller's process."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import msgspec
from tqdm import tqdm

from octavo.config.resolve import make_engine_args
from octavo.engine.input_processor import Prompt, as_prompt_list
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import EngineDeadError, InvalidInput
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.tokenizer import Tokenizer


class LLM:
    """A model that is ready to generate.

        llm = LLM(model="smollm2")
        llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))

    Not thread-safe, except `get_metrics`. After `close` every call raises EngineDeadError.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """`options` are the fields of `octavo.config.engine_args.EngineArgs`.

        Raises:
            InvalidInput (a ValueError): a value is refused, the model cannot be had or does not fit.
            TypeError: an unknown option.
        """
        self._engine: LLMEngine | None = None
        self._next_request = 0
        self._engine = LLMEngine.from_args(make_engine_args(model=model, **options))

    @property
    def llm_engine(self) -> LLMEngine:
        if self._engine is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts; outputs in the prompts' order.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, each dict with an
                optional "cache_salt"; or a list of these.
            sampling_params: one for all or one each; None: the model's own defaults.
            use_tqdm: a progress bar on stderr, if it is a terminal and the work is long.
            priority: one number a prompt, lower first; needs scheduling_policy="priority" to matter.

        Raises:
            InvalidInput (a ValueError): a prompt or parameter is refused; then nothing has run.
        """
        engine = self.llm_engine
        requests = self._prepare(as_prompt_list(prompts), sampling_params, priority)
        mine = {request.request_id for request, _ in requests}
        with _deferred_interrupt() as interrupted:
            try:
                for request, prompt in requests:
                    engine.submit(request, prompt)
                finished = self._run(engine, mine, interrupted, use_tqdm)
            except BaseException:
                engine.abort_request(list(mine))
                engine.collect(mine)
                raise
        return [finished[request.request_id] for request, _ in requests]

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`: the model's generation_config over the usual defaults."""
        return self.llm_engine.input_processor.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_metrics(self) -> dict[str, int | float]:
        """Counters and gauges, named as in `octavo.protocol.stats.EngineStats`. Callable from another thread."""
        return msgspec.structs.asdict(self.llm_engine.stats())

    def kernel_report(self) -> dict[str, str]:
        """Which kernel computes each kind of layer."""
        return self.llm_engine.client.kernel_report()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while requests hold blocks."""
        return self.llm_engine.client.reset_prefix_cache()

    def audit(self) -> None:
        """Raise AssertionError if the accounts of the KV cache are off."""
        self.llm_engine.client.audit()

    def close(self) -> None:
        """Free the weights and the KV cache. A second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[tuple[EngineCoreRequest, str | None]]:
        """Validate everything before anything is queued."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each("sampling_params", sampling_params, len(prompts))
        priorities = [0] * len(prompts) if priority is None else _one_each("priority", priority, len(prompts))
        processor = self.llm_engine.input_processor
        num_arrivals = processor.num_arrivals
        try:
            return [
                self.llm_engine.prepare(self._new_request_id(), prompt, p, number, RequestOutputKind.FINAL_ONLY)
                for prompt, p, number in zip(prompts, params, priorities, strict=True)
            ]
        except BaseException:
            processor.num_arrivals = num_arrivals  # a refused batch must not shift the random streams of later ones
            raise

    def _new_request_id(self) -> str:
        while True:
            request_id, self._next_request = str(self._next_request), self._next_request + 1
            if not self.llm_engine.is_live(request_id):
                return request_id

    def _run(
        self, engine: LLMEngine, mine: set[str], interrupted: threading.Event, use_tqdm: bool
    ) -> dict[str, RequestOutput]:
        """Step until these requests have finished. The outputs of other callers' requests are left to them."""
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(mine), desc="requests", delay=2, disable=None if use_tqdm else True) as bar:
            while len(finished) < len(mine):
                engine.advance()
                for output in engine.collect(mine):
                    finished[output.request_id] = output
                    bar.update()
                if interrupted.is_set():
                    raise KeyboardInterrupt
        return finished


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for each of `count` prompts, or its `count` entries."""
    if isinstance(value, SamplingParams):
        return [value] * count
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidInput(f"{name}={value!r} must be one SamplingParams or a list with one entry a prompt")
    if len(value) != count:
        raise InvalidInput(f"{name} has {len(value)} entries but there are {count} prompts; give one each")
    return list(value)


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of tearing a step apart; a second one raises at once.

    Only where Python's own handler is in force: a handler of the application is left alone, and so is every thread
    but the main one, which are not interrupted anyway.
    """
    event = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield event
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
