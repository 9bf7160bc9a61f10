"""Drives a Scheduler and its KV cache without a model, and checks after every step all that must hold.

The fake model's KV of a position is a digest of the request's tokens up to that position, and the next token is a
function of the last digest. So a request that is ever given a wrong, stale or overwritten slot is caught at the read,
and the right output of each request is known without any scheduling (`Oracle`).
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.kvcache.block_hash import same_content
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.scheduler import Scheduler

VOCAB_SIZE = 97


def digest(before: int, token_id: int) -> int:
    """KV of the fake model: depends on every token so far."""
    return (before * 1_000_003 + token_id + 1) % (2**61 - 1)


def digests(token_ids: list[int]) -> list[int]:
    values, value = [], 0
    for token_id in token_ids:
        value = digest(value, token_id)
        values.append(value)
    return values


def sample(value: int, held_back: list[int]) -> int:
    token_id = value % VOCAB_SIZE
    while token_id in held_back:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


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


class FakeRunner:
    """Keeps rows and KV by the messages alone, as a model runner must."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[str, Row] = {}
        self.kv: dict[int, list[int | None]] = {}
        """Block id -> one value a slot."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.released_request_ids:
            self.rows.pop(request_id, None)
        for new in step.new_requests:
            assert new.request_id not in self.rows, "a request gets a second row"
            self.rows[new.request_id] = Row(new, list(new.token_ids), list(new.block_ids), -1, digests(new.token_ids))
        new_ids = {new.request_id for new in step.new_requests}
        for request_id, block_ids in step.new_block_ids.items():
            assert block_ids and request_id not in new_ids
            self.rows[request_id].block_ids += block_ids
        assert len(set(step.request_ids)) == len(step.request_ids)
        assert new_ids <= set(step.request_ids)
        owners = Counter(block_id for row in self.rows.values() for block_id in row.block_ids)
        sampled = [self._compute(*work, owners) for work in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)]  # fmt: skip
        return ModelRunnerOutput(request_ids=list(step.request_ids), sampled_token_ids=sampled)

    def _compute(self, request_id: str, start: int, num_tokens: int, owners: Counter[int]) -> list[int]:
        row = self.rows[request_id]
        if row.num_computed < 0:
            assert start % self.block_size == 0, "a cached prefix is whole blocks"
            row.num_computed = start
        assert start == row.num_computed and num_tokens >= 1
        end = start + num_tokens
        assert end <= len(row.token_ids), "more tokens scheduled than are known"
        assert len(row.block_ids) == -(-end // self.block_size), "the block table is not as long as the tokens need"
        for first in range(0, start, self.block_size):
            read = self.kv.get(row.block_ids[first // self.block_size], [])[: start - first]
            assert read == row.values[first : min(start, first + self.block_size)], (
                f"{request_id} reads another prompt's or an overwritten KV after position {first}"
            )
        for position in range(start, end):
            block_id, offset = row.block_ids[position // self.block_size], position % self.block_size
            assert owners[block_id] == 1, "a shared block is written"
            self.kv.setdefault(block_id, [None] * self.block_size)[offset] = row.values[position]
        row.num_computed = end
        if end < len(row.token_ids):
            return []
        row.append(sample(row.values[-1], row.held_back()))
        return [row.token_ids[-1]]

    def forget(self, block_ids: set[int]) -> None:
        """What these blocks hold may never be read again."""
        for block_id in block_ids:
            self.kv.pop(block_id, None)


@dataclass
class Known:
    """What the world itself knows of a request."""

    message: EngineCoreRequest
    arrival: int
    output: list[int] = field(default_factory=list)
    last: EngineCoreOutput | None = None
    num_preemptions: int = 0
    computed_when_preempted: int = -1
    num_chunks: int = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.last is None else self.last.finish_reason


class World:
    """A scheduler, a fake runner, and the checks."""

    def __init__(self, scheduler: SchedulerConfig, cache: CacheConfig, free_order=None, collisions=False) -> None:
        self.config, self.cache = scheduler, cache
        self.scheduler = Scheduler(scheduler, cache, free_order=free_order)
        self.runner = FakeRunner(cache.block_size)
        self.collisions = collisions
        self.live: dict[str, Known] = {}
        self.ended: list[Known] = []
        self.num_arrived = 0
        self.num_steps = 0
        self.last_step: SchedulerOutput | None = None

    def add(
        self, request_id: str, prompt: list[int], *, priority=0, salt=None, eos=(), max_tokens=8, **params
    ) -> Known:
        message = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, **params),
            eos_token_ids=list(eos),
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.add_request(message)
        self.live[request_id] = Known(message, self.num_arrived)
        self.num_arrived += 1
        self.check_now()
        return self.live[request_id]

    def abort(self, request_ids: list[str]) -> None:
        outputs = self.scheduler.abort_requests(request_ids)
        assert [out.request_id for out in outputs] == [i for i in dict.fromkeys(request_ids) if i in self.live]
        assert all(out.finish_reason is FinishReason.ABORT and out.new_token_ids == [] for out in outputs)
        self._take(outputs)
        self.check_now()

    def step(self, abort_in_flight=(), lose=None) -> list[EngineCoreOutput]:
        """One step. `abort_in_flight`: ids aborted before the result is in. `lose`: the step fails, either
        "unseen" by the runner or after it was "computed"."""
        before = {request.request_id: (request.num_computed_tokens, request.num_tokens) for request in self.running()}
        waiting = [request.request_id for request in self.scheduler._waiting]
        preemptions = self.scheduler.stats().num_preemptions
        step = self.last_step = self.scheduler.schedule()
        self.num_steps += 1
        self._check_budgets(step)
        self._check_order(step, before, waiting)
        self._note_preemptions(step, before, self.scheduler.stats().num_preemptions - preemptions)
        self.check_now()
        self._forget_free_blocks()
        result = self.runner.execute(step) if lose != "unseen" else None
        self.abort(list(abort_in_flight))
        if lose is not None:
            self._lose(step)
            return []
        outputs = self.scheduler.update(step, result)
        self._take(outputs)
        self.check_now()
        return outputs

    def drain(self, max_steps: int = 20_000) -> None:
        """Step until everybody has ended, then check that nothing is left and every output is right."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        assert not self.live, f"{list(self.live)} never end"
        assert not self.scheduler.has_unfinished_requests()
        last = self.scheduler.schedule()
        assert last.request_ids == []
        self.runner.execute(last)
        assert not self.runner.rows, "the runner keeps rows of ended requests"
        stats = self.scheduler.stats()
        assert stats.kv_blocks_in_use == stats.num_running == stats.num_waiting == 0
        assert stats.kv_blocks_free + stats.kv_blocks_cached == self.cache.num_blocks
        for known in self.ended:
            self.check_output(known)

    def running(self) -> list[Request]:
        return self.scheduler._running

    def key(self, known: Known) -> tuple[int, int]:
        return (known.message.priority if self.config.policy == "priority" else 0, known.arrival)

    def check_output(self, known: Known) -> None:
        """The tokens of a request are those it has alone, up to where it was aborted."""
        expected, reason, stop_reason = self.alone(known.message)
        if known.finish_reason is FinishReason.ABORT:
            assert known.output == expected[: len(known.output)]
            return
        assert known.output == expected
        assert (known.last.finish_reason, known.last.stop_reason) == (reason, stop_reason)

    def alone(self, message: EngineCoreRequest) -> tuple[list[int], FinishReason, int | None]:
        """What the fake model says to a prompt, without any engine."""
        params, tokens = message.sampling_params, list(message.prompt_token_ids)
        value = digests(tokens)[-1]
        room = min(self.config.max_model_len, self.cache.num_tokens)
        stops = [*message.eos_token_ids, *params.stop_token_ids]
        output: list[int] = []
        while True:
            output.append(sample(value, stops if len(output) < params.min_tokens else []))
            value = digest(value, output[-1])
            if output[-1] in message.eos_token_ids:
                return output, FinishReason.STOP, None
            if output[-1] in params.stop_token_ids:
                return output, FinishReason.STOP, output[-1]
            if len(output) == params.max_tokens or len(tokens) + len(output) == room:
                return output, FinishReason.LENGTH, None

    def check_now(self) -> None:
        """All that holds at any moment."""
        self.scheduler.audit()
        stats = self.scheduler.stats()
        held = {i for request in self.running() for i in self.scheduler._kv.block_ids(request.request_id)}
        assert stats.kv_blocks_in_use == len(held)
        assert stats.kv_blocks_total == self.cache.num_blocks
        assert stats.kv_blocks_free + stats.kv_blocks_cached + stats.kv_blocks_in_use == stats.kv_blocks_total
        assert stats.kv_blocks_free >= 0 and stats.kv_blocks_cached >= 0
        assert stats.kv_blocks_peak_in_use >= stats.kv_blocks_in_use
        assert self.cache.enable_prefix_caching or stats.kv_blocks_cached == stats.prefix_cache_queries == 0
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert 0 <= stats.kv_utilization <= 1
        assert stats.num_running + stats.num_waiting == len(self.live)
        assert stats.num_running <= self.config.max_num_seqs
        if not self.collisions:
            self._check_tails_go_first()

    def _check_tails_go_first(self) -> None:
        """A cached block is evicted before the one its prefix ends in."""
        pool = self.scheduler._kv.pool
        place = {block.block_id: index for index, block in enumerate(pool._free)}
        for block in pool._free:
            parent = block.content and block.content.parent
            if parent is not None:
                holder = pool.lookup(parent)
                assert holder is not None and same_content(holder.content, parent), f"{block} cannot be found any more"
                assert holder.ref_count or place[holder.block_id] > place[block.block_id]

    def _check_budgets(self, step: SchedulerOutput) -> None:
        config = self.config
        assert step.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(step.request_ids) <= config.max_num_seqs
        assert step.request_ids or not self.live, "nobody makes progress"
        for request_id, num_tokens, start in zip(
            step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        ):
            known = self.live[request_id]
            known.num_chunks += num_tokens < self._num_tokens(known) - start
            if not config.enable_chunked_prefill:
                assert num_tokens == self._num_tokens(known) - start
            elif config.long_prefill_token_threshold:
                assert num_tokens <= config.long_prefill_token_threshold

    def _check_order(self, step: SchedulerOutput, before: dict[str, tuple[int, int]], waiting: list[str]) -> None:
        preempted = [i for i in step.released_request_ids if i in before]
        admitted = [new.request_id for new in step.new_requests]
        assert not (preempted and admitted), "somebody is admitted in a step that preempted"
        assert admitted == waiting[: len(admitted)], "the head of the queue is passed"
        assert waiting == sorted(waiting, key=lambda i: self.key(self.live[i]))
        decoders = {i for i, (computed, tokens) in before.items() if tokens - computed == 1 and i not in preempted}
        if set(step.request_ids) - decoders:
            assert decoders <= set(step.request_ids), "a decoder waits for somebody's prompt"

    def _note_preemptions(self, step: SchedulerOutput, before: dict[str, tuple[int, int]], counted: int) -> None:
        victims = [i for i in step.released_request_ids if i in before and i in self.live]
        assert len(victims) == counted
        protected = {i for i in before if before[i][0] <= self.live[i].computed_when_preempted}
        for victim in victims:
            assert victim not in protected, "preempted again before it came further"
            for other in set(before) - protected - set(victims):
                assert self.key(self.live[other]) < self.key(self.live[victim]), f"{other} should go before {victim}"
        for victim in victims:
            self._preempted(victim, before[victim][0])

    def _preempted(self, request_id: str, num_computed: int) -> None:
        known = self.live[request_id]
        known.num_preemptions += 1
        known.computed_when_preempted = num_computed
        assert self.scheduler._requests[request_id].status is RequestStatus.WAITING

    def _lose(self, step: SchedulerOutput) -> None:
        computed = {request.request_id: request.num_computed_tokens for request in self.running()}
        self.scheduler.preempt_all()
        for request_id, num_computed in computed.items():
            self._preempted(request_id, num_computed)
        assert self.scheduler.num_running == 0
        self.check_now()

    def _forget_free_blocks(self) -> None:
        free = {block.block_id for block in self.scheduler._kv.pool._free if block.content is None}
        self.runner.forget(free)

    def _num_tokens(self, known: Known) -> int:
        return len(known.message.prompt_token_ids) + len(known.output)

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for out in outputs:
            known = self.live[out.request_id]
            known.output += out.new_token_ids
            known.last = out
            assert out.num_preemptions == known.num_preemptions
            assert out.num_cached_tokens < len(known.message.prompt_token_ids)
            if out.finish_reason is not None:
                self.ended.append(self.live.pop(out.request_id))


def make_world(
    *, num_blocks, block_size=16, caching=True, policy="fcfs", max_num_seqs=16, budget=256, max_model_len=None,
    chunked=True, threshold=0, free_order=None,
) -> World:  # fmt: skip
    """A world with defaults that do not get in the way."""
    return World(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len or num_blocks * block_size,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
            policy=policy,
        ),
        CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching),
        free_order,
    )
