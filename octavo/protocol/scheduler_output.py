"""Messages between the scheduler and the model runner: who computes how many tokens, and what came of it.

Both are versioned: a worker of another version must refuse them. What comes later (speculated tokens, encoder inputs,
grammar rows, KV-connector metadata) is added as a field with a default, written by the scheduler and read by the
component that owns it.
"""

import msgspec

from octavo.protocol.messages import PromptEmbeds, TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams

PROTOCOL_VERSION = 1


class NewRequest(msgspec.Struct, kw_only=True):
    """A request that gets a row in the runner: admitted for the first time, or resumed after a preemption."""

    request_id: str
    token_ids: list[int]
    """Prompt and, for a resumed request, the output so far."""
    num_prompt_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    held_back_token_ids: list[int] = []
    """Ids that may not be sampled before `min_tokens` outputs: end-of-sequence and stop tokens."""
    sample_index: int = 0
    """Which of the n samples of a request this is."""
    prompt_embeds: PromptEmbeds | None = None
    bad_words_token_ids: list[list[int]] = []


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step's work. The three lists are aligned and in batch order."""

    request_ids: list[str]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    """Position of the first scheduled token of each request."""
    new_requests: list[NewRequest] = []
    new_block_ids: dict[str, list[int]] = {}
    """Blocks appended to the block tables of requests that already have a row."""
    released_request_ids: list[str] = []
    """Requests that lose their row before this step: finished, aborted or preempted. Unknown ids are ignored."""
    block_copies: list[tuple[int, int]] = []
    """(source, target) block ids to copy before the step computes (copy-on-write). All sources are read first."""
    version: int = PROTOCOL_VERSION

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """What a step sampled, aligned with `SchedulerOutput.request_ids`."""

    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    """Empty for a request whose known tokens are not all computed yet."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """One entry a sampled token, only for requests that asked."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    """Only for requests that asked: entries for the prompt tokens at num_computed + 1 .. num_computed + num_scheduled,
    as far as they belong to the prompt, predicted by this step's tokens."""
    failed: dict[str, str] = {}
    """Requests of this step that cannot go on, through their own fault (a logits processor that raises, masks that
    leave no token), and why. They sampled nothing, whether a token was due or not; the others are not touched."""
    version: int = PROTOCOL_VERSION
