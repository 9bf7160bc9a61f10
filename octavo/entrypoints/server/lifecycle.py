"""The life of the server's process: start, loading, serving, the loss of the engine, the end.

    bind -> load -> ready -> (signal) -> drain -> end           exit status 0
                          -> core lost -> end                   1, or once a new core instead
                    (second signal) -> end at once              128 + its number

What holds: what can be refused is refused before the model is loaded. From the first signal on no new work is taken.
However it ends, every open stream gets an end, the core is gone and the sockets are closed.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.server.app import make_app
from octavo.entrypoints.server.http_protocol import HttpProtocol
from octavo.entrypoints.server.listeners import Tls, describe_address, describe_os_error
from octavo.entrypoints.server.options import ServerArgs
from octavo.entrypoints.server.schema.chat import check_server_template
from octavo.entrypoints.server.state import ServerState
from octavo.errors import EngineDeadError, InvalidInput, describe
from octavo.loader.pull import find_model
from octavo.logging import get_logger
from octavo.metrics.tracing import make_tracer
from octavo.protocol.stats import EngineStats
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

logger = get_logger(__name__)

EXIT_OK, EXIT_ENGINE_LOST = 0, 1
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_WATCH_SECONDS = 0.1
"""Between two looks at the engine."""
_CLOSE_SECONDS = 3
"""What streams get to send their last event, once their requests have ended."""
_AT_ONCE_SECONDS = 2.0
"""The longest that an end at once takes."""
_BACKLOG = 2048
_SWITCH_SECONDS = 0.0005
"""How long the event loop waits for another thread of Python that computes; the interpreter's own 5 ms, for each turn
of the loop, can be seen in the latency of every answer."""


def serve(
    args: ServerArgs, options: dict[str, Any], api_keys: tuple[str, ...], listener: socket.socket, tls: Tls
) -> int:
    """Serve until the end; returns the exit status.

    Args:
        options: of the engine, as `AsyncLLM` takes them.
        listener: bound to the address; it stays the caller's.

    Raises:
        InvalidInput: the model cannot be served.
    """
    if args.chat_template is not None:
        check_server_template(args.chat_template, lambda: _load_tokenizer(options))
    tracer = make_tracer(args.otlp_traces_endpoint, (*args.served_model_name, options["model"])[0])
    engine = make_engine(args, options)
    _adopt_log()
    try:
        state = ServerState(engine, args, options["model"], api_keys, tracer)
        server = Server(state, options, listener, tls)
        _prepare_interpreter()
        with asyncio.Runner(loop_factory=server.uvicorn.config.get_loop_factory()) as runner:
            return runner.run(server.run())
    finally:
        engine.close()


def _adopt_log() -> None:
    """What the HTTP library says goes where this server's own lines go, and looks the same."""
    library = logging.getLogger("uvicorn")
    library.handlers = list(logging.getLogger("octavo").handlers)
    library.propagate = not library.handlers


