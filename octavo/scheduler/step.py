"""One step while it is put together: what is left of the budget, and what has been given to whom."""

from octavo.protocol.scheduler_output import NewRequest, SchedulerOutput
from octavo.scheduler.request import Request


class Step:
    """Work gathered for one `SchedulerOutput`.

    Args:
        token_budget: tokens this step may compute.
    """

    __slots__ = (
        "_new_block_ids",
        "_new_requests",
        "_num_computed",
        "_num_scheduled",
        "current",
        "num_decoders",
        "preempted",
        "requests",
        "reserved_blocks",
        "token_budget",
        "yielded",
    )

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.reserved_blocks = 0
        """Blocks set aside for running requests that have not computed what they were admitted with."""
        self.num_decoders = 0
        """Running requests that have, and so may need one more block at any time."""
        self.preempted = False
        """Somebody lacked a block: nobody is admitted."""
        self.yielded: list[Request] = []
        """Preempted so that another can be admitted: these are not."""
        self.requests: list[Request] = []
        self.current: Request | None = None
        """The one that is being looked at, where more is done than to add it."""
        self._num_scheduled: list[int] = []
        self._num_computed: list[int] = []
        self._new_requests: list[NewRequest] = []
        self._new_block_ids: dict[str, list[int]] = {}

    def add(self, request: Request, num_tokens: int, new_block_ids: list[int] | None = None) -> None:
        """Schedule the next `num_tokens` tokens of a request that has a row."""
        self._count(request, num_tokens)
        if new_block_ids:
            self._new_block_ids[request.request_id] = new_block_ids

    def add_new(self, request: Request, num_tokens: int, block_ids: list[int]) -> None:
        """Schedule the first tokens of a request that gets a row in this step."""
        self._count(request, num_tokens)
        self._new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=block_ids,
                sampling_params=request.sampling_params,
                held_back_token_ids=request.held_back_token_ids,
                sample_index=request.sample_index,
                prompt_embeds=request.prompt_embeds,
                bad_words_token_ids=request.bad_words_token_ids,
            )
        )

    def to_output(self, released_request_ids: list[str], block_copies: list[tuple[int, int]]) -> SchedulerOutput:
        return SchedulerOutput(
            request_ids=[request.request_id for request in self.requests],
            num_scheduled_tokens=self._num_scheduled,
            num_computed_tokens=self._num_computed,
            new_requests=self._new_requests,
            new_block_ids=self._new_block_ids,
            released_request_ids=released_request_ids,
            block_copies=block_copies,
        )

    def _count(self, request: Request, num_tokens: int) -> None:
        self.token_budget -= num_tokens
        self.requests.append(request)
        self._num_scheduled.append(num_tokens)
        self._num_computed.append(request.num_computed_tokens)
