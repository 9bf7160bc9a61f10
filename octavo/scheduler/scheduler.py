"""The scheduler: admission, budgets, preemption, and what a step's tokens mean for each request.

What always holds between two calls
- A request is in exactly one place: waiting without blocks, or running with a block table that covers its computed
  tokens. `running` is sorted by turn (see `fair_share`; without fair share all are 0), then by the policy's key.
- Memory is allocated chunk by chunk but promised at admission: blocks for all tokens a request was admitted with, and
  one more, stay available to it until they are computed. So only a request that has computed them can lack a block.
- While anything is unfinished, each step schedules at least one token.
- A call that an exception ended half-way is made good by `recover`, from what no call leaves half-done: the tokens of
  each live request, and the journal of the update that was not delivered.
- With n > 1 each sample is a request of its own; `sample_group` decides when the next one may start.
"""

import time
from bisect import insort
from collections.abc import Iterable, Sequence

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.errors import InvalidInput
from octavo.kvcache.manager import KVCacheManager
from octavo.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
    sample_request_ids,
)
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.protocol.stats import EngineStats
from octavo.scheduler.admission import Start, check_prompt_length, find_start, take_start
from octavo.scheduler.fair_share import FairShare, place
from octavo.scheduler.journal import UpdateJournal
from octavo.scheduler.outputs import collect_prompt_logprobs, make_output
from octavo.scheduler.policy import get_policy
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.sample_group import SampleGroup, SampleGroups
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
        self._groups = SampleGroups(self._kv)
        self._shares = FairShare() if config.fair_share else None
        self._waiting: WaitingQueue | FairShare = self._new_queue()
        self._running: list[Request] = []
        self._released: list[str] = []
        self._in_flight: tuple[SchedulerOutput, list[Request]] | None = None
        self._assembled: Step | None = None
        """While `schedule` runs."""
        self._journal = UpdateJournal()
        self.first_scheduled: list[str] = []
        """Requests that the last call of `schedule` was the first to begin, by their own ids."""
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
        """Samples that have not started are counted too."""
        return len(self._waiting) + self._groups.num_unstarted

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that computes something has been neither updated nor given up."""
        return self._in_flight is not None and bool(self._in_flight[1])

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; with n > 1, as many samples.

        Raises:
            InvalidInput: its id, or that of a sample, is that of a live request or sample; its prompt is empty; or
                prompt + 1 tokens exceed max_model_len or the whole pool.
        """
        request_id, params = message.request_id, message.sampling_params
        sample_ids = sample_request_ids(request_id, params.n)
        for name in (request_id, *sample_ids):
            if name in self._requests or name in self._groups:
                what = "" if name == request_id else f" (its sample {name!r})"
                raise InvalidInput(f"request_id={request_id!r}{what} is in use by a live request; choose another")
        num_prompt = len(message.prompt_token_ids)
        check_prompt_length(num_prompt, self._config, self._cache)
        longest = min(self._config.max_model_len, self._cache.num_tokens)
        max_total_tokens = longest if params.max_tokens is None else min(longest, num_prompt + params.max_tokens)
        if params.n == 1:
            self._enqueue(Request(message, self._num_arrived, max_total_tokens))
        else:
            group = SampleGroup(message, sample_ids, self._num_arrived, max_total_tokens)
            self._groups.add(group)
            self._offer(group)
        self._num_arrived += 1

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests now and free their blocks. Unknown ids are ignored.

        Returns:
            One last output for each; for a request with n > 1, one for each sample that had not ended.
        """
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            group = self._groups.get(request_id)
            if request is not None:
                outputs.append(self._abort(request))
            elif group is not None:
                outputs += self._abort_samples(group, request_id)
        return outputs

    def schedule(self) -> SchedulerOutput:
        """Put together one step: running requests with one token left, then those with more, then waiting ones.

        The output has no requests only if nothing is unfinished; it may carry released ids all the same.

        Raises:
            RuntimeError: the step before has been neither updated nor given up with `recover`.
        """
        if self.is_in_flight:
            raise RuntimeError("schedule() called before the last step was updated")
        self._journal.close()
        self._in_flight = None
        self.first_scheduled = []
        step = self._assembled = Step(self._config.max_num_batched_tokens)
        if self._shares is not None:
            self._shares.begin_step(self._running)
            self._make_way(self._shares, step)
        decoders, prefills = self._split_running(step)
        self._schedule_decoders(decoders, step)
        if self._shares is not None and self._shares.is_shared and self._config.enable_chunked_prefill:
            self._divide_budget(self._shares, prefills, step)
        else:
            self._schedule_prefills(prefills, step)
            self._admit(step)
        step.current = None
        self._groups.detach_holds(self._kv.num_available - step.reserved_blocks)
        assert step.requests or not self._requests, "nothing was scheduled though requests are unfinished"
        output = step.to_output(self._released, self._kv.take_block_copies())
        if self._shares is not None:
            self._shares.charge(step.requests, output.num_scheduled_tokens, output.num_computed_tokens)
        self._in_flight = (output, step.requests)
        self._released = []
        self._assembled = None
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in what a step computed. Requests that ended since `schedule` are skipped.

        Returns:
            One output for each request that got a token or failed.

        Raises:
            RuntimeError: `result` does not belong to `output`, or a token was sampled where none, or none where one
                was due. Nothing has changed.
            Anything else: the update is half-done; only `recover` may follow.
        """
        requests = self._check_in_flight(output, result)
        self._journal.open(requests, output, result, self._num_generated_tokens)
        self._num_steps += 1
        now = time.monotonic()
        outputs = self._end_failed(requests, result.failed) if result.failed else []
        if result.prompt_logprobs:
            collect_prompt_logprobs(requests, output, result)
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
        self._in_flight = None
        return outputs

    def commit(self) -> None:
        """The outputs of the last update go to whom they are for: `recover` does not take them back any more."""
        self._journal.close()

    def recover(self) -> list[str]:
        """Make good a call that an exception ended half-way, or give up the step in flight.

        Every live request goes back to waiting and is computed anew; no KV is trusted, so the prefix cache is empty. An
        update that was not committed is taken back as a whole: its tokens are computed again, and a request it ended is
        live again. A request whose `add_request` did not return is dropped. Whatever rows the runner has left, the next
        step releases them. May be called at any time, and again if it was itself interrupted.

        Returns:
            The requests that were being scheduled, or were computed by the step: all live, and waiting.
        """
        failed = self._requests_in_step()
        if self._journal.is_open:
            self._num_generated_tokens = self._journal.num_generated_tokens
        for request in self._journal.take_back():
            self._requests[request.request_id] = request
        for request in [r for r in self._requests.values() if r.arrival_number == self._num_arrived]:
            del self._requests[request.request_id]
        self._kv.reset()
        gone = [request.request_id for request in self._requests.values() if request.scheduled_time]
        if self._in_flight is not None:
            gone += self._in_flight[0].released_request_ids
        self._released = list(dict.fromkeys(self._released + gone))
        fronts = self._groups.rebuild(self._requests, self._num_arrived)
        self._running = []
        self._waiting = self._new_queue()
        for request in self._requests.values():
            self._send_back(request)
            self._waiting.add(request)
        for request in fronts:
            self._enqueue(request)
            self._groups.started(request)
        self._in_flight = self._assembled = None
        self._journal.close()
        return [request.request_id for request in failed if request.status is RequestStatus.WAITING]

    def _requests_in_step(self) -> list[Request]:
        if self._in_flight is not None and self._in_flight[1]:
            return self._in_flight[1]
        if self._journal.is_open:
            return self._journal.requests
        if self._assembled is None:
            return []
        current = self._assembled.current
        return self._assembled.requests if current is None else [current]

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing has changed, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counters and the state of the pool now."""
        pool = self._kv.pool
        return EngineStats(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
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
        self._audit_in_flight()
        self._kv.audit(self._running, self._groups.holds)
        self._groups.audit(self._requests)
        waiting = list(self._waiting)
        names = {request.request_id for request in (*waiting, *self._running)}
        assert len(names) == len(waiting) + len(self._running), "a request is in two places"
        assert names == self._requests.keys(), "a live request is neither waiting nor running, or an ended one is"
        for queue, status in ((waiting, RequestStatus.WAITING), (self._running, RequestStatus.RUNNING)):
            wrong = [request.request_id for request in queue if request.status is not status]
            assert not wrong, f"{wrong} are not {status.value}"
        self._waiting.audit()
        places = [place(request) for request in self._running]
        assert places == sorted(places), f"running requests are out of order: {places}"
        started = [request.request_id for request in waiting if request.num_computed_tokens]
        assert not started, f"{started} wait but have computed tokens"
        reserved = sum(self._num_reserved(request) for request in self._running)
        assert reserved <= self._kv.num_available, f"{reserved} blocks promised, {self._kv.num_available} available"

    def _audit_in_flight(self) -> None:
        assert self._assembled is None, "a call of schedule() ended half-way"
        if self._in_flight is None:
            return
        output, requests = self._in_flight
        assert output.request_ids == [request.request_id for request in requests], "the step in flight is another"
        for request, num_computed in zip(requests, output.num_computed_tokens, strict=True):
            if request.status is RequestStatus.FINISHED:  # aborted since
                continue
            name = request.request_id
            assert self._requests.get(name) is request, f"{name} is in flight but not live"
            assert request.status is RequestStatus.RUNNING, f"{name} is in flight but {request.status.value}"
            assert request.num_computed_tokens == num_computed, f"the update of {name} ended half-way"

    def _new_queue(self) -> WaitingQueue | FairShare:
        if self._shares is None:
            return WaitingQueue()
        self._shares.clear_queues()
        return self._shares

    def _enqueue(self, request: Request) -> None:
        request.key = self._policy_key(request)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def _offer(self, group: SampleGroup) -> None:
        """Queue the next sample of a group, if there is one."""
        request = self._groups.next_front(group)
        if request is not None:
            self._enqueue(request)
            self._groups.started(request)

    def _abort(self, request: Request) -> EngineCoreOutput:
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        self._finish(request)
        return make_output(request, [], finish_reason=FinishReason.ABORT)

    def _abort_samples(self, group: SampleGroup, request_id: str) -> list[EngineCoreOutput]:
        """Abort a whole group, or one sample of it that has no `Request`."""
        if request_id != group.message.request_id:
            return self._groups.drop_unstarted(group, [request_id])
        unstarted = self._groups.drop_unstarted(group, list(group.unstarted))
        live = [self._abort(self._requests[i]) for i in group.sample_ids if i in self._requests]
        return live + unstarted[::-1]

    def _end_failed(self, requests: list[Request], failed: dict[str, str]) -> list[EngineCoreOutput]:
        """End the requests of a step that cannot go on; the caller takes them out of `_running`."""
        outputs = []
        for request in requests:
            if request.request_id in failed and request.status is RequestStatus.RUNNING:
                self._finish(request)
                output = make_output(request, [], finish_reason=FinishReason.ABORT)
                output.error = failed[request.request_id]
                outputs.append(output)
        return outputs

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
                continue
            step.current = request
            if self._make_room(request, step):
                step.add(request, 1, self._grow(request, 1, step))
            step.current = None

    def _make_room(self, request: Request, step: Step) -> bool:
        """See that one block is there for `request`: give up holds, then preempt. False: it was itself preempted."""
        promised_to_others = step.reserved_blocks - self._num_reserved(request)
        while self._kv.num_available - promised_to_others < 1:
            if self._groups.give_up_last():
                continue
            victim = next(victim for victim in reversed(self._running) if not victim.is_protected)
            assert place(victim) >= place(request), f"{victim.request_id} is scheduled in this step already"
            promised = self._num_reserved(victim)
            step.reserved_blocks -= promised
            promised_to_others -= promised
            step.preempted = True
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _make_way(self, shares: FairShare, step: Step) -> None:
        """Preempt, so that the head of the queue can start in this step, if others are to yield to it.

        Nobody does in vain: should all of them not be enough, none is preempted.
        """
        if not self._waiting or not shares.is_shared:
            return
        head = step.current = self._waiting.peek()
        yielding = shares.displaced(self._running, head)
        if sum(self._kv.num_blocks_held(victim.request_id) for victim in yielding) < self._num_missing(head):
            return
        num_slots = min(self._config.max_num_seqs, self._config.max_num_batched_tokens)
        for victim in yielding:
            if len(self._running) < num_slots and self._num_missing(head) <= 0:
                break
            self._preempt(victim)
            step.yielded.append(victim)
        step.current = None

    def _num_missing(self, head: Request) -> int:
        """Blocks that the head of the queue lacks to start in this step, of which nothing has been scheduled yet."""
        step = Step(0)
        decoders, _ = self._split_running(step)
        num_growing = sum(request.num_computed_tokens % self._cache.block_size == 0 for request in decoders)
        num_spare = self._kv.num_available - step.reserved_blocks - step.num_decoders - num_growing
        return find_start(self._kv, head).num_needed - num_spare

    def _divide_budget(self, shares: FairShare, prefills: list[Request], step: Step) -> None:
        """Fair share of what is left of the budget: who runs goes before who waits, but only inside a tenant."""
        prefills = [request for request in prefills if request.status is RequestStatus.RUNNING]
        num_slots = 0 if step.preempted else self._config.max_num_seqs - len(self._running)
        longest_chunk = self._config.long_prefill_token_threshold or step.token_budget
        with shares.divided(step.token_budget, prefills, longest_chunk, num_slots):
            self._admit(step)
        with shares.divided(step.token_budget, prefills, longest_chunk):
            self._schedule_prefills(prefills, step)

    def _schedule_prefills(self, prefills: list[Request], step: Step) -> None:
        for request in prefills:
            step.current = request
            if request.status is not RequestStatus.RUNNING:
                continue
            num_tokens = self._chunk(request, request.num_tokens - request.num_computed_tokens, step)
            if num_tokens == 0:
                if step.token_budget == 0:
                    return
                continue
            step.add(request, num_tokens, self._grow(request, num_tokens, step))

    def _admit(self, step: Step) -> None:
        if step.preempted:
            return
        while self._waiting and step.token_budget and len(self._running) < self._config.max_num_seqs:
            request = step.current = self._waiting.peek()
            if request in step.yielded:
                return
            start = find_start(self._kv, request)
            num_tokens = self._chunk(request, request.num_tokens - start.num_computed_tokens, step)
            if num_tokens == 0:
                return
            num_missing = start.num_needed - (self._kv.num_available - step.reserved_blocks - step.num_decoders)
            if num_missing > 0:
                if self._groups.give_up_for(request, num_missing, alone=not self._running):
                    continue
                return
            self._waiting.remove(request)
            self._start(request, start)
            step.reserved_blocks += self._num_reserved(request)
            self._grow(request, num_tokens, step)
            step.add_new(request, num_tokens, self._kv.block_ids(request.request_id))
            if start.hold is not None and request.group is not None:
                self._groups.forked(request.group)
                self._offer(request.group)

    def _chunk(self, request: Request, num_left: int, step: Step) -> int:
        """How many of a request's tokens this step computes; 0: it has to wait."""
        if self._shares is not None:
            num_left = min(num_left, self._shares.room(request.tenant, num_left))
        if not self._config.enable_chunked_prefill:
            return num_left if num_left <= step.token_budget else 0
        return min(num_left, step.token_budget, self._config.long_prefill_token_threshold or num_left)

    def _start(self, request: Request, start: Start) -> None:
        """Move an admitted request to running and count the admission."""
        take_start(self._kv, request, start)
        if request.scheduled_time == 0.0:
            if request.group is None or self._groups.admitted(request.group, start.num_computed_tokens):
                request.num_cached_tokens = start.num_computed_tokens
                self._num_prompt_tokens += request.num_prompt_tokens
                self.first_scheduled.append(request.request_id if request.group is None else request.group.request_id)
            request.scheduled_time = time.monotonic()
        if start.looked_up:
            self._num_prefix_queries += request.num_prompt_tokens
            self._num_prefix_hits += min(start.num_computed_tokens, request.num_prompt_tokens)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = start.num_computed_tokens
        request.num_admitted_tokens = request.num_tokens
        if self._shares is not None:
            self._shares.started(request)
        insort(self._running, request, key=place)

    def _grow(self, request: Request, num_tokens: int, step: Step) -> list[int]:
        """Allocate blocks for the next `num_tokens` tokens, which are known to be available."""
        promised = self._num_reserved(request)
        new_block_ids = self._kv.allocate(request, request.num_computed_tokens + num_tokens)
        assert new_block_ids is not None, f"blocks promised to {request.request_id} are not there"
        step.reserved_blocks += self._num_reserved(request) - promised
        if self._shares is not None:
            self._shares.spend(request.tenant, num_tokens)
        return new_block_ids

    def _num_reserved(self, request: Request) -> int:
        """Blocks promised to a running request that it does not hold yet."""
        if request.num_computed_tokens >= request.num_admitted_tokens:
            return 0
        return self._kv.num_blocks_for(request.num_admitted_tokens + 1) - self._kv.num_blocks_held(request.request_id)

    def _preempt(self, victim: Request) -> None:
        """Preemption by recompute: the request loses its blocks and its row and takes its old place in the queue."""
        self._running.remove(victim)
        if self._shares is not None:
            self._shares.stopped(victim)
        self._kv.free(victim)
        self._released.append(victim.request_id)
        self._send_back(victim)
        self._waiting.add(victim)

    def _send_back(self, request: Request) -> None:
        """A request that has lost its blocks waits, and counts the preemption if it was running."""
        if request.status is not RequestStatus.WAITING:
            request.num_computed_when_preempted = min(request.num_computed_tokens, request.num_tokens - 1)
            request.num_preemptions += 1
            self._num_preemptions += 1
            request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0

    def _check_in_flight(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[Request]:
        if self._in_flight is None or self._in_flight[0] is not output or self._journal.is_open:
            raise RuntimeError("update() called with an output that is not the last step's")
        if result.request_ids != output.request_ids or len(result.sampled_token_ids) != len(output.request_ids):
            raise RuntimeError(f"the runner answered for {result.request_ids}, scheduled were {output.request_ids}")
        requests = self._in_flight[1]
        for request, num_scheduled, sampled in zip(
            requests, output.num_scheduled_tokens, result.sampled_token_ids, strict=True
        ):
            due = request.num_computed_tokens + num_scheduled == len(request.token_ids)
            if len(sampled) != due and request.status is RequestStatus.RUNNING:
                if request.request_id in result.failed:
                    continue
                raise RuntimeError(f"the runner sampled {sampled} for {request.request_id}, due were {int(due)} tokens")
        return requests

    def _append(
        self, request: Request, token_id: int, logprobs: list[TokenLogprobs] | None, now: float
    ) -> EngineCoreOutput:
        request.token_ids.append(token_id)
        request.last_token_time = now
        self._num_generated_tokens += 1
        prompt_logprobs = self._note_first_token(request, now) if request.first_token_time == 0.0 else None
        stop = check_stop(request)
        if stop is None:
            return make_output(request, [token_id], logprobs, prompt_logprobs)
        self._finish(request)
        return make_output(request, [token_id], logprobs, prompt_logprobs, *stop)

    def _note_first_token(self, request: Request, now: float) -> list[TokenLogprobs] | None:
        """The prompt is computed: other samples may start from it. Returns its log-probabilities, if asked for."""
        self._journal.first_token(request)
        request.first_token_time = now
        prompt_logprobs = request.take_prompt_logprobs()
        if request.group is not None and self._groups.prompt_computed(request):
            self._offer(request.group)
        return prompt_logprobs

    def _finish(self, request: Request) -> None:
        """End a request that has been, or will be, taken out of its queue."""
        if request.status is RequestStatus.RUNNING:
            self._released.append(request.request_id)
        self._kv.free(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        if request.group is not None and self._groups.ended(request):
            self._offer(request.group)