def _prepare_interpreter() -> None:
    """Let nothing hold up the event loop for long that need not."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # what is imported lives as long as the process: no collection need look at it, for 30 ms and more


def _load_tokenizer(options: dict[str, Any]) -> Tokenizer:
    """The one that the engine will read. Raises InvalidInput."""
    if options["tokenizer"] is not None:
        return load_tokenizer(find_model(options["tokenizer"]))
    return load_tokenizer(find_model(options["model"], options["revision"]))


def make_engine(args: ServerArgs, options: dict[str, Any]) -> AsyncLLM:
    """An engine that has begun to load. Raises InvalidInput."""
    return AsyncLLM(
        heartbeat_timeout=args.heartbeat_timeout,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        max_wide_logprobs=args.max_wide_logprobs,
        **options,
    )


class Server:
    """One run of the server.

    Args:
        state: the engine in it may still be loading.
        options: of the engine, for another one.
        listener: bound; this class only listens.
        tls: None for plain HTTP.
    """

    def __init__(self, state: ServerState, options: dict[str, Any], listener: socket.socket, tls: Tls) -> None:
        self._state = state
        self._options = options
        self._listener = listener
        self._signals: list[int] = []
        self._end = asyncio.Event()
        self._idle = asyncio.Event()
        self._may_restart = state.args.restart_core
        self._exit_status = EXIT_OK
        state.on_idle = self._idle.set
        args = state.args
        self.uvicorn = _QuietUvicorn(
            uvicorn.Config(
                make_app(state),
                loop="uvloop",
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=args.uvicorn_log_level,
                access_log=False,
                root_path=args.root_path.rstrip("/"),
                backlog=_BACKLOG,
                timeout_keep_alive=args.timeout_keep_alive,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )

    async def run(self) -> int:
        """Serve until the end; returns the exit status. Raises InvalidInput if the model is refused while loading."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self.uvicorn.serve([self._listener]))
        try:
            await self._live(serving)
        finally:
            with suppress(Exception):
                await self._state.engine.shutdown()
            self.uvicorn.should_exit = True
            await serving
            await asyncio.to_thread(self._state.close)
        return self._exit_status

    async def _live(self, serving: "asyncio.Task[None]") -> None:
        """Until there is nothing more to wait for."""
        watch = asyncio.create_task(self._watch_engine())
        signalled = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait((watch, signalled, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and isinstance(error := serving.exception(), OSError):
                raise InvalidInput(
                    f"cannot listen at {self._address()}: {describe_os_error(error)}; choose another address"
                )
            if watch.done():
                watch.result()
            elif self._end.is_set():
                await self._drain()
        finally:
            watch.cancel()
            signalled.cancel()

    async def _watch_engine(self) -> None:
        """Load, and return when the engine is lost for good."""
        while True:
            await self._load()
            last = EngineStats()
            while not self._state.engine.errored:
                last = self._state.stats() or last
                await asyncio.sleep(_WATCH_SECONDS)
            self._state.is_loaded = False
            self._state.metrics.engine_ended(last)
            logger.error("The engine is lost: %s", self._state.engine.dead_error)
            if not self._may_restart or not await self._replace_engine():
                self._exit_status = EXIT_ENGINE_LOST
                await self._let_streams_end()
                return

    async def _load(self) -> None:
        try:
            await self._state.engine.wait_until_ready()
        except EngineDeadError:
            return
        self._state.is_loaded = True
        logger.info("ready: %s at %s", ", ".join(self._state.served_names), self._address())

    async def _replace_engine(self) -> bool:
        """Begin to load another engine, once."""
        self._may_restart = False
        logger.warning("Starting the engine core anew; when it is lost again, the server ends")
        await self._state.engine.shutdown()
        try:
            self._state.engine = await asyncio.to_thread(make_engine, self._state.args, self._options)
        except (InvalidInput, OSError) as error:
            logger.error("The engine core cannot be started anew: %s", describe(error))
            return False
        return True

    async def _drain(self) -> None:
        """Let what is running end, as long as there is time; a second signal ends that."""
        self._state.is_draining = True
        self._idle.clear()
        if not self._state.calls:
            logger.info("shutting down")
            return
        logger.info("shutting down: %d requests get %g s to finish", len(self._state.calls),
                    self._state.args.drain_timeout)  # fmt: skip
        with suppress(TimeoutError):
            async with asyncio.timeout(self._state.args.drain_timeout):
                await self._idle.wait()

    async def _let_streams_end(self) -> None:
        """The engine has failed every request; their answers need a moment to be sent."""
        self._idle.clear()
        if self._state.calls:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._idle.wait()

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            self._state.is_draining = True
            self._end.set()
            return
        if len(self._signals) == 2:
            self._end_at_once(128 + number)

    def _end_at_once(self, exit_status: int) -> None:
        """Wait for nothing more, not even for what cannot be interrupted."""
        logger.warning("a second signal: ending at once")
        self._exit_status = exit_status
        hard_end = threading.Timer(_AT_ONCE_SECONDS, os._exit, (exit_status,))
        hard_end.daemon = True
        hard_end.start()
        core_pid = self._state.engine.core_pid
        if core_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(core_pid, signal.SIGKILL)
        self.uvicorn.force_exit = True
        self._idle.set()

    def _address(self) -> str:
        return describe_address(self._listener, is_tls=self._state.args.ssl_certfile is not None)


class _QuietUvicorn(uvicorn.Server):
    """uvicorn, but signals are this module's matter."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
