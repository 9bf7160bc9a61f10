"""The executor's contract."""

from abc import ABC, abstractmethod
from concurrent.futures import Future

from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Runs steps on one or more workers. Called from the engine core's thread only.

    `execute_model` and `sample_tokens` alternate; both return futures, so that a caller may prepare the next step or
    a sampling mask meanwhile. A future carries the worker's exception; after one, `reset` must be called before the
    next step. After `shutdown` nothing may be called.
    """

    @abstractmethod
    def execute_model(self, step: SchedulerOutput) -> "Future[None]":
        """Compute the scheduled tokens of one step."""

    @abstractmethod
    def sample_tokens(self) -> "Future[ModelRunnerOutput]":
        """Draw the tokens of the step that was executed last."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every request, after a step that failed half-way."""

    @abstractmethod
    def kernel_report(self) -> dict[str, str]:
        """Kernel name of each kind of layer."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free the weights and the KV cache."""
