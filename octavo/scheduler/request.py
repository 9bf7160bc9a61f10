"""One request as the scheduler sees it: with n > 1, one sample. Only the scheduler writes its fields, but for the
contents of its blocks.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from octavo.kvcache.block_hash import BlockContent
from octavo.protocol.messages import EngineCoreRequest, RequestTimings, TokenLogprobs

if TYPE_CHECKING:
    from octavo.scheduler.sample_group import SampleGroup


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
        "bad_words_token_ids",
        "block_contents",
        "cache_salt",
        "eos_token_ids",
        "first_token_time",
        "group",
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
        "prompt_embeds",
        "prompt_logprobs",
        "request_id",
        "sample_index",
        "sampling_params",
        "scheduled_time",
        "status",
        "stop_token_ids",
        "tenant",
        "token_ids",
        "turn",
    )

    def __init__(
        self,
        message: EngineCoreRequest,
        arrival_number: int,
        max_total_tokens: int,
        group: SampleGroup | None = None,
        sample_index: int = 0,
    ) -> None:
        params = message.sampling_params if group is None else group.sampling_params
        self.request_id = message.request_id if group is None else group.sample_ids[sample_index]
        self.sampling_params = params
        self.group = group
        """Only with n > 1."""
        self.sample_index = sample_index
        self.priority = message.priority
        self.tenant = message.tenant
        self.turn = 0
        """Place among the running requests of its tenant, see `fair_share`; without fair share always 0."""
        self.cache_salt = message.cache_salt
        self.prompt_embeds = message.prompt_embeds
        self.bad_words_token_ids = message.bad_words_token_ids
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
        """Tokens the first admission, with n > 1 that of the first sample, found in the prefix cache."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """Of each prompt token but the first, as far as they are computed; None when none are asked for any more."""
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * (self.num_prompt_tokens - 1)
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

    def collect_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Keep entries for the prompt tokens at `start` and after, computed anew or not."""
        assert self.prompt_logprobs is not None and start - 1 + len(entries) <= len(self.prompt_logprobs)
        self.prompt_logprobs[start - 1 : start - 1 + len(entries)] = entries

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """All of them, once: from now on the request does not ask for them any more."""
        if self.prompt_logprobs is None:
            return None
        entries = [entry for entry in self.prompt_logprobs if entry is not None]
        assert len(entries) == len(self.prompt_logprobs), f"the runner left out prompt_logprobs of {self.request_id}"
        self.prompt_logprobs = None
        self.sampling_params = msgspec.structs.replace(self.sampling_params, prompt_logprobs=None)
        return entries

    def timings(self) -> RequestTimings:
        return RequestTimings(
            arrival=self.arrival_time,
            scheduled=self.scheduled_time,
            first_token=self.first_token_time,
            last_token=self.last_token_time,
        )
