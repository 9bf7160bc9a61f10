"""Fair share: tenants divide the running slots and the token budget of each step among them, max-min fairly.

One idea serves all: *turns*. Among the running requests of one tenant, in the order of the policy, the first has turn
0, the next turn 1, and so on. Whoever has the lower turn goes first, whosever request it is: when a slot or memory is
to be had, the tenant that runs fewest requests gets it; when memory is lacking, the request of the highest turn loses
it; and a request that waits may take the place of one whose turn is higher than its own would be. Between equal turns
the tenant that has been served fewest tokens goes first, and what a tenant was served while it was alone does not count
against it (the virtual time of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Inside a tenant
the policy's order holds. With one tenant nothing differs from a scheduler without fair share.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeAlias

from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request import Request

Tenant: TypeAlias = str | None


class FairShare:
    """The accounts of all tenants, and the queue of their requests, which has the interface of a `WaitingQueue`."""

    def __init__(self) -> None:
        self._queues: dict[Tenant, WaitingQueue] = {}
        """Of tenants that have somebody waiting."""
        self._num_running: dict[Tenant, int] = {}
        """As of now, while a step is put together."""
        self._served: dict[Tenant, int] = {}
        """Virtual tokens. Of tenants that have live requests, and of those that had and are ahead of them."""
        self._active: set[Tenant] = set()
        self._allowance: dict[Tenant, int] | None = None
        """Tokens that each tenant may still take; None: no limit but the budget of all."""

    def clear_queues(self) -> None:
        """Forget who waits: they are to be added anew."""
        self._queues = {}
        self._allowance = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """Tenant by tenant, each head first."""
        return (request for queue in self._queues.values() for request in queue)

    def add(self, request: Request) -> None:
        self._queues.setdefault(request.tenant, WaitingQueue()).add(request)

    def peek(self) -> Request:
        """The head of the queue, which must not be empty: of the heads of all tenants, the one whose turn it is.

        While a budget is divided, tenants that have used up their share come last.
        """
        heads = [queue.peek() for queue in self._queues.values()]
        return min(heads, key=self._precedence) if len(heads) > 1 else heads[0]

    def remove(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not queue:
            del self._queues[request.tenant]

    def begin_step(self, running: list[Request]) -> None:
        """Note who is there, and put the running requests in the order of their turns."""
        running.sort(key=lambda request: request.key)
        self._num_running = {}
        for request in running:
            request.turn = self._num_running.get(request.tenant, 0)
            self._num_running[request.tenant] = request.turn + 1
        running.sort(key=place)
        self._note_active(self._num_running.keys() | self._queues.keys())

    @property
    def is_shared(self) -> bool:
        """Whether more than one tenant has live requests."""
        return len(self._active) > 1

    def next_turn(self, tenant: Tenant) -> int:
        """The turn that the next request of a tenant to run would have."""
        return self._num_running.get(tenant, 0)

    def started(self, request: Request) -> None:
        """A request runs from now on."""
        request.turn = self.next_turn(request.tenant)
        self._num_running[request.tenant] = request.turn + 1

    def stopped(self, request: Request) -> None:
        """A request was preempted."""
        self._num_running[request.tenant] -= 1

    def charge(self, requests: list[Request], num_tokens: list[int], num_computed: list[int]) -> None:
        """A step is to compute these tokens. What it computes again after a preemption has been charged before."""
        for request, count, start in zip(requests, num_tokens, num_computed, strict=True):
            new = start + count - max(start, request.num_computed_when_preempted)
            if new > 0:
                self._served[request.tenant] += new

    def displaced(self, running: list[Request], head: Request) -> list[Request]:
        """The requests that the head of the queue may take the place of, the first to go first."""
        turn = self.next_turn(head.tenant)
        return [other for other in reversed(running) if other.turn > turn and not other.is_protected]

    @contextmanager
    def divided(
        self, budget: int, prefills: list[Request], longest_chunk: int, num_slots: int | None = None
    ) -> Iterator[None]:
        """While a token budget is divided among the tenants.

        Args:
            budget: tokens.
            prefills: the running requests that want some of it.
            longest_chunk: tokens that one request may get.
            num_slots: how many may be admitted, with what `prefills` leave of their tenants' shares. None: the budget
                is for `prefills`.
        """
        running: dict[Tenant, int] = {}
        for request in prefills:
            _add_demand(running, request, longest_chunk)
        if num_slots is None:
            self._allowance = divide(budget, running)
        else:
            shares = divide(budget, self._with_waiting(running, budget, longest_chunk, num_slots))
            self._allowance = {tenant: max(0, share - running.get(tenant, 0)) for tenant, share in shares.items()}
            if num_slots and self._queues:  # so that somebody can begin, however small the shares are
                first = min((queue.peek() for queue in self._queues.values()), key=self._precedence).tenant
                self._allowance[first] = max(1, self._allowance[first])
        try:
            yield
        finally:
            self._allowance = None

    def room(self, tenant: Tenant, num_tokens: int) -> int:
        """How many of these tokens the tenant may take."""
        return num_tokens if self._allowance is None else min(num_tokens, self._allowance.get(tenant, 0))

    def spend(self, tenant: Tenant, num_tokens: int) -> None:
        """The tenant takes them."""
        if self._allowance is not None:
            self._allowance[tenant] -= num_tokens

    def audit(self) -> None:
        """Raise AssertionError if the queue is not in order."""
        assert self._allowance is None, "a budget is still divided"
        for tenant, queue in self._queues.items():
            queue.audit()
            assert len(queue), f"an empty queue of {tenant!r} is kept"
            assert all(request.tenant == tenant for request in queue), f"the queue of {tenant!r} has others in it"

    def _precedence(self, head: Request) -> tuple[bool, int, int, tuple[int, ...]]:
        tenant = head.tenant
        has_none = self._allowance is not None and self._allowance.get(tenant, 0) == 0
        return (has_none, self._num_running.get(tenant, 0), self._served.get(tenant, 0), head.key)

    def _with_waiting(
        self, demands: dict[Tenant, int], budget: int, longest_chunk: int, num_slots: int
    ) -> dict[Tenant, int]:
        """These demands and those of each tenant's first waiting requests, as far as slots and budget could go."""
        demands = dict(demands)
        for tenant, queue in self._queues.items():
            for request in islice(queue, num_slots):
                _add_demand(demands, request, longest_chunk)
                if demands[tenant] >= budget:
                    break
        return demands

    def _note_active(self, active: set[Tenant]) -> None:
        """Who comes starts from where those are who stayed; who went is remembered as long as they are behind."""
        stayed = self._active & active
        if not stayed:
            self._served = {}
        floor = min((self._served[tenant] for tenant in stayed), default=0)
        for tenant in active - stayed:
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
        if len(self._served) > 2 * len(active) + _REMEMBERED:
            self._served = {t: served for t, served in self._served.items() if t in active or served > floor}
        self._active = active


def _add_demand(demands: dict[Tenant, int], request: Request, longest_chunk: int) -> None:
    wanted = min(request.num_tokens - request.num_computed_tokens, longest_chunk)
    demands[request.tenant] = demands.get(request.tenant, 0) + wanted


_REMEMBERED = 64
"""Tenants without live requests that are kept before it is looked which of them matter."""


def place(request: Request) -> tuple[int, tuple[int, ...]]:
    """Where a running request stands: lowest first."""
    return (request.turn, request.key)


def divide(budget: int, demands: dict[Tenant, int]) -> dict[Tenant, int]:
    """Max-min fair shares of a budget: nobody gets more than is asked for, and what is left over goes to the others."""
    shares = {}
    ascending = sorted(demands.items(), key=lambda entry: entry[1])
    for index, (tenant, demand) in enumerate(ascending):
        shares[tenant] = min(demand, budget // (len(ascending) - index))
        budget -= shares[tenant]
    return shares
