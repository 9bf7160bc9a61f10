"""The server of an engine core: one loop that follows messages, computes a step, publishes what came of it.

The same loop serves a core in a process of its own and one in a thread; only the socket addresses differ.

What always holds: messages are followed in the order they were sent, between two steps; the loop sleeps while nothing
is to be done; a step that fails ends the requests it was computing, each with an error, and nothing else; and whoever
is at the other end hears a last message before the server ends by itself.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import msgspec
import zmq

from octavo.engine.assemble import decode_config, make_core
from octavo.engine.core import EngineCore
from octavo.errors import InvalidInput, describe, encodable
from octavo.logging import get_logger
from octavo.protocol.core_messages import (
    AbortRequests,
    AddRequest,
    CallResult,
    CoreCall,
    CoreMethod,
    EngineFailed,
    EngineReady,
    FromCore,
    Heartbeat,
    RequestFailure,
    Shutdown,
    StartEngine,
    StepOutputs,
    ToCore,
)
from octavo.protocol.messages import EngineCoreOutput

logger = get_logger(__name__)

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

LAST_WORDS_SECONDS = 10
"""How long a failed server waits for the other end to have heard of it."""


class CoreServer:
    """Serves one core, built by the first message, until it is told to stop.

    Args:
        inbox: address to bind; `ToCore` messages come in here.
        outbox: address to connect to; `FromCore` messages go out here.
        build: makes the core. For tests.
    """

    def __init__(
        self,
        context: Context,
        inbox: str,
        outbox: str,
        build: Callable[[StartEngine], EngineCore] | None = None,
    ) -> None:
        self._context = context
        self._outbox_address = outbox
        self._build = build or (lambda start: make_core(decode_config(start.config), start.vocab_size))
        self._inbox = bind(context, inbox)
        self._outbox = connect(context, outbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._outputs: list[EngineCoreOutput] = []
        self._failures: list[RequestFailure] = []

    def run(self) -> bool:
        """Serve. Returns True if the server was told to stop, False if it failed."""
        try:
            start = self._decoder.decode(self._inbox.recv())
            if not isinstance(start, StartEngine):  # told to stop before it began
                return True
            with Pulse(self._context, self._outbox_address, start.heartbeat_interval) as pulse:
                return self._serve(start, pulse)
        finally:
            self._inbox.close()
            self._outbox.close(linger=1000)

    def _serve(self, start: StartEngine, pulse: "Pulse") -> bool:
        core = None
        try:
            core = self._build(start)
            self._send(EngineReady(stats=core.stats, kernels=core.executor.kernel_report()))
            while self._follow_messages(core):
                self._outputs += self._step(core, pulse)
                self._send(
                    StepOutputs(
                        outputs=self._outputs,
                        stats=core.stats,
                        failures=self._failures,
                        first_scheduled=core.first_scheduled,
                    )
                )
                self._outputs, self._failures = [], []
            return True
        except Exception as error:
            self._say_last_words(error, started=core is not None)
            return False
        finally:
            if core is not None:
                core.shutdown()

    def _follow_messages(self, core: EngineCore) -> bool:
        """Follow every message that is there, waiting for one if there is nothing to compute. False: stop."""
        flags = zmq.NOBLOCK if core.has_unfinished_requests() else 0
        while True:
            try:
                data = self._inbox.recv(flags)
            except zmq.Again:
                return True
            flags = zmq.NOBLOCK
            message = self._decoder.decode(data)
            if isinstance(message, Shutdown):
                return False
            self._follow(core, message)

    def _follow(self, core: EngineCore, message: ToCore) -> None:
        match message:
            case AddRequest(request):
                try:
                    core.add_request(request)
                except Exception as error:
                    self._fail(request.request_id, error)
            case AbortRequests(request_ids):
                self._outputs += core.abort_requests(request_ids)
            case CoreCall(call_id=call_id, method=method):
                self._send(_answer(core, call_id, method))
            case _:
                raise RuntimeError(f"unexpected message {type(message).__name__}")

    def _step(self, core: EngineCore, pulse: "Pulse") -> list[EngineCoreOutput]:
        """One step, if there is anything to compute.

        A step that fails would fail again with the same requests, so these end here.
        """
        try:
            with pulse.in_step():
                return core.step()
        except Exception as error:
            if not core.failed_request_ids:
                raise
            logger.exception(
                "A step failed; the requests it computed end with an error: %d", len(core.failed_request_ids)
            )
            for request_id in core.failed_request_ids:
                self._fail(request_id, error)
            core.abort_requests(core.failed_request_ids)
            return []

    def _fail(self, request_id: str, error: Exception) -> None:
        refused = isinstance(error, InvalidInput)
        message = encodable(str(error)) if refused else f"the engine failed on this request: {describe(error)}"
        self._failures.append(RequestFailure(request_id=request_id, message=message, is_invalid_input=refused))

    def _say_last_words(self, error: Exception, started: bool) -> None:
        refused = isinstance(error, InvalidInput) and not started
        if not refused:
            logger.exception("The engine core %s", "failed" if started else "could not be started")
        what = "the engine core failed" if started else "the engine core could not be started"
        message = encodable(str(error)) if refused else f"{what}: {describe(error)}"
        self._send(EngineFailed(message=message, is_invalid_input=refused))
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if self._inbox.poll(math.ceil(left * 1000)) and isinstance(
                self._decoder.decode(self._inbox.recv()), Shutdown
            ):
                return

    def _send(self, message: FromCore) -> None:
        send(self._outbox, self._encoder.encode(message))


class Pulse:
    """Sends a `Heartbeat` at a fixed interval, from a thread: it goes on while the core computes."""

    def __init__(self, context: Context, address: str, interval: float) -> None:
        self._interval = interval
        self._step_started: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(context, address), name="octavo-core-pulse", daemon=True
        )

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For as long as the core computes a step."""
        self._step_started = time.monotonic()
        try:
            yield
        finally:
            self._step_started = None

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self, context: Context, address: str) -> None:
        with connect(context, address) as socket:
            while True:
                started = self._step_started
                seconds = 0.0 if started is None else time.monotonic() - started
                send(socket, msgspec.msgpack.encode(Heartbeat(seconds_in_step=seconds)))
                if self._stopped.wait(self._interval):
                    return


def connect(context: Context, address: str) -> "zmq.Socket[bytes]":
    """A socket to `send` to `address`. What the other end has not taken yet waits in memory."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.linger = 0
    socket.connect(address)
    return socket


def send(socket: "zmq.Socket[bytes]", data: bytes) -> None:
    """Send without ever waiting. Dropped if the other end has been closed: nobody is there to read it."""
    with suppress(zmq.Again):
        socket.send(data, zmq.NOBLOCK)


def bind(context: Context, address: str) -> "zmq.Socket[bytes]":
    """A socket that receives what is sent to `address`."""
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.linger = 0
    socket.bind(address)
    return socket


def _answer(core: EngineCore, call_id: int, method: CoreMethod) -> CallResult:
    match method:
        case CoreMethod.STATS:
            return CallResult(call_id=call_id, value=core.stats)
        case CoreMethod.RESET_PREFIX_CACHE:
            return CallResult(call_id=call_id, value=core.reset_prefix_cache())
        case CoreMethod.AUDIT:
            try:
                core.audit()
            except AssertionError as error:
                return CallResult(call_id=call_id, error=encodable(str(error)))
            return CallResult(call_id=call_id)
