"""The scheduler: admission, budgets, preemption, and what a step's tokens mean for each request.

What always holds between two calls
- A request is in exactly one place: waiting without blocks, or running with a block table that covers its computed
  tokens. `running` is sorted by the policy's key.
- Memory is allocated chunk by chunk but promised at admission: blocks for all tokens a request was admitted with, and
  one more, stay available to it until they are computed. So only a request that has computed them can lack a block.
- While anything is unfinished, each step schedules at least one token.
"""

import time
from bisect import insort
from collections.abc import Iterable, Sequence

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.errors import InvalidInput
from octavo.kvcache.block import KVCacheBlock
from octavo.kvcache.manager import KVCacheManager, num_unheld
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.protocol.stats import EngineStats
from octavo.scheduler.policy import get_policy
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.step import Step
from octavo.scheduler.stop import check_stop


class Scheduler:
    """Continuous batching over a paged KV cache.

    Args:
        config: budgets and policy.
        cache: the block pool.
        free_order: initial order of the free blocks; default ascending.

    Raises:
        InvalidInput: an unknown policy, or budgets under which some request that fits could never be computed.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, *, free_order: Sequence[int] | None = None) -> None:
        self._config = config
        self._cache = cache
        self._policy_key = get_policy(config.policy)
        self._kv = KVCacheManager(cache, free_order)
        longest = min(config.max_model_len, cache.num_tokens)
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < longest:
            raise InvalidInput(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is less than the longest sequence of "
                f"{longest} tokens; raise it, lower max_model_len or set enable_chunked_prefill=True"
            )
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._released: list[str] = []
        self._in_flight: tuple[SchedulerOutput, list[Request]] | None = None
        self._num_arrived = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            InvalidInput: its id is that of a live request, its prompt is empty, or prompt + 1 tokens exceed
                max_model_len or the whole pool.
        """
        if message.request_id in self._requests:
            raise InvalidInput(f"request_id={message.request_id!r} is in use by a live request; choose another")
        num_prompt = len(message.prompt_token_ids)
        self._check_prompt_length(num_prompt)
        longest = min(self._config.max_model_len, self._cache.num_tokens)
        max_tokens = message.sampling_params.max_tokens
        max_total_tokens = longest if max_tokens is None else min(longest, num_prompt + max_tokens)
        request = Request(message, self._num_arrived, max_total_tokens)
        request.key = self._policy_key(request)
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests now and free their blocks. Unknown ids are ignored. Returns one last output for each."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.WAITING:
                self._waiting.remove(request)
            else:
                self._running.remove(request)
            self._finish(request)
            outputs.append(_make_output(request, [], finish_reason=FinishReason.ABORT))
        return outputs

    def schedule(self) -> SchedulerOutput:
        """Put together one step: running requests with one token left, then those with more, then waiting ones.

        The output has no requests only if nothing is unfinished; it may carry released ids all the same.

        Raises:
            RuntimeError: the step before has been neither updated nor given up with `preempt_all`.
        """
        if self._in_flight is not None and self._in_flight[1]:
            raise RuntimeError("schedule() called before the last step was updated")
        step = Step(self._config.max_num_batched_tokens)
        decoders, prefills = self._split_running(step)
        self._schedule_decoders(decoders, step)
        self._schedule_prefills(prefills, step)
        if not step.preempted:
            self._admit(step)
        assert step.requests or not self._requests, "nothing was scheduled though requests are unfinished"
        output = step.to_output(self._released)
        self._released = []
        self._in_flight = (output, step.requests)
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in what a step computed. Requests that ended since `schedule` are skipped.

        Returns:
            One output for each request that got a token.

        Raises:
            RuntimeError: `result` does not belong to `output`, or a token was sampled where none, or none where one
                was due. Nothing has changed.
        """
        requests = self._take_in_flight(output, result)
        self._num_steps += 1
        now = time.monotonic()
        outputs = []
        steps = zip(requests, output.num_scheduled_tokens, result.sampled_token_ids, strict=True)
        for request, num_scheduled, sampled in steps:
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed_tokens += num_scheduled
            self._kv.publish(request)
            if sampled:
                outputs.append(self._append(request, sampled[0], result.logprobs.get(request.request_id), now))
        if any(out.finish_reason is not None for out in outputs):
            self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
        return outputs

    def preempt_all(self) -> None:
        """Give up the step in flight: every running request goes back to waiting and is computed anew.

        For use after a step failed half-way. Whatever rows the runner has left, the next step releases them.
        """
        if self._in_flight is not None:
            self._released += self._in_flight[0].released_request_ids
        self._in_flight = None
        while self._running:
            self._preempt(self._running[-1])

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing has changed, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counters and the state of the pool now."""
        pool = self._kv.pool
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_free=pool.num_free,
            kv_blocks_cached=pool.num_cached,
            kv_blocks_in_use=pool.num_in_use,
            kv_blocks_peak_in_use=pool.peak_in_use,
            kv_utilization=self._kv.utilization(self._running),
            prefix_cache_queries=self._num_prefix_queries,
            prefix_cache_hits=self._num_prefix_hits,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
        )

    def audit(self) -> None:
        """Check what always holds.

        Raises:
            AssertionError: naming the request, block or count that is off.
        """
        self._kv.audit(self._running)
        waiting = list(self._waiting)
        places = {request.request_id: request for request in (*waiting, *self._running)}
        assert len(places) == len(waiting) + len(self._running), "a request is in two places"
        assert places == self._requests, "a live request is neither waiting nor running, or an ended one is"
        for queue, status in ((waiting, RequestStatus.WAITING), (self._running, RequestStatus.RUNNING)):
            keys = [request.key for request in queue]
            assert keys == sorted(keys), f"{status.value} requests are out of order: {keys}"
            wrong = [request.request_id for request in queue if request.status is not status]
            assert not wrong, f"{wrong} are not {status.value}"
        reserved = sum(self._num_reserved(request) for request in self._running)
        assert reserved <= self._kv.num_available, f"{reserved} blocks promised, {self._kv.num_available} available"

    def _check_prompt_length(self, num_prompt: int) -> None:
        if num_prompt == 0:
            raise InvalidInput("the prompt has 0 tokens but needs at least 1; give a prompt that is not empty")
        if num_prompt + 1 > self._config.max_model_len:
            raise InvalidInput(
                f"the prompt has {num_prompt} tokens and needs room for 1 more, but max_model_len is "
                f"{self._config.max_model_len}; shorten the prompt or raise max_model_len"
            )
        if num_prompt + 1 > self._cache.num_tokens:
            raise InvalidInput(
                f"the prompt has {num_prompt} tokens and needs room for 1 more, but the KV cache holds "
                f"{self._cache.num_tokens} ({self._cache.num_blocks} blocks x {self._cache.block_size}); "
                "shorten the prompt or raise num_kv_blocks or kv_cache_memory"
            )

    def _split_running(self, step: Step) -> tuple[list[Request], list[Request]]:
        """Running requests with exactly one token left, and those with more; counts what is promised to them."""
        decoders, prefills = [], []
        for request in self._running:
            if len(request.token_ids) - request.num_computed_tokens == 1:
                decoders.append(request)
            else:
                prefills.append(request)
            if request.num_computed_tokens < request.num_admitted_tokens:
                step.reserved_blocks += self._num_reserved(request)
            else:
                step.num_decoders += 1
        return decoders, prefills

    def _schedule_decoders(self, decoders: list[Request], step: Step) -> None:
        block_size = self._cache.block_size
        for request in decoders:
            if step.token_budget == 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.num_computed_tokens % block_size:
                step.add(request, 1)
            elif self._make_room(request, step):
                step.add(request, 1, self._grow(request, 1, step))

    def _make_room(self, request: Request, step: Step) -> bool:
        """See that one block is there for `request`, preempting if need be. False: it was itself preempted."""
        promised_to_others = step.reserved_blocks - self._num_reserved(request)
        while self._kv.num_available - promised_to_others < 1:
            victim = next(victim for victim in reversed(self._running) if not victim.is_protected)
            assert victim.key >= request.key, f"{victim.request_id} is scheduled in this step already"
            promised = self._num_reserved(victim)
            step.reserved_blocks -= promised
            promised_to_others -= promised
            step.preempted = True
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _schedule_prefills(self, prefills: list[Request], step: Step) -> None:
        for request in prefills:
            if request.status is not RequestStatus.RUNNING:
                continue
            num_tokens = self._chunk(request.num_tokens - request.num_computed_tokens, step)
            if num_tokens == 0:
                return
            step.add(request, num_tokens, self._grow(request, num_tokens, step))

    def _admit(self, step: Step) -> None:
        while self._waiting and step.token_budget and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.peek()
            prefix = self._kv.find_cached_prefix(request)
            num_cached = len(prefix) * self._cache.block_size
            num_tokens = self._chunk(request.num_tokens - num_cached, step)
            if num_tokens == 0 or not self._fits(request, prefix, step):
                return
            self._waiting.pop()
            self._start(request, num_cached)
            self._kv.allocate(request, num_cached, prefix)
            step.reserved_blocks += self._num_reserved(request)
            self._grow(request, num_tokens, step)
            step.add_new(request, num_tokens, self._kv.block_ids(request.request_id))

    def _fits(self, request: Request, prefix: list[KVCacheBlock], step: Step) -> bool:
        """Whether all known tokens and one more fit beside what is promised and one block for each decoder."""
        needed = self._kv.num_blocks_for(request.num_tokens + 1) - len(prefix) + num_unheld(prefix)
        return self._kv.num_available - step.reserved_blocks - step.num_decoders >= needed

    def _chunk(self, num_left: int, step: Step) -> int:
        """How many of a request's tokens this step computes; 0: it has to wait."""
        if not self._config.enable_chunked_prefill:
            return num_left if num_left <= step.token_budget else 0
        return min(num_left, step.token_budget, self._config.long_prefill_token_threshold or num_left)

    def _start(self, request: Request, num_cached: int) -> None:
        """Move an admitted request to running and count the admission."""
        if request.scheduled_time == 0.0:
            request.scheduled_time = time.monotonic()
            request.num_cached_tokens = num_cached
            self._num_prompt_tokens += request.num_prompt_tokens
        if self._cache.enable_prefix_caching:
            self._num_prefix_queries += request.num_prompt_tokens
            self._num_prefix_hits += min(num_cached, request.num_prompt_tokens)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached
        request.num_admitted_tokens = request.num_tokens
        insort(self._running, request, key=lambda other: other.key)

    def _grow(self, request: Request, num_tokens: int, step: Step) -> list[int]:
        """Allocate blocks for the next `num_tokens` tokens, which are known to be available."""
        promised = self._num_reserved(request)
        new_block_ids = self._kv.allocate(request, request.num_computed_tokens + num_tokens)
        assert new_block_ids is not None, f"blocks promised to {request.request_id} are not there"
        step.reserved_blocks += self._num_reserved(request) - promised
        return new_block_ids

    def _num_reserved(self, request: Request) -> int:
        """Blocks promised to a running request that it does not hold yet."""
        if request.num_computed_tokens >= request.num_admitted_tokens:
            return 0
        return self._kv.num_blocks_for(request.num_admitted_tokens + 1) - self._kv.num_blocks_held(request.request_id)

    def _preempt(self, victim: Request) -> None:
        """Preemption by recompute: the request loses its blocks and its row and takes its old place in the queue."""
        self._running.remove(victim)
        self._kv.free(victim)
        self._released.append(victim.request_id)
        victim.num_computed_when_preempted = victim.num_computed_tokens
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self._waiting.add(victim)
        self._num_preemptions += 1

    def _take_in_flight(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[Request]:
        if self._in_flight is None or self._in_flight[0] is not output:
            raise RuntimeError("update() called with an output that is not the last step's")
        if result.request_ids != output.request_ids or len(result.sampled_token_ids) != len(output.request_ids):
            raise RuntimeError(f"the runner answered for {result.request_ids}, scheduled were {output.request_ids}")
        requests = self._in_flight[1]
        for request, num_scheduled, sampled in zip(
            requests, output.num_scheduled_tokens, result.sampled_token_ids, strict=True
        ):
            due = request.num_computed_tokens + num_scheduled == len(request.token_ids)
            if len(sampled) != due and request.status is RequestStatus.RUNNING:
                raise RuntimeError(f"the runner sampled {sampled} for {request.request_id}, due were {int(due)} tokens")
        self._in_flight = None
        return requests

    def _append(
        self, request: Request, token_id: int, logprobs: list[TokenLogprobs] | None, now: float
    ) -> EngineCoreOutput:
        request.token_ids.append(token_id)
        request.last_token_time = now
        if request.first_token_time == 0.0:
            request.first_token_time = now
        self._num_generated_tokens += 1
        stop = check_stop(request)
        if stop is None:
            return _make_output(request, [token_id], logprobs)
        self._finish(request)
        return _make_output(request, [token_id], logprobs, *stop)

    def _finish(self, request: Request) -> None:
        """End a request that has been, or will be, taken out of its queue."""
        if request.status is RequestStatus.RUNNING:
            self._released.append(request.request_id)
        self._kv.free(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]


def _make_output(
    request: Request,
    new_token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        timings=request.timings(),
    )
