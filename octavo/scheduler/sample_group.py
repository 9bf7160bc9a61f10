"""n > 1: the samples of one request, and how they share the KV of their prompt.

A sample that has started is a `Request` like any other; the group only decides when the next one may start. At most one
sample, the *front*, stands in the queue without having started, or computes the prompt for those after it. Once it has
sampled its first token, the group holds the prompt's blocks, and the samples after it begin with these one by one. The
hold may be given up at any time: then the front computes the prompt again, as anybody would, and it is held anew.

What always holds between two calls
- While samples have not started there is a front. While there is a hold, the front has not started and waits.
- A hold ends when the last sample has started from it, or no sample is left that could.
"""

import msgspec

from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.prompt_hold import PromptHold
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestTimings
from octavo.scheduler.request import Request, RequestStatus


class SampleGroup:
    """The samples of one request. Only `SampleGroups` writes its fields."""

    __slots__ = (
        "arrival_number",
        "front",
        "hold",
        "max_total_tokens",
        "message",
        "num_cached_tokens",
        "num_unfinished",
        "request_id",
        "sample_ids",
        "sampling_params",
        "unstarted",
    )

    def __init__(
        self, message: EngineCoreRequest, sample_ids: list[str], arrival_number: int, max_total_tokens: int
    ) -> None:
        self.message = message
        self.request_id = message.request_id
        self.sample_ids = sample_ids
        self.arrival_number = arrival_number
        self.max_total_tokens = max_total_tokens
        self.sampling_params = message.sampling_params
        """Of the next sample: asks for prompt_logprobs until a sample has handed them out."""
        self.unstarted = {sample_ids[index]: index for index in reversed(range(len(sample_ids)))}
        """Sample id -> index of those that have no `Request` yet, the next one last."""
        self.num_unfinished = len(sample_ids)
        self.front: Request | None = None
        self.hold: PromptHold | None = None
        self.num_cached_tokens = -1
        """Tokens the first admission of a sample found in the prefix cache; -1 before."""


