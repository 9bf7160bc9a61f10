"""How the front end reaches the engine core: here by a call in the same process."""

from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest
from octavo.protocol.stats import EngineStats


class InprocClient:
    """A core in the caller's process. After `shutdown` every call raises EngineDeadError."""

    def __init__(self, core: EngineCore) -> None:
        self._core: EngineCore | None = core

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise EngineDeadError("the engine is closed; make a new one")
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
