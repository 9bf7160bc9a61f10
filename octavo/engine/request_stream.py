"""RequestStream: where the outputs of one request wait for the coroutine that reads them.

Outputs come from another thread. A reader that is slower than the engine finds them merged into one, so what waits
never holds more than the request's whole output.
"""

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from octavo.protocol.outputs import CompletionOutput, RequestOutput


class RequestStream:
    """One request, as its reader sees it. To be made in the event loop that reads.

    Args:
        request_id: the request's own, unique id.
        user_id: the id its outputs show.
    """

    def __init__(self, request_id: str, user_id: str) -> None:
        self.request_id = request_id
        self.user_id = user_id
        self.loop = asyncio.get_running_loop()
        self.arrival_time = time.monotonic()
        self.n = 1
        """Samples of the request."""
        self.is_delta = False
        """Outputs hold what is new, and add up; otherwise the newest says it all."""
        self.is_sent = False
        """The core has the request, or will have it, and has not ended it."""
        self.is_abort_wanted = False
        self.is_left = False
        """Nobody reads any more."""
        self._lock = threading.Lock()
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output. From any thread; the reader is to be woken afterwards. Nothing follows a failure."""
        with self._lock:
            if self._error is not None:
                return
            self._pending = output if self._pending is None else merge(self._pending, output, self.is_delta)

    def fail(self, error: Exception) -> None:
        """End the stream with an error; a request that had finished before still hands out its last output."""
        with self._lock:
            if self._error is None:
                self._error = error

    async def next(self) -> RequestOutput:
        """The next output. Raises what the stream failed with."""
        while True:
            with self._lock:
                output, self._pending = self._pending, None
                if self._error is not None and (output is None or not output.finished):
                    raise self._error
                self._arrived.clear()
            if output is not None:
                return output
            await self._arrived.wait()


def wake(streams: Iterable[RequestStream]) -> list[RequestStream]:
    """Tell the readers of these streams to look, with one call into each event loop.

    Returns:
        The streams whose event loop is closed: nobody will ever read them.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    lost = []
    for loop, waiting in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_arrived, waiting)
        except RuntimeError:
            lost += waiting
    return lost


def _set_arrived(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream._arrived.set()


def merge(first: RequestOutput, second: RequestOutput, is_delta: bool) -> RequestOutput:
    """What a reader that missed `first` gets instead of `second`: of each sample everything new, in one piece."""
    completions = {completion.index: completion for completion in first.outputs}
    for completion in second.outputs:
        earlier = completions.get(completion.index)
        if is_delta and earlier is not None:
            completion = _join(earlier, completion)
        completions[completion.index] = completion
    return replace(
        second,
        outputs=[completions[index] for index in sorted(completions)],
        metrics=replace(second.metrics, between_tokens=first.metrics.between_tokens + second.metrics.between_tokens),
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
    )


def _join(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=None if second.logprobs is None else (first.logprobs or []) + second.logprobs,
    )
