"""One worker in the caller's process: the futures are done when they are returned."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from octavo.config.engine_config import EngineConfig
from octavo.executor.base import Executor
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.worker.worker import Worker

T = TypeVar("T")


class UniProcExecutor(Executor):
    """The executor of a single device."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        """Load the model and allocate the KV cache. Raises InvalidInput if the files do not hold the model."""
        self.worker = Worker(config.worker, config.model, config.load, config.parallel)
        self.worker.load_model(config.scheduler.max_model_len)
        self.worker.initialize_cache(config.scheduler, config.cache, vocab_size)

    def execute_model(self, step: SchedulerOutput) -> "Future[None]":
        return _done(lambda: self.worker.execute_model(step))

    def sample_tokens(self) -> "Future[ModelRunnerOutput]":
        return _done(self.worker.sample_tokens)

    def reset(self) -> None:
        self.worker.reset()

    def kernel_report(self) -> dict[str, str]:
        return self.worker.kernel_report()

    def shutdown(self) -> None:
        del self.worker


def _done(call: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future
