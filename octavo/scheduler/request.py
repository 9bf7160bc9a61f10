"""One request as the scheduler sees it. Only the scheduler writes its fields, but for the contents of its blocks."""

import enum

from octavo.kvcache.block_hash import BlockContent
from octavo.protocol.messages import EngineCoreRequest, RequestTimings


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    """Has no blocks and no row in the runner: new, or preempted."""
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A request from its arrival to its end.

    There is no prefill and no decode phase: a step moves `num_computed_tokens` toward `num_tokens`, and a request whose
    tokens are all computed samples one more.
    """

    __slots__ = (
        "arrival_number",
        "arrival_time",
        "block_contents",
        "cache_salt",
        "eos_token_ids",
        "first_token_time",
        "key",
        "last_token_time",
        "max_total_tokens",
        "min_tokens",
        "num_admitted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_computed_when_preempted",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "scheduled_time",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, message: EngineCoreRequest, arrival_number: int, max_total_tokens: int) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.sampling_params = params
        self.priority = message.priority
        self.cache_salt = message.cache_salt
        self.arrival_number = arrival_number
        self.key: tuple[int, ...] = ()
        """Place in the order of the policy; lower first, unique. Set by the scheduler."""
        self.status = RequestStatus.WAITING

        self.token_ids = list(message.prompt_token_ids)
        """Prompt, then output."""
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in the cache."""
        self.num_admitted_tokens = 0
        """Tokens known at the last admission: until they are computed, blocks for one more are set aside for it."""
        self.num_cached_tokens = 0
        """Tokens the first admission found in the prefix cache."""
        self.block_contents: list[BlockContent] = []
        """Kept by the KV cache manager."""

        self.max_total_tokens = max_total_tokens
        """The request ends when it has so many tokens, prompt included."""
        self.min_tokens = params.min_tokens
        self.eos_token_ids = frozenset(message.eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())

        self.num_preemptions = 0
        self.num_computed_when_preempted = -1
        self.arrival_time = message.arrival_time
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_protected(self) -> bool:
        """Was preempted, and has not yet come further than it was then: it may not be preempted again."""
        return self.num_computed_tokens <= self.num_computed_when_preempted

    @property
    def held_back_token_ids(self) -> list[int]:
        """Ids that may not be sampled before `min_tokens` outputs."""
        return sorted(self.eos_token_ids | self.stop_token_ids) if self.min_tokens else []

    def timings(self) -> RequestTimings:
        return RequestTimings(
            arrival=self.arrival_time,
            scheduled=self.scheduled_time,
            first_token=self.first_token_time,
            last_token=self.last_token_time,
        )
