"""Wherever an exception ends a call half-way, the call never was: nothing is lost, delivered twice or left behind."""

import sys
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FunctionType

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from scheduler_world import World, make_world

from octavo.engine.core import EngineCore
from octavo.errors import InvalidInput
from octavo.executor.base import Executor
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.free_list import FreeList
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler import scheduler as scheduler_module
from octavo.scheduler.fair_share import FairShare
from octavo.scheduler.journal import UpdateJournal
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request import Request
from octavo.scheduler.sample_group import SampleGroup, SampleGroups
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import Step

CLASSES = [
    BlockPool, FairShare, FreeList, KVCacheManager, Request, SampleGroup, SampleGroups, Scheduler, Step, UpdateJournal,
    WaitingQueue,
]  # fmt: skip
FUNCTIONS = ["check_stop", "find_start", "insort", "take_start", "collect_prompt_logprobs", "make_output"]


class FakeExecutor(Executor):
    def __init__(self, runner) -> None:
        self.runner = runner
        self.fails = lambda step: None
        self.failing = lambda step: []
        """Requests that get an error instead of a token."""
        self.must_reset = False

    def execute_model(self, step):
        assert not self.must_reset, "a failed step was not given up"
        self.step = step
        return done(None)

    def sample_tokens(self):
        self.must_reset = True
        self.fails(self.step)
        self.must_reset = False
        return done(self.runner.execute(self.step, self.failing(self.step)))

    def reset(self) -> None:
        self.must_reset = False
        self.runner.rows.clear()
        self.runner.kv.clear()

    def kernel_report(self):
        return {}

    def shutdown(self) -> None:
        pass


def done(value):
    future = Future()
    future.set_result(value)
    return future


class Injected(Exception):
    pass


