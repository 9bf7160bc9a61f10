"""How the front end reaches the engine core: by a call in the same process, or by messages over a socket."""

import itertools
import math
import os
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import msgspec
import zmq

from octavo.engine.core import EngineCore
from octavo.engine.core_launcher import CoreLauncher, CoreProcess, CoreThread
from octavo.engine.core_server import bind, connect, send
from octavo.errors import EngineDeadError, InvalidInput, describe
from octavo.logging import get_logger
from octavo.protocol.core_messages import (
    CallResult,
    CoreCall,
    CoreMethod,
    EngineFailed,
    EngineReady,
    FromCore,
    Heartbeat,
    Shutdown,
    StartEngine,
    StepOutputs,
    ToCore,
)
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest
from octavo.protocol.stats import EngineStats

logger = get_logger(__name__)

CallValue: TypeAlias = EngineStats | bool | None
CLOSED = "the engine is closed; make a new one"
_LONGEST_TICK = 1.0
"""Seconds between two heartbeats at most, and between two looks at the clock."""
_START_SECONDS = 120.0
"""While it loads, a core may be silent this long: reading a large library or file can hold the interpreter."""
_STOP_SECONDS = 5.0
"""How long a core that was told to stop may take to end the step it is in."""


class InprocClient:
    """A core in the caller's process. After `shutdown` every call raises EngineDeadError."""

    def __init__(self, core: EngineCore) -> None:
        self._core: EngineCore | None = core

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise EngineDeadError(CLOSED)
        return self._core

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> list[EngineCoreOutput]:
        return self.core.abort_requests(request_ids)

    def step(self) -> list[EngineCoreOutput]:
        return self.core.step()

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests()

    def stats(self) -> EngineStats:
        return self.core.stats

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def audit(self) -> None:
        self.core.audit()

    def kernel_report(self) -> dict[str, str]:
        return self.core.executor.kernel_report()

    def shutdown(self) -> None:
        """Free the core; a second call does nothing."""
        if self._core is not None:
            core, self._core = self._core, None
            core.shutdown()


class CoreListener(Protocol):
    """Who hears from a `SocketClient`. Called from its threads, never from two at once but for `core_ended`."""

    def step_done(self, step: StepOutputs) -> None:
        """The core's loop made a turn."""

    def tick(self) -> None:
        """Called at every heartbeat."""

    def core_ended(self, error: Exception) -> None:
        """The last call: every request is lost, and every later one raises this error."""


