"""The engine core: schedule, execute, update. Knows tokens only; text belongs to the front end.

What always holds: a call happens as a whole or not at all, wherever it fails, by whatever exception. One that was cut
short so badly that even the recovery did not come to its end is recovered from at the next call.
"""

from collections.abc import Callable
from typing import TypeVar

from octavo.errors import InvalidInput
from octavo.executor.base import Executor
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest
from octavo.protocol.stats import EngineStats
from octavo.scheduler.scheduler import Scheduler

T = TypeVar("T")


class EngineCore:
    """The loop over one scheduler and one executor. Called from one thread; `stats` may be read from any."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stats: EngineStats = scheduler.stats()
        """The state after the last call, replaced as a whole: another thread never sees half a step."""
        self.failed_request_ids: list[str] = []
        """If the last step failed: the requests it was computing, or the one it was about to schedule, as far as that
        is known. They are live, and waiting."""
        self.first_scheduled: list[str] = []
        """Requests that the last step began, by their own ids, though it may have failed since."""
        self._is_sound = True

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises InvalidInput if it can never be served or its id is in use."""
        self._whole(lambda: self.scheduler.add_request(request), InvalidInput)
        self.stats = self.scheduler.stats()

    def abort_requests(self, request_ids: list[str]) -> list[EngineCoreOutput]:
        """End requests and free their blocks now; unknown ids are ignored."""
        outputs = self._whole(lambda: self.scheduler.abort_requests(request_ids))
        self.stats = self.scheduler.stats()
        return outputs

    def has_unfinished_requests(self) -> bool:
        self._see_that_it_is_sound()
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Compute one step and return what it added to each request.

        If anything fails, the step never was: no request has got a token or ended by it. All are computed anew, so that
        the accounts stay right and the engine usable. Then the failure is raised.
        """
        unfinished = self.has_unfinished_requests()
        self.failed_request_ids, self.first_scheduled = [], []
        if not unfinished:
            return []
        try:
            return self._whole(self._step)
        finally:
            self.first_scheduled = self.scheduler.first_scheduled

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while requests hold blocks."""
        done = self._whole(self.scheduler.reset_prefix_cache)
        self.stats = self.scheduler.stats()
        return done

    def audit(self) -> None:
        """Raise AssertionError if the accounts of the KV cache are off, or a step has been left half-way."""
        self._see_that_it_is_sound()
        self.scheduler.audit()
        assert not self.scheduler.is_in_flight, "a step was neither updated nor given up"

    def shutdown(self) -> None:
        """Free the weights and the KV cache."""
        self.executor.shutdown()

    def _step(self) -> list[EngineCoreOutput]:
        step = self.scheduler.schedule()
        self.executor.execute_model(step).result()
        outputs = self.scheduler.update(step, self.executor.sample_tokens().result())
        stats = self.scheduler.stats()
        # From here to the caller nothing is called: a signal handler cannot come between the outputs and their owner.
        self.scheduler.commit()
        self.stats = stats
        return outputs

    def _whole(self, call: Callable[[], T], *refusals: type[Exception]) -> T:
        """Make a call that changes the scheduler. Recover if it raises; `refusals` change nothing."""
        self._see_that_it_is_sound()
        self._is_sound = False
        try:
            value = call()
        except refusals:
            self._is_sound = True
            raise
        except BaseException:
            self._recover()
            raise
        self._is_sound = True
        return value

    def _see_that_it_is_sound(self) -> None:
        if not self._is_sound:
            self._recover()

    def _recover(self) -> None:
        self.failed_request_ids = self.scheduler.recover()
        self.executor.reset()
        self.stats = self.scheduler.stats()
        self._is_sound = True
