"""The engine core: schedule, execute, update. Knows tokens only; text belongs to the front end."""

from octavo.executor.base import Executor
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.protocol.stats import EngineStats
from octavo.scheduler.scheduler import Scheduler


class EngineCore:
    """The loop over one scheduler and one executor. Called from one thread; `stats` may be read from any."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stats: EngineStats = scheduler.stats()
        """The state after the last call, replaced as a whole: another thread never sees half a step."""
        self.failed_request_ids: list[str] = []
        """If the last step failed: the requests it was computing. They are live, and waiting."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises InvalidInput if it can never be served or its id is in use."""
        self.scheduler.add_request(request)
        self.stats = self.scheduler.stats()

    def abort_requests(self, request_ids: list[str]) -> list[EngineCoreOutput]:
        """End requests and free their blocks now; unknown ids are ignored."""
        outputs = self.scheduler.abort_requests(request_ids)
        self.stats = self.scheduler.stats()
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Compute one step and return what it added to each request.

        If the step fails, every running request goes back to the queue with its tokens, so that the accounts stay
        right and the engine usable; then the failure is raised.
        """
        if not self.scheduler.has_unfinished_requests():
            return []
        self.failed_request_ids = []
        step = self.scheduler.schedule()
        try:
            result = self._execute(step)
        except BaseException:
            self.failed_request_ids = step.request_ids
            self.executor.reset()
            self.scheduler.preempt_all()
            self.stats = self.scheduler.stats()
            raise
        outputs = self.scheduler.update(step, result)
        self.stats = self.scheduler.stats()
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while requests hold blocks."""
        done = self.scheduler.reset_prefix_cache()
        self.stats = self.scheduler.stats()
        return done

    def audit(self) -> None:
        """Raise AssertionError if the accounts of the KV cache are off."""
        self.scheduler.audit()

    def shutdown(self) -> None:
        """Free the weights and the KV cache."""
        self.executor.shutdown()

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.executor.execute_model(step).result()
        return self.executor.sample_tokens().result()
