"""Drives a Scheduler and its KV cache with a fake runner, and checks after every step all that must hold."""

import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fake_runner import VOCAB_SIZE, FakeRunner, digest, digests, prompt_entry, sample

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.kvcache.block_hash import same_content
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, PromptEmbeds, sample_request_ids
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import SchedulerOutput
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.scheduler import Scheduler

__all__ = ["VOCAB_SIZE", "Known", "World", "make_world"]


@dataclass
class Arrival:
    """What the samples of one request have in common."""

    message: EngineCoreRequest
    number: int
    sample_ids: list[str]
    num_cached_tokens: int | None = None
    prompt_logprobs_are_due: bool = False


@dataclass
class Known:
    """What the world itself knows of a request; with n > 1, of one sample."""

    arrival: Arrival
    index: int
    output: list[int] = field(default_factory=list)
    last: EngineCoreOutput | None = None
    num_preemptions: int = 0
    computed_when_preempted: int = -1
    num_chunks: int = 0

    @property
    def message(self) -> EngineCoreRequest:
        return self.arrival.message

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

    def add(self, request_id: str, prompt: list[int], **options) -> Known:
        """Add a request with n = 1."""
        return self.add_samples(request_id, prompt, 1, **options)[0]

    def add_samples(
        self, request_id: str, prompt: list[int], n: int, *, priority=0, salt=None, eos=(), max_tokens=8,
        embeds=False, tenant=None, **params,
    ) -> list[Known]:  # fmt: skip
        """Add a request. `embeds`: the prompt is given as embeddings made of its numbers."""
        message = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[0] * len(prompt) if embeds else prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, n=n, **params),
            eos_token_ids=list(eos),
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=salt,
            tenant=tenant,
        )
        if embeds:
            data = struct.pack(f"<{len(prompt)}f", *prompt)
            message.prompt_embeds = PromptEmbeds(data, "float32", (len(prompt), 1))
        self.scheduler.add_request(message)
        sample_ids = sample_request_ids(request_id, n)
        asked = message.sampling_params.prompt_logprobs is not None
        arrival = Arrival(message, self.num_arrived, sample_ids, prompt_logprobs_are_due=asked)
        known = [Known(arrival, index) for index in range(n)]
        self.live.update(zip(sample_ids, known, strict=True))
        self.num_arrived += 1
        self.check_now()
        return known

    def abort(self, request_ids: list[str]) -> None:
        """Abort samples, or requests with all of theirs."""
        expected = []
        for request_id in dict.fromkeys(request_ids):
            samples = [i for i, known in self.live.items() if request_id in (i, known.message.request_id)]
            expected += [i for i in samples if i not in expected]
        outputs = self.scheduler.abort_requests(request_ids)
        assert [out.request_id for out in outputs] == expected
        assert all(out.finish_reason is FinishReason.ABORT and out.new_token_ids == [] for out in outputs)
        self._take(outputs)
        self.check_now()

    def step(self, abort_in_flight=(), lose=None, failing=()) -> list[EngineCoreOutput]:
        """One step. `abort_in_flight`: ids aborted before the result is in. `lose`: the step fails, either
        "unseen" by the runner or after it was "computed". `failing`: ids that get an error instead of a token."""
        before = {request.request_id: (request.num_computed_tokens, request.num_tokens) for request in self.running()}
        waiting = [request.request_id for request in self.scheduler._waiting]
        preemptions = self.scheduler.stats().num_preemptions
        step = self.last_step = self.scheduler.schedule()
        self.num_steps += 1
        self._check_budgets(step)
        self._check_order(step, before, waiting)
        self._note_preemptions(step, before, self.scheduler.stats().num_preemptions - preemptions)
        self._check_new(step)
        self._check_writes(step)
        self.check_now()
        self._forget_free_blocks(step)
        result = self.runner.execute(step, failing) if lose != "unseen" else None
        if lose is None:
            for request_id, row in self.runner.rows.items():
                assert row.block_ids == self.scheduler._kv.block_ids(request_id)
        self.abort(list(abort_in_flight))
        if lose is not None:
            self._lose(step)
            return []
        outputs = self.scheduler.update(step, result)
        errors = {out.request_id: out.error for out in outputs if out.error is not None}
        assert errors == {i: message for i, message in result.failed.items() if i in self.live}
        self._take(outputs)
        self.check_now()
        return outputs

    def step_until(self, condition: Callable[[], object], max_steps: int = 500) -> None:
        """Step until `condition()` holds."""
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"did not come about within {max_steps} steps")

    def drain(self, max_steps: int = 20_000) -> None:
        """Step until everybody has ended, then check that nothing is left and every output is right."""
        self.step_until(lambda: not self.live, max_steps)
        assert not self.scheduler.has_unfinished_requests()
        last = self.scheduler.schedule()
        assert last.request_ids == []
        self.runner.execute(last)
        assert not self.runner.rows, "the runner keeps rows of ended requests"
        stats = self.scheduler.stats()
        assert stats.kv_blocks_in_use == stats.num_running == stats.num_waiting == 0
        assert stats.kv_blocks_free + stats.kv_blocks_cached == self.cache.num_blocks
        assert not self.scheduler._groups._by_id, "ids of ended groups are kept"
        for known in self.ended:
            self.check_output(known)

    def running(self) -> list[Request]:
        return self.scheduler._running

    def key(self, known: Known) -> tuple[int, int, int]:
        priority = known.message.priority if self.config.policy == "priority" else 0
        return (priority, known.arrival.number, known.index)

    def check_output(self, known: Known) -> None:
        """The tokens of a request are those it has alone, up to where it was aborted."""
        expected, reason, stop_reason = self.alone(known.message, known.index)
        if known.finish_reason is FinishReason.ABORT:
            assert known.output == expected[: len(known.output)]
            return
        assert known.output == expected
        assert (known.last.finish_reason, known.last.stop_reason) == (reason, stop_reason)

    def alone(self, message: EngineCoreRequest, index: int = 0) -> tuple[list[int], FinishReason, int | None]:
        """What the fake model says to a prompt, without any engine."""
        params, tokens = message.sampling_params, list(message.prompt_token_ids)
        value = digests(tokens, message.prompt_embeds)[-1]
        room = min(self.config.max_model_len, self.cache.num_tokens)
        stops = [*message.eos_token_ids, *params.stop_token_ids]
        output: list[int] = []
        while True:
            output.append(sample(value, index, stops if len(output) < params.min_tokens else []))
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
        written = self._tokens_in_blocks()
        assert stats.kv_blocks_in_use == len(written)
        slots = len(written) * self.cache.block_size
        assert stats.kv_utilization == (sum(written.values()) / slots if slots else 0)
        assert stats.kv_blocks_total == self.cache.num_blocks
        assert stats.kv_blocks_free + stats.kv_blocks_cached + stats.kv_blocks_in_use == stats.kv_blocks_total
        assert stats.kv_blocks_free >= 0 and stats.kv_blocks_cached >= 0
        assert stats.kv_blocks_peak_in_use >= stats.kv_blocks_in_use
        assert self.cache.enable_prefix_caching or stats.kv_blocks_cached == stats.prefix_cache_queries == 0
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert stats.num_running + stats.num_waiting == len(self.live)
        assert stats.num_running <= self.config.max_num_seqs
        if not self.collisions:
            self._check_tails_go_first()

    def _tokens_in_blocks(self) -> dict[int, int]:
        """Every block that has an owner, and the tokens written to it."""
        kv, size = self.scheduler._kv, self.cache.block_size
        owners = [(kv.block_ids(request.request_id), request.num_computed_tokens) for request in self.running()]
        owners += [([block.block_id for block in hold.blocks], hold.num_tokens) for hold in kv._holds]
        written: dict[int, int] = {}
        for block_ids, num_tokens in owners:
            for index, block_id in enumerate(block_ids):
                tokens = max(0, min(size, num_tokens - index * size))
                written[block_id] = max(written.get(block_id, 0), tokens)
        return written

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
        if not self.config.fair_share:
            assert not (preempted and admitted), "somebody is admitted in a step that preempted"
        for tenant in {known.message.tenant for known in self.live.values()} if self.config.fair_share else [None]:
            self._check_admissions(
                [i for i in admitted if not self.config.fair_share or self.live[i].message.tenant == tenant],
                [i for i in waiting if not self.config.fair_share or self.live[i].message.tenant == tenant],
            )
        decoders = {i for i, (computed, tokens) in before.items() if tokens - computed == 1 and i not in preempted}
        if set(step.request_ids) - decoders:
            assert decoders <= set(step.request_ids), "a decoder waits for somebody's prompt"

    def _check_admissions(self, admitted: list[str], waiting: list[str]) -> None:
        """Of one tenant with fair share, else of all."""
        assert admitted == sorted(admitted, key=lambda i: self.key(self.live[i]))
        passed = [i for i in waiting if i not in admitted]
        if admitted and passed:
            assert self.key(self.live[admitted[-1]]) < self.key(self.live[passed[0]]), "the head of the queue is passed"
        assert waiting == sorted(waiting, key=lambda i: self.key(self.live[i]))

    def turns(self, running) -> dict[str, int]:
        """Place of each running request among those of its tenant; 0 without fair share."""
        counts: Counter[str | None] = Counter()
        turns = dict.fromkeys(running, 0)
        for request_id in sorted(running, key=lambda i: self.key(self.live[i])) if self.config.fair_share else ():
            tenant = self.live[request_id].message.tenant
            turns[request_id] = counts[tenant]
            counts[tenant] += 1
        return turns

    def _note_preemptions(self, step: SchedulerOutput, before: dict[str, tuple[int, int]], counted: int) -> None:
        victims = [i for i in step.released_request_ids if i in before and i in self.live]
        assert len(victims) == counted
        if not self.config.fair_share:
            assert not (victims and self.scheduler._groups.holds), "somebody is preempted for blocks that nobody needs"
        turns = self.turns(before)
        protected = {i for i in before if before[i][0] <= self.live[i].computed_when_preempted}
        for victim in victims:
            assert victim not in protected, "preempted again before it came further"
            for other in set(before) - protected - set(victims):
                places = [(turns[i], self.key(self.live[i])) for i in (other, victim)]
                assert places[0] < places[1], f"{other} should go before {victim}"
        for victim in victims:
            self._preempted(victim, before[victim][0])

    def _preempted(self, request_id: str, num_computed: int) -> None:
        known = self.live[request_id]
        known.num_preemptions += 1
        known.computed_when_preempted = num_computed
        assert self.scheduler._requests[request_id].status is RequestStatus.WAITING

    def _check_new(self, step: SchedulerOutput) -> None:
        for new in step.new_requests:
            known = self.live[new.request_id]
            assert (new.sample_index, new.prompt_embeds) == (known.index, known.message.prompt_embeds)
            asks = new.sampling_params.prompt_logprobs is not None
            assert asks == known.arrival.prompt_logprobs_are_due, "prompt_logprobs are computed once, and then no more"

    def _check_writes(self, step: SchedulerOutput) -> None:
        """Nobody else owns, and nobody can find, a block that is written to."""
        size = self.cache.block_size
        for request_id, start, num_tokens in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            block_ids = self.scheduler._kv.block_ids(request_id)
            for block_id in block_ids[start // size : -(-(start + num_tokens) // size)]:
                block = self.scheduler._kv.pool.blocks[block_id]
                assert block.ref_count == 1 and block.content is None, f"{request_id} writes to {block}"

    def _lose(self, step: SchedulerOutput) -> None:
        computed = {request.request_id: request.num_computed_tokens for request in self.running()}
        self.scheduler.recover()
        for request_id, num_computed in computed.items():
            self._preempted(request_id, num_computed)
        assert self.scheduler.num_running == 0
        self.check_now()

    def _forget_free_blocks(self, step: SchedulerOutput) -> None:
        free = {block.block_id for block in self.scheduler._kv.pool._free if block.content is None}
        self.runner.forget(free - {source for source, _ in step.block_copies})

    def _num_tokens(self, known: Known) -> int:
        return len(known.message.prompt_token_ids) + len(known.output)

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for out in outputs:
            known = self.live[out.request_id]
            known.output += out.new_token_ids
            known.last = out
            assert out.num_preemptions == known.num_preemptions
            assert out.num_cached_tokens < len(known.message.prompt_token_ids)
            if out.new_token_ids:
                self._check_first_of_arrival(known.arrival, out)
            if out.finish_reason is not None:
                self.ended.append(self.live.pop(out.request_id))

    def _check_first_of_arrival(self, arrival: Arrival, out: EngineCoreOutput) -> None:
        if arrival.num_cached_tokens is None:
            arrival.num_cached_tokens = out.num_cached_tokens
        assert out.num_cached_tokens == arrival.num_cached_tokens, "samples differ in num_cached_tokens"
        assert (out.prompt_logprobs is not None) == arrival.prompt_logprobs_are_due
        if arrival.prompt_logprobs_are_due:
            tokens = arrival.message.prompt_token_ids
            values = digests(tokens, arrival.message.prompt_embeds)
            assert out.prompt_logprobs == [prompt_entry(*pair) for pair in zip(tokens[1:], values, strict=False)]
            arrival.prompt_logprobs_are_due = False


def make_world(
    *, num_blocks, block_size=16, caching=True, policy="fcfs", max_num_seqs=16, budget=256, max_model_len=None,
    chunked=True, threshold=0, free_order=None, fair_share=False,
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
            fair_share=fair_share,
        ),
        CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching),
        free_order,
    )
