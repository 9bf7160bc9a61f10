"""What an update changes in its requests, until its outputs have been delivered: so that they can be taken back."""

from octavo.protocol.messages import TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.request import Request, RequestStatus

Computed = tuple[list[Request], SchedulerOutput, ModelRunnerOutput]


class UpdateJournal:
    """The requests an update may give tokens to or end, and what is needed to know them as they were before it.

    Nothing is written for each token: where a request's tokens ended before the update follows from its step.
    """

    __slots__ = ("_computed", "_ended_before", "_first_tokens", "num_generated_tokens")

    def __init__(self) -> None:
        self._computed: Computed | None = None
        self._ended_before: list[Request] = []
        self._first_tokens: list[tuple[Request, list[TokenLogprobs | None] | None, SamplingParams]] = []
        self.num_generated_tokens = 0
        """The scheduler's counter before the update."""

    @property
    def is_open(self) -> bool:
        return self._computed is not None

    @property
    def requests(self) -> list[Request]:
        """Those of the step that were live before the update."""
        if self._computed is None:
            return []
        return [request for request in self._computed[0] if request not in self._ended_before]

    def open(
        self, requests: list[Request], output: SchedulerOutput, result: ModelRunnerOutput, num_generated_tokens: int
    ) -> None:
        """To be called before anything changes, with what `Scheduler.update` has found to fit together."""
        running = RequestStatus.RUNNING
        self._ended_before = [request for request in requests if request.status is not running]
        self._first_tokens = []
        self.num_generated_tokens = num_generated_tokens
        self._computed = (requests, output, result)

    def first_token(self, request: Request) -> None:
        """To be called before the request hands out its prompt_logprobs."""
        self._first_tokens.append((request, request.prompt_logprobs, request.sampling_params))

    def close(self) -> None:
        """The outputs are delivered, or the changes taken back."""
        self._computed = None

    def take_back(self) -> list[Request]:
        """Remove what these requests were given, wherever the update stopped. A second call finds nothing to do.

        Returns:
            All of them: those that ended are to be live again.
        """
        if self._computed is None:
            return []
        requests, output, result = self._computed
        for request, start, num_tokens, sampled in zip(
            requests, output.num_computed_tokens, output.num_scheduled_tokens, result.sampled_token_ids, strict=True
        ):
            if sampled and request not in self._ended_before and request.request_id not in result.failed:
                del request.token_ids[start + num_tokens :]
        for request, prompt_logprobs, sampling_params in self._first_tokens:
            request.first_token_time = request.last_token_time = 0.0
            request.prompt_logprobs, request.sampling_params = prompt_logprobs, sampling_params
            if request.group is not None and sampling_params.prompt_logprobs is not None:
                request.group.sampling_params = sampling_params
        return self.requests