class SampleGroups:
    """All live groups, and their holds."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._by_id: dict[str, SampleGroup] = {}
        """By request id and by every sample id, until the last sample has ended."""
        self._holding: list[SampleGroup] = []
        self._new_holds: list[SampleGroup] = []
        """Holds that may share a partly filled block with the sample they were taken from."""
        self.num_unstarted = 0
        """Samples that have no `Request` yet."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> SampleGroup | None:
        """The group a request or sample id belongs to."""
        return self._by_id.get(request_id)

    @property
    def holds(self) -> list[PromptHold]:
        return [group.hold for group in self._holding if group.hold is not None]

    def add(self, group: SampleGroup) -> None:
        """Take in a group whose ids are all free."""
        self._by_id.update(dict.fromkeys((group.message.request_id, *group.sample_ids), group))
        self.num_unstarted += len(group.unstarted)

    def next_front(self, group: SampleGroup) -> Request | None:
        """Make the next sample the front; None if there is none left. `started` must follow."""
        assert group.front is None
        if not group.unstarted:
            if group.hold is not None:
                self.give_up(group)
            return None
        index = next(reversed(group.unstarted.values()))
        group.front = Request(group.message, group.arrival_number, group.max_total_tokens, group, index)
        group.front.num_cached_tokens = max(group.num_cached_tokens, 0)
        return group.front

    def started(self, front: Request) -> None:
        """Note that the front is live, and only now not unstarted any more: so no sample is ever in neither place."""
        assert front.group is not None
        del front.group.unstarted[front.request_id]
        self.num_unstarted -= 1

    def admitted(self, group: SampleGroup, num_cached_tokens: int) -> bool:
        """Note that a sample was admitted. True: it is the first of its group."""
        if group.num_cached_tokens >= 0:
            return False
        group.num_cached_tokens = num_cached_tokens
        return True

    def prompt_computed(self, request: Request) -> bool:
        """Note that a sample has its first token. True: it was the front, and the next one may be made."""
        group = request.group
        assert group is not None
        if group.front is not request:
            return False
        group.front = None
        if group.sampling_params.prompt_logprobs is not None:
            group.sampling_params = msgspec.structs.replace(group.sampling_params, prompt_logprobs=None)
        if group.unstarted:
            group.hold = self._kv.hold_prompt(request, request.num_prompt_tokens)
            self._holding.append(group)
            self._new_holds.append(group)
        return True

    def forked(self, group: SampleGroup) -> None:
        """Note that the front has started from the hold; the last sample has taken its place."""
        group.front = None
        if not group.unstarted:
            group.hold = None
            self._holding.remove(group)

    def ended(self, request: Request) -> bool:
        """Note that a sample has ended. True: it was the front, and the next one may be made."""
        group = request.group
        assert group is not None
        self._count_ended(group, 1)
        was_front = group.front is request
        if was_front:
            group.front = None
        return was_front

    def drop_unstarted(self, group: SampleGroup, sample_ids: list[str]) -> list[EngineCoreOutput]:
        """End those of `sample_ids` that have no `Request` yet; the last output of each."""
        dropped = [sample_id for sample_id in sample_ids if group.unstarted.pop(sample_id, None) is not None]
        self.num_unstarted -= len(dropped)
        self._count_ended(group, len(dropped))
        return [
            EngineCoreOutput(
                request_id=sample_id,
                new_token_ids=[],
                finish_reason=FinishReason.ABORT,
                num_cached_tokens=max(group.num_cached_tokens, 0),
                timings=RequestTimings(arrival=group.message.arrival_time),
            )
            for sample_id in dropped
        ]

    def give_up(self, group: SampleGroup) -> None:
        """Release the hold of a group."""
        assert group.hold is not None
        self._kv.release(group.hold)
        group.hold = None
        self._holding.remove(group)

    def give_up_last(self) -> bool:
        """Release the hold whose front is the last in the queue. False: there is none."""
        if not self._holding:
            return False
        self.give_up(max(self._holding, key=_front_key))
        return True

    def give_up_all(self) -> None:
        while self.give_up_last():
            pass

    def give_up_for(self, head: Request, num_missing: int, alone: bool) -> bool:
        """Release a hold so that the head of the queue can start. False: it has to wait for those that run.

        Args:
            num_missing: blocks that `head` lacks. Holds that could not make up for them are kept.
            alone: nothing runs, so that only holds can be in its way, in the end its own group's.
        """
        if alone:
            return self.give_up_last()
        others = [group for group in self._holding if group.front is not head]
        if sum(group.hold.num_unshared for group in others if group.hold is not None) < num_missing:
            return False
        self.give_up(max(others, key=_front_key))
        return True

    def detach_holds(self, num_spare: int) -> None:
        """See that samples may write on in the last blocks of their prompts; to be called once in each step.

        Args:
            num_spare: blocks that may be taken for that. A hold that finds none is given up.
        """
        for group in self._new_holds:
            if group.hold is None or not self._kv.must_detach(group.hold):
                continue
            if num_spare > 0:
                self._kv.detach(group.hold)
                num_spare -= 1
            else:
                self.give_up(group)
        self._new_holds.clear()

    def rebuild(self, requests: dict[str, Request], num_arrived: int) -> list[Request]:
        """After a call that ended half-way: all groups anew, without holds, from the live requests.

        Args:
            requests: all live ones by id. Samples that were never admitted are taken out.
            num_arrived: groups that arrived later were not accepted.

        Returns:
            New fronts, to be queued and `started`.
        """
        groups = [*self._by_id.values(), *(r.group for r in requests.values() if r.group is not None)]
        known = {id(group): group for group in groups if group.arrival_number < num_arrived}.values()
        for group in known:
            _rebuild_group(group, requests)
        left = [group for group in known if group.num_unfinished]
        self._by_id = {i: group for group in left for i in (group.message.request_id, *group.sample_ids)}
        self._holding, self._new_holds = [], []
        self.num_unstarted = sum(len(group.unstarted) for group in left)
        fronts = [self.next_front(group) for group in left if group.front is None]
        return [front for front in fronts if front is not None]

    def audit(self, requests: dict[str, Request]) -> None:
        """Check what always holds; `requests`: all live ones by id.

        Raises:
            AssertionError: naming the group that is off.
        """
        groups = {id(group): group for group in self._by_id.values()}.values()
        assert len(self._by_id) == sum(len(group.sample_ids) + 1 for group in groups), "ids of groups are off"
        assert self.num_unstarted == sum(len(group.unstarted) for group in groups), "unstarted samples are off"
        holding = {id(group) for group in groups if group.hold is not None}
        assert holding == set(map(id, self._holding)) and len(holding) == len(self._holding), "holds are off"
        for group in groups:
            _audit_group(group, [requests[i] for i in group.sample_ids if i in requests])

    def _count_ended(self, group: SampleGroup, num_samples: int) -> None:
        group.num_unfinished -= num_samples
        if group.num_unfinished == 0:
            for request_id in (group.message.request_id, *group.sample_ids):
                del self._by_id[request_id]


def _rebuild_group(group: SampleGroup, requests: dict[str, Request]) -> None:
    """The samples of one group from what is certain: which are live, and which never started."""
    unstarted, live = {}, []
    for index in reversed(range(len(group.sample_ids))):
        sample_id = group.sample_ids[index]
        request = requests.get(sample_id)
        if request is not None and request.scheduled_time:
            live.append(request)
        elif request is not None or sample_id in group.unstarted:
            unstarted[sample_id] = index
    group.unstarted = unstarted
    for sample_id in unstarted:
        requests.pop(sample_id, None)
    group.num_unfinished = len(live) + len(unstarted)
    group.hold = None
    group.front = next((request for request in reversed(live) if request.num_output_tokens == 0), None)
    for request in live:
        request.num_cached_tokens = max(group.num_cached_tokens, 0)


def _front_key(group: SampleGroup) -> tuple[int, ...]:
    assert group.front is not None, f"{group.message.request_id} holds blocks for nobody"
    return group.front.key


def _audit_group(group: SampleGroup, live: list[Request]) -> None:
    name, front = group.message.request_id, group.front
    assert all(request.group is group for request in live), f"a sample id of {name} is somebody else's"
    assert group.num_unfinished == len(live) + len(group.unstarted), f"{name} counts {group.num_unfinished} samples"
    assert front is not None or not group.unstarted, f"samples of {name} wait for nobody"
    if front is not None:
        assert front in live and front.num_output_tokens == 0, f"the front of {name} is not one"
    if group.hold is not None:
        waits = front is not None and front.status is RequestStatus.WAITING and front.num_preemptions == 0
        assert waits, f"{name} holds blocks for nobody"
