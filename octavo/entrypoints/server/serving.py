"""Call: one HTTP request's use of the engine, from its admission to its line in the log.

A route makes a `Call`, builds one engine stream for each prompt with `call.engine_options()`, and hands them to
`results` (everything at once) or `stream` (as it comes); both take count of what passes, so `usage` and `timings` are
right at every moment. Neither holds more than one output a prompt: what comes meanwhile is merged in the engine.

What holds: whatever ends a call, its requests end in the engine, and it leaves exactly one record.

    call = Call(request, body, id_prefix="cmpl-")
    async with call:
        outputs = await call.results([call.engine.generate(prompt, params, call.id, **call.engine_options())])

    # streaming: the generator owns the call
    async def events():
        async with call:
            async for index, output in call.stream(sources): yield encode_event(...)
    return await stream_events(request, events(), call.error)
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import Request

from octavo.entrypoints.server.errors import CLIENT_CLOSED_REQUEST, ApiError, ClientGone, from_exception
from octavo.entrypoints.server.schema.common import SamplingFields
from octavo.entrypoints.server.sse import unless_gone
from octavo.entrypoints.server.state import ServerState
from octavo.metrics.request_record import RequestRecord, hash_tenant
from octavo.protocol.outputs import RequestMetrics, RequestOutput

T = TypeVar("T")
Source = AsyncGenerator[RequestOutput, None]


@dataclass(slots=True)
class PromptTally:
    """What has come of one prompt."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    is_begun: bool = False
    finished: bool = False
    finish_reasons: dict[int, str] = field(default_factory=dict)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def add(self, output: RequestOutput) -> None:
        """Take count of a DELTA output, or of the one of FINAL_ONLY."""
        self.is_begun = True
        self.prompt_tokens = len(output.prompt_token_ids)
        self.cached_tokens = output.num_cached_tokens
        self.metrics = output.metrics
        self.finished = output.finished
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons[completion.index] = completion.finish_reason