class SocketClient:
    """A core behind a socket: in a process of its own or in a thread. Thread-safe; nothing blocks but `close`.

    What always holds: the first of death, silence, failure and `close` ends it, `error` says which, and from then on
    every call raises that.

    Args:
        listener: hears of everything.
        kind: "process" or "thread".
        heartbeat_timeout: seconds without a sign of life after which a core is taken for dead.
        step_timeout: seconds after which a core that is still in the same step is.

    Raises:
        InvalidInput: there is no folder for the sockets.
    """

    def __init__(self, listener: CoreListener, *, kind: str, heartbeat_timeout: float, step_timeout: float) -> None:
        self._listener = listener
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._tick = min(heartbeat_timeout / 10, _LONGEST_TICK)
        self.error: Exception | None = None
        self.stats = EngineStats()
        """The core's state after its last turn."""
        self.kernels: Future[dict[str, str]] = Future()
        """Done when the model is loaded: kernel name of each kind of layer."""
        self._calls: dict[int, Future[CallValue]] = {}
        self._call_ids = itertools.count()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_closing = False
        self.was_closed = False
        """It was `close` that ended it."""
        self._closed = threading.Event()
        self._context = zmq.Context()
        self.launcher: CoreLauncher = CoreProcess() if kind == "process" else CoreThread(self._context)
        self._encoder = msgspec.msgpack.Encoder()
        self._inbox = bind(self._context, self.launcher.outbox)
        self._inbox.bind("inproc://wake")
        self._waker = connect(self._context, "inproc://wake")
        self._outbox = connect(self._context, self.launcher.inbox)
        self._reader = threading.Thread(target=self._read, name="octavo-core-reader", daemon=True)

    def start(self, config: bytes, vocab_size: int) -> None:
        """Start the core, once. Returns while it is still loading: requests wait.

        Args:
            config: see `encode_config`.
            vocab_size: tokens the tokenizer knows.

        Raises:
            InvalidInput, OSError: this machine or Python cannot run the core in a process.
        """
        self._reader.start()
        try:
            self.launcher.start(self._server_ended)
        except BaseException:
            self.close()
            raise
        self.post(StartEngine(config=msgspec.Raw(config), vocab_size=vocab_size, heartbeat_interval=self._tick))

    def send(self, message: ToCore) -> None:
        """Raises what ended the core, or TypeError or OverflowError if the message cannot be encoded."""
        data = self._encoder.encode(message)
        with self._lock:
            self.check()
            send(self._outbox, data)

    def post(self, message: ToCore) -> None:
        """Send, unless the core has ended."""
        if self._is_forked():
            return
        data = self._encoder.encode(message)
        with self._lock:
            if self.error is None:
                send(self._outbox, data)

    def check(self) -> None:
        """Raise what ended the core, if anything has."""
        if self._is_forked():
            raise EngineDeadError("this engine belongs to the process that was forked; make a new one in this process")
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def call(self, method: CoreMethod) -> "Future[CallValue]":
        """Ask the core; the answer takes at most as long as one step."""
        call_id = next(self._call_ids)
        data = self._encoder.encode(CoreCall(call_id=call_id, method=method))
        with self._lock:
            self.check()
            future = self._calls[call_id] = Future()
            send(self._outbox, data)
        return future

    @property
    def core_pid(self) -> int | None:
        """The core's process, if it has one."""
        return self.launcher.pid if isinstance(self.launcher, CoreProcess) else None

    def close(self) -> None:
        """End the core and free everything. Returns when that is done, also to a second caller."""
        if self._is_forked():
            return
        with self._lock:
            first, self._is_closing = not self._is_closing, True
        if not first:
            self._closed.wait()
            return
        try:
            self.was_closed = self._end(EngineDeadError(CLOSED), kill=not self.kernels.done())
            ended = self.launcher.stop(_STOP_SECONDS)
            self._reader.join()
            for socket in (self._inbox, self._outbox, self._waker):
                socket.close()
            if ended:
                self._context.term()
            else:
                logger.warning("The core's thread is stuck in a step and cannot be ended; its memory stays taken")
        finally:
            self._closed.set()

    def _is_forked(self) -> bool:
        return os.getpid() != self._owner

    def _end(self, error: Exception, kill: bool = True) -> bool:
        """End with this error, unless there is one already: then False. With `kill` the core's memory is freed now."""
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
            calls, self._calls = self._calls, {}
            send(self._outbox, self._encoder.encode(Shutdown()))
            send(self._waker, b"")
        if not self._is_closing and not isinstance(error, InvalidInput):
            logger.error("The engine is lost: %s", error)
        if kill:
            self.launcher.kill()
        futures: list[Future[Any]] = [self.kernels, *calls.values()]
        for future in futures:
            with suppress(InvalidStateError):  # done or cancelled
                future.set_exception(type(error)(*error.args))
        self._listener.core_ended(error)
        return True

    def _server_ended(self, how: str) -> None:
        self._end(EngineDeadError(how))

    def _read(self) -> None:
        """Take what comes in, and notice when nothing does."""
        decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        silent, last_turn = 0.0, time.monotonic()
        try:
            while self.error is None:
                self._inbox.poll(math.ceil(self._tick * 1000))
                # Time in which this process itself did not run is not the core's silence.
                silent += min(time.monotonic() - last_turn, 2 * self._tick)
                last_turn = time.monotonic()
                while self.error is None and (data := self._receive()) is not None:
                    if data:
                        silent = 0.0
                        self._take(decoder.decode(data))
                self._check_silence(silent)
        except Exception as error:
            logger.exception("The front end of the engine failed")
            self._end(EngineDeadError(f"the front end of the engine failed: {describe(error)}"))

    def _receive(self) -> bytes | None:
        try:
            return self._inbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _check_silence(self, silent: float) -> None:
        limit = self._heartbeat_timeout
        if not self.kernels.done():
            limit = max(limit, _START_SECONDS)
        if silent > limit - 2 * self._tick:  # so that the limit is kept, whenever in a turn the silence began
            self._end(EngineDeadError(f"the engine core has given no sign of life for {limit:g} s"))

    def _take(self, message: FromCore) -> None:
        match message:
            case StepOutputs():
                self.stats = message.stats
                self._listener.step_done(message)
            case Heartbeat(seconds_in_step=seconds):
                if seconds > self._step_timeout:
                    self._end(EngineDeadError(
                        f"the engine core has been in one step for {seconds:.0f} s, "
                        f"longer than step_timeout={self._step_timeout:g}"
                    ))  # fmt: skip
                else:
                    self._listener.tick()
            case CallResult(call_id=call_id, value=value, error=error):
                future = self._calls.pop(call_id, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(value) if error is None else future.set_exception(AssertionError(error))
            case EngineReady(stats=stats, kernels=kernels):
                self.stats = stats
                with suppress(InvalidStateError):  # closed meanwhile
                    self.kernels.set_result(kernels)
            case EngineFailed(message=text, is_invalid_input=refused):
                self._end(InvalidInput(text) if refused else EngineDeadError(text))
