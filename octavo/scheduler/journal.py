"""What an update changed in its requests, until its outputs have been delivered: so that they can be taken back."""

from collections.abc import Iterable

from octavo.protocol.messages import TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams
from octavo.scheduler.request import Request, RequestStatus


class UpdateJournal:
    """The requests an update may give tokens to or end, as they were before it."""

    __slots__ = ("_before", "num_generated_tokens")

    def __init__(self) -> None:
        self._before: list[tuple[Request, int, list[TokenLogprobs | None] | None, SamplingParams]] = []
        self.num_generated_tokens = 0
        """The scheduler's counter before the update."""

    def __bool__(self) -> bool:
        return bool(self._before)

    @property
    def requests(self) -> list[Request]:
        return [before[0] for before in self._before]

    def open(self, requests: Iterable[Request], num_generated_tokens: int) -> None:
        """To be called before anything changes."""
        self.num_generated_tokens = num_generated_tokens
        running = RequestStatus.RUNNING
        self._before = [
            (request, len(request.token_ids), request.prompt_logprobs, request.sampling_params)
            for request in requests
            if request.status is running
        ]

    def close(self) -> None:
        """The outputs are delivered, or the changes taken back."""
        self._before = []

    def take_back(self) -> list[Request]:
        """Remove what these requests were given, wherever the update stopped; a second call finds nothing to do.

        Returns:
            All of them: those that ended are to be live again.
        """
        for request, num_tokens, prompt_logprobs, sampling_params in self._before:
            del request.token_ids[num_tokens:]
            request.prompt_logprobs, request.sampling_params = prompt_logprobs, sampling_params
            if request.num_output_tokens == 0:
                request.first_token_time = request.last_token_time = 0.0
            if request.group is not None and sampling_params.prompt_logprobs is not None:
                request.group.sampling_params = sampling_params
        return self.requests
