"""AsyncLLM: the engine for asyncio. The core runs elsewhere, in a process or a thread; the streams are in `stream_hub`.

Nothing of the engine refers to an AsyncLLM but its own streams: one that is forgotten is closed.
"""

import asyncio
import math
import threading
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from octavo.config.resolve import make_engine_args
from octavo.engine.admission import AdmissionQueue, Load, PromptGroup
from octavo.engine.assemble import encode_config, make_front_end
from octavo.engine.core_client import SocketClient
from octavo.engine.input_processor import Prompt
from octavo.engine.prompts import size_hint
from octavo.engine.stream_hub import PromptMaker, StreamHub
from octavo.engine.tokenizer_thread import TokenizerThread
from octavo.errors import InvalidInput
from octavo.protocol.core_messages import CoreMethod
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.stats import EngineStats
from octavo.tokenization.chat import encode_rendered, render_chat
from octavo.tokenization.tokenizer import Tokenizer

T = TypeVar("T")

_LONG_PROMPT = 32_768
"""Characters or token ids. A longer prompt takes about 10 ms and more to prepare, and has a thread of its own."""


class AsyncLLM:
    """A model that streams its answers.

        async with AsyncLLM(model="smollm2") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)

    Made without an event loop, and not tied to one. The core starts loading at once and the constructor does not wait
    for it: requests do, or `wait_until_ready`. After `shutdown`, and when the core has died, every open stream and
    every call raises EngineDeadError. Thread-safe.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        core: str = "process",
        heartbeat_timeout: float = 30.0,
        step_timeout: float = 600.0,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        max_wide_logprobs: int | None = None,
        **options: Any,
    ) -> None:
        """`options` are the fields of `octavo.config.engine_args.EngineArgs`.

        Args:
            core: "process": the engine core gets a process of its own. "thread": a thread of this one; then nothing
                can end a step that hangs.
            heartbeat_timeout: seconds without a sign of life after which the core is taken for dead.
            step_timeout: seconds in one and the same step after which it is.
            max_queued_requests: requests that may wait for the core to begin them; None: no bound.
            max_queued_tokens: prompt tokens that may wait; None: no bound. A longer one is taken when no other waits.
            max_wide_logprobs: log-probabilities that all answers with many for each token may hold together; None: no
                bound.

        Raises:
            InvalidInput (a ValueError): a value is refused, the model cannot be had or does not fit. What only shows
                while loading is raised by `wait_until_ready` and by every stream.
            TypeError: an unknown option.
        """
        if core not in ("process", "thread"):
            raise InvalidInput(f'core={core!r} must be "process" or "thread"')
        heartbeat_timeout = _seconds("heartbeat_timeout", heartbeat_timeout)
        step_timeout = _seconds("step_timeout", step_timeout)
        args = make_engine_args(model=model, **options)
        self._admission = AdmissionQueue(
            max_queued_requests, max_queued_tokens, is_fair=args.fair_share, max_logprobs=max_wide_logprobs
        )
        front_end = make_front_end(args, is_core_elsewhere=core == "process")
        self.config = front_end.config
        self._tokenizer = front_end.tokenizer
        self._input_processor = front_end.input_processor
        self._tokenizer_thread = TokenizerThread()
        self._long_prompt_thread = TokenizerThread("octavo-tokenizer-long")
        self._hub = StreamHub(front_end, self._admission, is_core_elsewhere=core == "process")
        self._client = self._hub.client = SocketClient(
            self._hub, kind=core, heartbeat_timeout=heartbeat_timeout, step_timeout=step_timeout
        )
        self._client.start(encode_config(self.config), front_end.vocab_size)
        self._threads = (self._tokenizer_thread, self._long_prompt_thread)
        self._finalizer = weakref.finalize(self, _finalize, self._client, self._threads)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        group: PromptGroup | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields as `sampling_params.output_kind` says, everything so far by default.

        A reader slower than the engine finds several outputs in one. Leaving the stream early, by `break`, `aclose`
        or cancellation, aborts the request.

        Args:
            prompt: as for `LLM.generate`.
            sampling_params: None: the model's own defaults.
            request_id: what the outputs and `abort` call it. It need not be unique; None: one is made up.
            priority: lower first; needs scheduling_policy="priority" to matter.
            tenant: whom it is for; needs fair_share=True to matter. None is one tenant too.
            group: one for all prompts that are asked for together.

        Raises:
            InvalidInput (a ValueError): the prompt or a parameter is refused, or the group alone is more than can be
                queued; then nothing has been queued.
            Overloaded: the queue is full; then nothing has been queued.
            EngineDeadError: the core is gone.
            RuntimeError: the step that computed this request failed; the engine lives on.
        """
        thread = self._thread_for(prompt)
        copy = _own_copy(sampling_params)
        return self._read(request_id, lambda: (prompt, None), thread, copy, priority, tenant, group)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation. As `generate`; the prompt is the conversation in the model's chat template.

        Args:
            messages: dicts with role and content.
            template_options: as for `octavo.tokenization.chat.render_chat`.
        """
        tokenizer = self._tokenizer

        def render() -> tuple[Prompt, str]:
            text = render_chat(tokenizer, messages, **template_options)
            return {"prompt_token_ids": encode_rendered(tokenizer, text), "cache_salt": cache_salt}, text

        thread = self._thread_for(messages)
        return self._read(request_id, render, thread, _own_copy(sampling_params), priority, tenant)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every live request of this id or these ids; unknown ids are ignored.

        Their streams end with finish_reason "abort" once the step in progress is done.
        """
        user_ids = {request_id} if isinstance(request_id, str) else set(request_id)
        self._hub.abort(user_ids)

    async def wait_until_ready(self) -> None:
        """Return when the model is loaded.

        Raises:
            InvalidInput: the files do not hold the model.
            EngineDeadError: the core could not be started.
        """
        await self.kernel_report()

    async def kernel_report(self) -> dict[str, str]:
        """Which kernel computes each kind of layer."""
        self._client.check()
        return await asyncio.wrap_future(_follow(self._client.kernels))

    async def get_metrics(self) -> dict[str, int | float]:
        """Counters and gauges, named as in `octavo.protocol.stats.EngineStats`.

        They show everything asked for before, aborts included, and so take up to one step; `stats` does not wait.
        """
        return msgspec.structs.asdict(await self._call(CoreMethod.STATS))

    def stats(self) -> EngineStats:
        """The state after the last step that was heard of."""
        self._client.check()
        return self._client.stats

    def load(self) -> Load:
        """How many requests are computed and how many wait, as this end knows it now."""
        return self._admission.load()

    @property
    def core_pid(self) -> int | None:
        """The process of the engine core; None if it is a thread."""
        return self._client.core_pid

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while requests hold blocks."""
        return bool(await self._call(CoreMethod.RESET_PREFIX_CACHE))

    async def audit(self) -> None:
        """Raise AssertionError if the accounts of the KV cache are off."""
        await self._call(CoreMethod.AUDIT)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`: the model's generation_config over the usual defaults."""
        return self._input_processor.default_sampling_params()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken. True while the model is still loading."""
        return self._client.error is None

    @property
    def errored(self) -> bool:
        """Whether the core has ended without being told to."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> Exception | None:
        """What ended the core, if it was not `shutdown`."""
        return None if self._client.was_closed else self._client.error

    async def check_health(self) -> None:
        """Raise what ended the core, if anything has."""
        self._client.check()

    async def shutdown(self) -> None:
        """End the core and free everything; open streams raise EngineDeadError. A second call does nothing."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-shutdown")
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self.close)
        except BaseException:
            thread.shutdown(wait=False)  # it goes on, but who was cancelled must not wait for it
            raise
        thread.shutdown()

    def close(self) -> None:
        """`shutdown` for callers without an event loop."""
        _close(self._client, self._threads)
        self._finalizer.detach()

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.wait_until_ready()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def _thread_for(self, prompt: object) -> TokenizerThread:
        """Short prompts do not wait behind long ones."""
        return self._long_prompt_thread if size_hint(prompt, _LONG_PROMPT) >= _LONG_PROMPT else self._tokenizer_thread

    async def _read(
        self,
        user_id: str | None,
        make_prompt: PromptMaker,
        thread: TokenizerThread,
        params: SamplingParams | Exception | None,
        priority: int,
        tenant: str | None,
        group: PromptGroup | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a request and hand out what comes; whatever ends this, the request ends with it."""
        if isinstance(params, Exception):
            raise params
        stream = self._hub.open(user_id, tenant, group)
        try:
            submitted = thread.submit(self._hub.submit, stream, make_prompt, params, priority, tenant)
            await asyncio.wrap_future(submitted)
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._hub.leave(stream)

    async def _call(self, method: CoreMethod) -> Any:
        return await asyncio.wrap_future(self._client.call(method))