class Faults:
    """Raises in calls inside the scheduler and the KV cache, before or after they do what they do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.armed = False
        self.num_raised = 0
        self.strikes = lambda name: False
        for owner in CLASSES:
            for name, function in list(vars(owner).items()):
                if isinstance(function, FunctionType) and name not in ("__bool__", "__contains__", "audit", "stats"):
                    patch.setattr(owner, name, self._wrapped(f"{owner.__name__}.{name}", function))
        for name in FUNCTIONS:
            patch.setattr(scheduler_module, name, self._wrapped(name, getattr(scheduler_module, name)))

    def _wrapped(self, name, function):
        def call(*args, **kwargs):
            self._maybe_raise(f"before {name}")
            value = function(*args, **kwargs)
            # The last thing `commit` does is to let go of the outputs: then the step has been.
            if name not in ("UpdateJournal.close", "Scheduler.commit"):
                self._maybe_raise(f"after {name}")
            return value

        return call

    def _maybe_raise(self, name: str) -> None:
        if self.armed and self.strikes(name):
            self.num_raised += 1
            raise Injected(name)

    @contextmanager
    def inside(self):
        self.armed = True
        try:
            yield
        finally:
            self.armed = False


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


class CoreWorld:
    """An engine core over the scheduler and the runner of a `World`."""

    def __init__(self, world: World, faults: Faults | None = None) -> None:
        self.world = world
        self.faults = faults
        self.num_delivered = 0
        self.core = EngineCore(world.scheduler, FakeExecutor(world.runner))

    def step(self) -> Exception | None:
        """One step, and what it raised."""
        error = None
        with_ids = set(self.world.live)
        try:
            if self.faults is None:
                outputs = self.core.step()
            else:
                with self.faults.inside():
                    outputs = self.core.step()
        except Exception as raised:
            error, outputs = raised, []
        assert len({out.request_id for out in outputs}) == len(outputs)
        self.take(outputs)
        self.core.audit()
        assert set(self.core.failed_request_ids) <= with_ids
        stats = self.core.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.world.live)
        assert stats.generation_tokens == self.num_delivered
        return error

    def take(self, outputs) -> None:
        for out in outputs:
            known = self.world.live[out.request_id]
            known.output += out.new_token_ids
            self.num_delivered += len(out.new_token_ids)
            known.last = out
            if out.new_token_ids:
                self.world._check_first_of_arrival(known.arrival, out)
            if out.finish_reason is not None:
                self.world.ended.append(self.world.live.pop(out.request_id))

    def abort(self, request_id: str) -> None:
        """Until it succeeds. What has ended by a call that failed gets no output: the caller ends it by itself."""
        for _ in range(100):
            try:
                with self.faults.inside():
                    self.take(self.core.abort_requests([request_id]))
                break
            except Injected:
                self.core.audit()
        for sample_id in [i for i, k in self.world.live.items() if request_id in (i, k.message.request_id)]:
            del self.world.live[sample_id]

    def drain(self) -> None:
        for _ in range(5000):
            if not self.core.has_unfinished_requests():
                break
            self.step()
        self.world.drain()


def random_world(rng: Random) -> World:
    num_blocks = rng.choice([3, 4, 8, 20])
    return make_world(
        num_blocks=num_blocks,
        block_size=8,
        caching=rng.random() < 0.6,
        policy=rng.choice(["fcfs", "priority"]),
        fair_share=rng.random() < 0.5,
        max_num_seqs=rng.choice([1, 3, 8]),
        budget=rng.choice([2, 7, 30]),
        free_order=rng.sample(range(num_blocks), num_blocks),
    )


def add_some(world: World, rng: Random, start: int = 0) -> None:
    for number in range(start, start + rng.randint(2, 6)):
        prompt = [rng.randrange(3) for _ in range(rng.choice([1, 5, 8, 17]))]
        world.add_samples(
            f"r{number}", prompt, rng.choice([1, 1, 2, 5]), max_tokens=rng.choice([1, 3, 6]),
            priority=rng.randint(0, 2), stop_token_ids=rng.choice([[], [23]]),
            prompt_logprobs=rng.choice([None, None, 0]), tenant=rng.choice([None, "x", "x"]),
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_whatever_raises_wherever_each_request_ends_with_the_tokens_it_has_alone(faults, seed):
    rng = Random(seed)
    core = CoreWorld(random_world(rng), faults)
    if rng.random() < 0.3:
        core.core.executor.failing = lambda step: [i for i in step.request_ids if rng.random() < 0.05]
    rate, most = rng.choice([0.002, 0.01, 0.05]), rng.choice([3, 20])
    faults.strikes = lambda name: faults.num_raised < most and rng.random() < rate
    for turn in range(3):
        add_some(core.world, rng, start=10 * turn)
        for _ in range(rng.randint(1, 12)):
            core.step()
            if core.world.live and rng.random() < 0.1:
                known = core.world.live[rng.choice(list(core.world.live))]
                core.abort(rng.choice([known.message.request_id, known.arrival.sample_ids[known.index]]))
    core.drain()


def test_a_fault_at_every_seventh_call_of_a_run_is_made_good(faults):
    """Two samples, two requests, preemption: one call in seven fails, each in a run of its own."""
    number, where = 0, set()
    while True:
        core = CoreWorld(make_world(num_blocks=4, block_size=8, budget=9), faults)
        core.world.add_samples("s", [1] * 9, 2, max_tokens=2, prompt_logprobs=0)
        core.world.add("b", [2] * 5, max_tokens=9)
        count, faults.num_raised = 0, 0

        def strike(name: str, number=number) -> bool:
            nonlocal count
            count += 1
            if count == number + 1:
                where.add(name)
            return count == number + 1

        faults.strikes = strike
        core.drain()
        if not faults.num_raised:
            break
        number += 7
    assert {name.split()[1].split(".")[0] for name in where} >= {"KVCacheManager", "SampleGroups", "Scheduler", "Step"}


def test_a_request_that_a_failed_update_ended_still_gets_its_last_output(monkeypatch):
    core = CoreWorld(make_world(num_blocks=8))
    ends = core.world.add("ends", [1, 2], max_tokens=1)
    core.world.add("goes on", [3, 4], max_tokens=5)
    publish, calls = KVCacheManager.publish, []

    def fail_second(self, request) -> None:
        calls.append(request.request_id)
        if len(calls) == 2:
            raise MemoryError("injected")
        publish(self, request)

    monkeypatch.setattr(KVCacheManager, "publish", fail_second)
    assert isinstance(core.step(), MemoryError)
    assert core.core.failed_request_ids == ["ends", "goes on"]
    assert (ends.output, core.world.live.keys()) == ([], {"ends", "goes on"})
    assert core.step() is None
    assert len(ends.output) == 1 and "ends" not in core.world.live
    core.drain()


def test_prompt_logprobs_that_a_failed_update_had_taken_come_with_another_sample(monkeypatch):
    core = CoreWorld(make_world(num_blocks=8))
    first, second = core.world.add_samples("s", [1, 2, 3], 2, prompt_logprobs=0)

    def fail(request) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "check_stop", fail)
        assert isinstance(core.step(), MemoryError)
    core.take(core.core.abort_requests(["0_s"]))
    core.drain()
    assert not first.output and second.output and not second.arrival.prompt_logprobs_are_due


def test_a_refused_request_does_not_disturb_those_that_run():
    core = CoreWorld(make_world(num_blocks=8))
    known = core.world.add("a", [1] * 3)
    core.step()
    with pytest.raises(InvalidInput):
        core.core.add_request(known.message)
    assert core.core.stats.num_running == 1 and core.core.stats.num_preemptions == 0
    core.drain()


def test_a_failed_execution_names_its_requests():
    core = CoreWorld(make_world(num_blocks=8))
    core.world.add("a", [1] * 3)
    core.step()
    core.world.add("b", [1] * 3)

    def fail(step) -> None:
        raise OSError("injected")

    core.core.executor.fails = fail
    assert isinstance(core.step(), OSError) and core.core.failed_request_ids == ["a", "b"]
    core.core.executor.fails = lambda step: None
    core.drain()


def test_a_failed_schedule_names_the_request_it_was_looking_at(monkeypatch):
    core = CoreWorld(make_world(num_blocks=8))
    core.world.add("a", [1] * 3)
    core.world.add("b", [2] * 3)
    find_start = scheduler_module.find_start

    def fail_for_b(kv, request):
        if request.request_id == "b":
            raise ValueError("injected")
        return find_start(kv, request)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "find_start", fail_for_b)
        assert isinstance(core.step(), ValueError) and core.core.failed_request_ids == ["b"]
    core.drain()


def test_an_interrupted_recovery_is_taken_up_by_the_next_call(monkeypatch):
    core = CoreWorld(make_world(num_blocks=8))
    core.world.add("a", [1] * 3)
    core.step()

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KVCacheManager, "publish", interrupt)
        patch.setattr(SampleGroups, "rebuild", interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.core.step()
    core.core.audit()
    core.drain()


def test_a_request_whose_queueing_failed_was_never_there(monkeypatch):
    core = CoreWorld(make_world(num_blocks=8))
    core.world.add("a", [1] * 3)
    core.step()
    for n in (1, 3):
        other = make_world(num_blocks=8)
        message = other.add_samples("x", [1] * 3, n)[0].message
        for owner, name in ((WaitingQueue, "add"), (Scheduler, "_enqueue")):
            with monkeypatch.context() as patch:
                original = getattr(owner, name)
                raised = []

                def late(*args, original=original, raised=raised):
                    original(*args)
                    if not raised:
                        raised.append(True)
                        raise MemoryError("injected")

                patch.setattr(owner, name, late)
                with pytest.raises(MemoryError):
                    core.core.add_request(message)
            core.core.audit()
            assert core.core.stats.num_waiting + core.core.stats.num_running == 1
    core.drain()


def test_a_half_done_step_does_not_pass_the_audit():
    world = make_world(num_blocks=8)
    world.add("a", [1] * 3)
    step = world.scheduler.schedule()
    world.scheduler.audit()
    with pytest.raises(AssertionError, match="neither updated nor given up"):
        EngineCore(world.scheduler, FakeExecutor(world.runner)).audit()
    world.running()[0].num_computed_tokens += 1
    with pytest.raises(AssertionError, match="ended half-way"):
        world.scheduler.audit()
    assert step.request_ids == ["a"]