class Call(AbstractAsyncContextManager["Call"]):
    """One HTTP request that uses the engine. To be entered with `async with`.

    Args:
        request: its body has been read.
        body: what it asks.
        id_prefix: what OpenAI puts before the ids of such answers.

    Raises:
        ApiError: no work is taken now (503), or the model is not served here (404).
    """

    def __init__(self, request: Request, body: SamplingFields, *, id_prefix: str) -> None:
        self.state: ServerState = request.app.state.server
        self.state.require_ready()
        self.model = self.state.served_name(body.model)
        self.engine = self.state.engine
        self.request = request
        self.body = body
        self.id = id_prefix + (body.request_id or request.state.request_id)
        self.created = int(time.time())
        self.wants_timings = body.timings or self.state.args.timings
        self.hides_output = False
        """The tokens of the answer are not shown, nor counted: only the prompt was asked about."""
        self._tenant = _tenant(request.state.api_key, body.user)
        self._tallies: list[PromptTally] = []
        self._stream: AsyncGenerator[tuple[int, RequestOutput], None] | None = None
        self._record: RequestRecord = request.state.record
        self._record.request_id = self.id
        self._record.streamed = body.stream
        asking = [name for name in (self._tenant, body.user) if name is not None]
        self._record.tenant = hash_tenant("\0".join(asking)) if asking else None
        request.state.call = self
        self._warnings = [*body.unknown_field_warnings(), *body.no_effect_warnings()]
        if body.priority and self.engine.config.scheduler.policy != "priority":
            self._warnings.append("priority: the server's scheduling policy is fcfs, so it has no effect")

    def engine_options(self) -> dict[str, Any]:
        """Keywords for `AsyncLLM.generate` and `AsyncLLM.chat`."""
        return {"priority": self.body.priority, "tenant": self._tenant}

    def cache_salt(self) -> str | None:
        """For the prompt: as a key of a prompt's dict, or a keyword of `AsyncLLM.chat`."""
        return self.state.cache_salt(self.request.state.api_key, self.body.cache_salt)

    async def prepare(self, make: Callable[[], T]) -> T:
        """`make()`, which makes the parameters and sources; in a thread if that may take long."""
        if not self.body.takes_long_to_prepare():
            return make()
        return await asyncio.get_running_loop().run_in_executor(self.state.parser, make)

    async def results(self, sources: Sequence[Source]) -> list[RequestOutput]:
        """The last output of each source, in order; of requests whose output_kind is FINAL_ONLY.

        Raises:
            ClientGone: the client went away, and the requests were aborted.
            what the first source to fail raises; the others are aborted.
        """
        outputs: list[RequestOutput | None] = [None] * len(sources)

        async def read_all() -> None:
            async with aclosing(self.stream(sources)) as stream:
                async for index, output in stream:
                    outputs[index] = output

        await unless_gone(self.request.receive, read_all())
        return [output for output in outputs if output is not None]

    def stream(self, sources: Sequence[Source]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What comes of the sources, as it comes: (index of the source, output). Closed with the call at the latest."""
        self._tallies = [PromptTally() for _ in sources]
        self._stream = self._counted(sources)
        return self._stream

    async def _counted(self, sources: Sequence[Source]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        if len(sources) == 1:
            (tally,) = self._tallies
            async with aclosing(sources[0]) as source:
                async for output in source:
                    self._count(tally, output)
                    yield 0, output
            return
        async with aclosing(_merge(sources)) as merged:
            async for index, output in merged:
                self._count(self._tallies[index], output)
                yield index, output

    @property
    def is_finished(self) -> bool:
        """Whether the last output was the last of all."""
        return all(tally.finished for tally in self._tallies)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`: tokens so far, over all prompts and samples."""
        prompt_tokens = sum(tally.prompt_tokens for tally in self._tallies)
        completion_tokens = self._completion_tokens()
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(tally.cached_tokens for tally in self._tallies)},
        }

    def timings(self) -> dict[str, float]:
        """Where the time went so far: seconds of the slowest prompt, and tokens per second of all."""
        metrics = [tally.metrics for tally in self._tallies]
        prefill = max((m.prefill_time for m in metrics), default=0.0)
        decode = max((m.decode_time for m in metrics), default=0.0)
        computed = sum(tally.prompt_tokens - tally.cached_tokens for tally in self._tallies)
        tokens = sum(tally.completion_tokens for tally in self._tallies)
        return {
            "queue_seconds": max((m.queue_time for m in metrics), default=0.0),
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "prefill_tokens_per_second": _rate(computed, prefill),
            "decode_tokens_per_second": _rate(tokens - sum(bool(t.completion_tokens) for t in self._tallies), decode),
        }

    def warnings(self) -> list[str]:
        """What the client should know about fields that were ignored, lowered or have no effect. Complete once an
        output of each prompt has come."""
        notes = [note for tally in self._tallies for note in (*tally.metrics.ignored, *tally.metrics.clamps)]
        return list(dict.fromkeys([*self._warnings, *filter(None, map(self._receipt, notes))]))

    def _receipt(self, note: str) -> str | None:
        """A note of the engine in the client's words. None: it is about a field that the client did not give."""
        name, rest = re.fullmatch(r"(\w*)(.*)", note, re.DOTALL).groups()  # type: ignore[union-attr]
        given = self.body.receipt_name(name)
        return None if given is None else f"{given}{rest}"

    def add_warning(self, text: str) -> None:
        self._warnings.append(text)

    def error(self, error: BaseException) -> ApiError:
        """What the client is told of an error in mid-stream, which is also put on record."""
        if isinstance(error, ClientGone):
            self._record.client_aborted = True
            return ApiError(CLIENT_CLOSED_REQUEST, "the client went away")
        refusal = from_exception(error, self.request.state.fields)
        if self.state.is_draining and refusal.code == "engine_dead":
            refusal = self.state.why_not_ready() or refusal
        self._record.status, self._record.error = refusal.status, refusal.code or "refused"
        return refusal

    def close_record(self, record: RequestRecord) -> bool:
        """Write what the engine did on the record. False: the request was never admitted there."""
        begun = [tally for tally in self._tallies if tally.is_begun]
        record.prompt_tokens = sum(tally.prompt_tokens for tally in begun)
        record.cached_tokens = sum(tally.cached_tokens for tally in begun)
        record.generation_tokens = sum(tally.completion_tokens for tally in begun)
        record.finish_reasons = [reason for tally in begun for _, reason in sorted(tally.finish_reasons.items())]
        if record.client_aborted:
            record.finish_reasons.append("abort")
        if begun:
            record.queue_seconds = max(tally.metrics.queue_time for tally in begun)
            record.prefill_seconds = max(tally.metrics.prefill_time for tally in begun)
            record.decode_seconds = max(tally.metrics.decode_time for tally in begun)
            record.time_to_first_token = min(tally.metrics.time_to_first_token for tally in begun)
        return bool(begun) or record.client_aborted

    async def __aenter__(self) -> Self:
        self.state.add_call(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._stream is not None:
                await self._stream.aclose()
        finally:
            self.state.remove_call(self)

    def _count(self, tally: PromptTally, output: RequestOutput) -> None:
        first = None if tally.is_begun else output.metrics.time_to_first_token or None
        self.state.metrics.observe_token_times(first, output.metrics.between_tokens)
        tally.add(output)

    def _completion_tokens(self) -> int:
        return 0 if self.hides_output else sum(tally.completion_tokens for tally in self._tallies)


async def _merge(sources: Sequence[Source]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all sources, as they come. A source is asked for more when its last output was taken."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(1)

    async def pump(index: int, source: Source) -> None:
        try:
            async with aclosing(source):
                async for output in source:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        num_live = len(tasks)
        while num_live:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_live -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def _tenant(api_key: bytes | None, user: str | None) -> str | None:
    """Who has a share of the engine: a key; where there are none, a user. Keys cannot win by making up users."""
    return user if api_key is None else api_key.decode("ascii")


def _rate(tokens: int, seconds: float) -> float:
    return round(max(0, tokens) / seconds, 3) if seconds > 0 else 0.0
