"""ServerState: what all requests share. Made once, read by every route as `request.app.state.server`.

Belongs to the event loop; the only thread beside it parses large bodies. What holds: `why_not_ready` says in one
place whether work is taken, and every `Call` in progress is in `calls`.
"""

import hashlib
import hmac
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.server.errors import ApiError, unavailable
from octavo.entrypoints.server.options import ServerArgs
from octavo.errors import EngineDeadError, InvalidInput, short_repr
from octavo.metrics.prometheus import PrometheusExporter
from octavo.metrics.tracing import RequestTracer
from octavo.protocol.stats import EngineStats

if TYPE_CHECKING:
    from octavo.entrypoints.server.serving import Call


class ServerState:
    """Everything a route may need.

    Args:
        engine: takes the requests; another may take its place.
        args: the server's options.
        model: what --model says.
        api_keys: those that open the routes; none: they are open.
        tracer: gets a record of each request.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        args: ServerArgs,
        model: str,
        api_keys: tuple[str, ...] = (),
        tracer: RequestTracer | None = None,
    ) -> None:
        self.engine = engine
        self.args = args
        self.model = model
        self.served_names = args.served_model_name or (model,)
        self.key_digests = {_digest(key.encode()): key.encode() for key in api_keys}
        """SHA-256 of each key -> the key."""
        self.tracer = tracer
        self.metrics = PrometheusExporter(self.served_names[0], args.metrics_compat)
        self.started = int(time.time())
        """By the wall clock, seconds since 1970."""
        self.is_loaded = False
        self.is_draining = False
        self.calls: set[Call] = set()
        self.parser = ThreadPoolExecutor(1, thread_name_prefix="octavo-parser")
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last call has ended."""

    def why_not_ready(self) -> ApiError | None:
        """The refusal of new work, if none is taken now."""
        if self.is_draining:
            return unavailable("the server is shutting down and takes no more requests", "shutting_down")
        if self.engine.errored:
            return unavailable(f"the engine is not there: {self.engine.dead_error}", "engine_dead")
        if not self.is_loaded:
            return unavailable("the model is still loading; try again in a moment", "loading")
        return None

    def require_ready(self) -> None:
        """Raise that refusal."""
        if (refusal := self.why_not_ready()) is not None:
            raise refusal

    def served_name(self, asked: str | None) -> str:
        """What the answer calls the model. Raises ApiError 404 for one that is not served."""
        if asked is None:
            return self.served_names[0]
        if asked not in self.served_names:
            names = ", ".join(self.served_names)
            raise ApiError(
                404,
                f"model={short_repr(asked, 200)} is not served here; use {names}",
                param="model",
                code="model_not_found",
            )
        return asked

    def find_key(self, authorization: bytes | None) -> bytes | None:
        """The key that an Authorization header shows. None: it shows no valid one.

        Every key is compared, each in constant time, so that the time taken tells nothing.
        """
        scheme, _, shown = (authorization or b"").partition(b" ")
        digest = _digest(shown.strip())
        found = None
        for known, key in self.key_digests.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found if scheme.lower() == b"bearer" else None

    def cache_salt(self, key: bytes | None, asked: str | None) -> str | None:
        """The salt of a request's cached prefixes: its own and, with cache isolation, its key's, bound together."""
        if self.args.cache_isolation != "key" or key is None:
            return asked
        text = b"none" if asked is None else b"salt:" + asked.encode()
        return hmac.new(key, text, hashlib.sha256).hexdigest()

    def stats(self) -> EngineStats | None:
        """Of the engine's core; None while there is none."""
        try:
            return self.engine.stats()
        except (EngineDeadError, InvalidInput):
            return None

    def add_call(self, call: "Call") -> None:
        self.calls.add(call)

    def remove_call(self, call: "Call") -> None:
        self.calls.discard(call)
        if not self.calls:
            self.on_idle()

    def close(self) -> None:
        """Let go of the threads. May take a moment: the tracer sends what is left."""
        self.parser.shutdown(wait=False, cancel_futures=True)
        if self.tracer is not None:
            self.tracer.shutdown()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