def _own_copy(params: SamplingParams | None) -> SamplingParams | Exception | None:
    """Of parameters that the caller may change before the stream begins; or the refusal that the stream is to raise."""
    try:
        return params.clone() if isinstance(params, SamplingParams) else params
    except Exception as error:
        return error


def _close(client: SocketClient, threads: Iterable[TokenizerThread]) -> None:
    try:
        client.close()
    finally:
        for thread in threads:
            thread.close()


def _finalize(client: SocketClient, threads: Iterable[TokenizerThread]) -> None:
    """Close an engine that was forgotten. Should one of its own threads find that out, it must not wait for itself."""
    if threading.current_thread() is threading.main_thread():
        _close(client, threads)
    else:
        threading.Thread(target=_close, args=(client, threads), name="octavo-closer").start()


def _follow(source: "Future[T]") -> "Future[T]":
    """A future that ends as `source` does. Who waits for it may cancel it and leaves `source` to the others."""
    follower: Future[T] = Future()

    def pass_on(done: "Future[T]") -> None:
        with suppress(InvalidStateError):  # cancelled
            error = done.exception()
            follower.set_result(done.result()) if error is None else follower.set_exception(error)

    source.add_done_callback(pass_on)
    return follower


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidInput(f"{name}={value!r} must be a number of seconds, more than 0")
    return float(value)
