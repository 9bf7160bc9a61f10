"""A model runner without a model: it keeps rows and block contents by the scheduler's messages alone.

Its KV of a position is a digest of all the request's inputs up to that position, and the next token is a function of
the last digest and the sample's index. So a request that is ever given a wrong, stale, overwritten or not yet written
slot is caught at the read, and the right output of each request is known without any scheduling.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from zlib import crc32

from octavo.protocol.messages import PromptEmbeds, TokenLogprobs
from octavo.protocol.scheduler_output import ModelRunnerOutput, NewRequest, SchedulerOutput

VOCAB_SIZE = 97


def digest(before: int, value: int) -> int:
    """KV of the fake model: depends on every input so far."""
    return (before * 1_000_003 + value + 1) % (2**61 - 1)


def digests(token_ids: list[int], embeds: PromptEmbeds | None = None) -> list[int]:
    """One digest a position. Positions of embeddings depend on their bytes, not on the placeholders."""
    inputs = list(token_ids)
    if embeds is not None:
        size = len(embeds.data) // embeds.shape[0]
        rows = range(embeds.shape[0])
        inputs[: len(rows)] = [VOCAB_SIZE + crc32(embeds.data[row * size : (row + 1) * size]) for row in rows]
    values, value = [], 0
    for entry in inputs:
        value = digest(value, entry)
        values.append(value)
    return values


def sample(value: int, sample_index: int, held_back: list[int]) -> int:
    token_id = (value + 31 * sample_index) % VOCAB_SIZE
    while token_id in held_back:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def prompt_entry(token_id: int, value_before: int) -> TokenLogprobs:
    """The log-probability of a prompt token after the position whose digest is `value_before`."""
    return TokenLogprobs(token_ids=[token_id], logprobs=[-float(value_before % 1000)], sampled_rank=1)


@dataclass
class Row:
    new: NewRequest
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    values: list[int]
    """Digest of each token."""

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.values.append(digest(self.values[-1], token_id))

    def held_back(self) -> list[int]:
        num_output = len(self.token_ids) - self.new.num_prompt_tokens
        return self.new.held_back_token_ids if num_output < self.new.sampling_params.min_tokens else []

    def prompt_logprobs(self, start: int, end: int) -> list[TokenLogprobs]:
        positions = range(start + 1, min(end + 1, self.new.num_prompt_tokens))
        return [prompt_entry(self.token_ids[position], self.values[position - 1]) for position in positions]


class FakeRunner:
    """Executes steps."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[str, Row] = {}
        self.kv: dict[int, list[int | None]] = {}
        """Block id -> one value a slot."""

    def execute(self, step: SchedulerOutput, failing: Collection[str] = ()) -> ModelRunnerOutput:
        """Requests in `failing` get an error instead of a token."""
        self._update_rows(step)
        self._copy_blocks(step.block_copies)
        owners = Counter(block_id for row in self.rows.values() for block_id in row.block_ids)
        result = ModelRunnerOutput(
            request_ids=list(step.request_ids), sampled_token_ids=[], logprobs={}, prompt_logprobs={}, failed={}
        )
        for request_id, start, num_tokens in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            row = self.rows[request_id]
            self._compute(row, start, num_tokens, owners)
            if row.new.sampling_params.prompt_logprobs is not None:
                result.prompt_logprobs[request_id] = row.prompt_logprobs(start, start + num_tokens)
            if request_id in failing:
                result.failed[request_id] = f"{request_id} cannot go on"
            sampled = [] if request_id in failing else self._sample(row)
            result.sampled_token_ids.append(sampled)
        return result

    def forget(self, block_ids: set[int]) -> None:
        """What these blocks hold may never be read again."""
        for block_id in block_ids:
            self.kv.pop(block_id, None)

    def _update_rows(self, step: SchedulerOutput) -> None:
        for request_id in step.released_request_ids:
            self.rows.pop(request_id, None)
        for new in step.new_requests:
            assert new.request_id not in self.rows, "a request gets a second row"
            values = digests(new.token_ids, new.prompt_embeds)
            self.rows[new.request_id] = Row(new, list(new.token_ids), list(new.block_ids), -1, values)
        new_ids = {new.request_id for new in step.new_requests}
        for request_id, block_ids in step.new_block_ids.items():
            assert block_ids and request_id not in new_ids
            self.rows[request_id].block_ids += block_ids
        assert len(set(step.request_ids)) == len(step.request_ids)
        assert new_ids <= set(step.request_ids)

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """All sources are read first."""
        targets = [target for _, target in pairs]
        assert len(targets) == len(set(targets)), "two copies have one target"
        read = [(target, list(self.kv.get(source, [None] * self.block_size))) for source, target in pairs]
        self.kv.update(read)

    def _compute(self, row: Row, start: int, num_tokens: int, owners: Counter[int]) -> None:
        name = row.new.request_id
        if row.num_computed < 0:
            forked = row.new.sampling_params.n > 1 and start == row.new.num_prompt_tokens - 1
            assert start % self.block_size == 0 or forked, "a cached prefix is whole blocks"
            assert start == 0 or row.new.sampling_params.prompt_logprobs is None, "prompt_logprobs would be missing"
            row.num_computed = start
        assert start == row.num_computed and num_tokens >= 1
        end = start + num_tokens
        assert end <= len(row.token_ids), "more tokens scheduled than are known"
        assert len(row.block_ids) == -(-end // self.block_size), "the block table is not as long as the tokens need"
        for first in range(0, start, self.block_size):
            read = self.kv.get(row.block_ids[first // self.block_size], [])[: start - first]
            assert read == row.values[first : min(start, first + self.block_size)], (
                f"{name} reads another prompt's or an overwritten KV after position {first}"
            )
        for position in range(start, end):
            block_id, offset = row.block_ids[position // self.block_size], position % self.block_size
            assert owners[block_id] == 1, "a shared block is written"
            self.kv.setdefault(block_id, [None] * self.block_size)[offset] = row.values[position]
        row.num_computed = end

    def _sample(self, row: Row) -> list[int]:
        if row.num_computed < len(row.token_ids):
            return []
        row.append(sample(row.values[-1], row.new.sample_index, row.held_back()))
        return [row.token_ids[-1]]
