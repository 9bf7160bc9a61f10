"""The loop that serves a core: a real scheduler over an executor without a model, reached over sockets."""

import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.core_server import CoreServer, bind, connect
from octavo.errors import InvalidInput
from octavo.executor.base import Executor
from octavo.protocol.core_messages import (
    AbortRequests,
    AddRequest,
    CallResult,
    CoreCall,
    CoreMethod,
    EngineFailed,
    EngineReady,
    FromCore,
    Heartbeat,
    Shutdown,
    StartEngine,
    StepOutputs,
)
from octavo.protocol.messages import EngineCoreRequest, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.scheduler import Scheduler

TOKEN = 7


class ScriptedExecutor(Executor):
    """Answers TOKEN for every request; fails or waits when told to."""

    def __init__(self) -> None:
        self.fail_with: BaseException | None = None
        self.failures_left = 1000
        self.may_step = threading.Event()
        self.may_step.set()
        self.num_steps = self.num_resets = 0
        self.is_shut_down = False

    def execute_model(self, step: SchedulerOutput) -> "Future[None]":
        self.num_steps += 1
        self.may_step.wait(60)
        self.step = step
        future: Future[None] = Future()
        if self.fail_with is not None and self.failures_left:
            self.failures_left -= 1
            future.set_exception(self.fail_with)
        else:
            future.set_result(None)
        return future

    def sample_tokens(self) -> "Future[ModelRunnerOutput]":
        future: Future[ModelRunnerOutput] = Future()
        sampled = [[TOKEN]] * len(self.step.request_ids)  # the prompts of these tests are computed in one step
        future.set_result(ModelRunnerOutput(request_ids=self.step.request_ids, sampled_token_ids=sampled))
        return future

    def reset(self) -> None:
        self.num_resets += 1

    def kernel_report(self) -> dict[str, str]:
        return {"linear": "none"}

    def shutdown(self) -> None:
        self.is_shut_down = True


class Client:
    """The other end of a server that runs in a thread."""

    def __init__(self, build=None, interval: float = 5.0) -> None:
        self.executor = ScriptedExecutor()
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=64)
        self.scheduler = Scheduler(config, CacheConfig(num_blocks=16))
        self.context = zmq.Context()
        self.inbox = bind(self.context, "inproc://client")
        self.outbox = connect(self.context, "inproc://core")
        build = build or (lambda start: EngineCore(self.scheduler, self.executor))
        self.server = CoreServer(self.context, "inproc://core", "inproc://client", build)
        self.ended_well: bool | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.send(StartEngine(config=msgspec.Raw(b"\xc0"), vocab_size=10, heartbeat_interval=interval))

    def _run(self) -> None:
        self.ended_well = self.server.run()

    def send(self, message: object) -> None:
        self.outbox.send(msgspec.msgpack.encode(message))

    def receive(self, kind: type, seconds: float = 60.0):
        """The next message of this kind; others are passed over, but for failures of the engine."""
        deadline = time.monotonic() + seconds
        while self.inbox.poll(max(0, deadline - time.monotonic()) * 1000):
            message = msgspec.msgpack.decode(self.inbox.recv(), type=FromCore)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, EngineFailed), message
        raise AssertionError(f"no {kind.__name__} came")

    def receive_until(self, holds) -> list[StepOutputs]:
        """Turns of the loop, up to one for which `holds`."""
        turns = [self.receive(StepOutputs)]
        while not holds(turns[-1]):
            turns.append(self.receive(StepOutputs))
        return turns

    def call(self, method: CoreMethod) -> CallResult:
        self.send(CoreCall(call_id=9, method=method))
        return self.receive(CallResult)

    def close(self) -> None:
        self.executor.may_step.set()
        self.send(Shutdown())
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.inbox.close()
        self.outbox.close()
        self.context.term()


@contextmanager
def serving(**options):
    client = Client(**options)
    try:
        yield client
    finally:
        client.close()


def request(request_id: str, max_tokens: int = 3, num_prompt_tokens: int = 4) -> AddRequest:
    return AddRequest(
        EngineCoreRequest(
            request_id=request_id, prompt_token_ids=[1] * num_prompt_tokens, arrival_time=0.0,
            sampling_params=SamplingParams(max_tokens=max_tokens, seed=0),
        )
    )  # fmt: skip


def finishes(request_id: str):
    return lambda turn: any(out.request_id == request_id and out.finish_reason for out in turn.outputs)


def test_a_request_comes_back_token_by_token_and_the_last_turn_shows_its_blocks_free():
    with serving() as client:
        assert client.receive(EngineReady).kernels == {"linear": "none"}
        client.send(request("a"))
        turns = client.receive_until(finishes("a"))
        outputs = [out for turn in turns for out in turn.outputs]
        assert [out.new_token_ids for out in outputs] == [[TOKEN]] * 3
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert turns[-1].stats.kv_blocks_in_use == 0
        assert turns[-1].stats.generation_tokens == 3
    assert client.ended_well is True
    assert client.executor.is_shut_down


def test_an_idle_loop_sleeps():
    with serving() as client:
        client.receive(EngineReady)
        turns = []
        client.server._step = lambda *args: turns.append(args) or []
        time.sleep(0.3)
        assert turns == []
        client.send(AbortRequests(["unknown"]))
        client.receive(StepOutputs)
        time.sleep(0.3)
        assert len(turns) == 1


def test_messages_are_followed_in_order_and_answers_show_those_before():
    with serving() as client:
        client.executor.may_step.clear()
        client.send(request("a", max_tokens=50))
        client.send(request("b", max_tokens=50))
        client.send(AbortRequests(["a"]))
        client.send(CoreCall(call_id=1, method=CoreMethod.STATS))
        client.executor.may_step.set()
        stats = client.receive(CallResult).value
        assert stats.num_running + stats.num_waiting == 1


def test_an_abort_between_steps_frees_blocks_before_the_next_step():
    with serving() as client:
        client.executor.may_step.clear()
        client.send(request("a", max_tokens=60))
        while not client.executor.num_steps:
            time.sleep(0.001)
        client.send(AbortRequests(["a", "unknown"]))
        client.executor.may_step.set()
        turns = client.receive_until(finishes("a"))
        assert [(out.new_token_ids, out.finish_reason) for turn in turns for out in turn.outputs] == [
            ([TOKEN], None),
            ([], FinishReason.ABORT),
        ]
        assert turns[-1].stats.kv_blocks_in_use == 0
        assert client.executor.num_steps == 1


def test_a_step_that_fails_ends_its_requests_with_the_cause_and_nothing_else():
    with serving() as client:
        client.receive(EngineReady)
        client.executor.fail_with = ArithmeticError("sums do not add up")
        client.send(request("a"))
        client.send(request("b"))
        failures = []
        while len(failures) < 2:  # both in one step, or one after the other
            failures += client.receive(StepOutputs).failures
        assert sorted(failure.request_id for failure in failures) == ["a", "b"]
        assert all("sums do not add up" in failure.message for failure in failures)
        assert not any(failure.is_invalid_input for failure in failures)
        client.executor.fail_with = None
        assert client.executor.num_resets in (1, 2)
        client.send(request("a"))
        turns = client.receive_until(finishes("a"))
        assert turns[-1].stats.kv_blocks_in_use == 0
        assert client.call(CoreMethod.AUDIT).error is None


def test_a_request_that_is_not_in_the_failing_step_outlives_it():
    with serving() as client:
        client.receive(EngineReady)
        client.executor.may_step.clear()
        client.executor.fail_with = ValueError("no")
        client.executor.failures_left = 1
        client.send(request("first"))
        while not client.executor.num_steps:
            time.sleep(0.001)
        client.send(request("second"))
        client.executor.may_step.set()
        turns = client.receive_until(finishes("second"))
        assert [failure.request_id for turn in turns for failure in turn.failures] == ["first"]


def test_a_refused_request_fails_alone():
    with serving() as client:
        client.send(request("long", num_prompt_tokens=64))
        (failure,) = client.receive_until(lambda turn: turn.failures)[-1].failures
        assert failure.is_invalid_input
        assert "64" in failure.message
        client.send(request("a"))
        client.receive_until(finishes("a"))


def test_broken_accounts_are_reported_by_an_audit():
    with serving() as client:
        assert client.call(CoreMethod.AUDIT).error is None
        client.scheduler._kv.pool.blocks[0].ref_count = 1
        assert client.call(CoreMethod.AUDIT).error


def test_the_prefix_cache_is_reset_only_while_nothing_holds_blocks():
    with serving() as client:
        client.send(request("a", num_prompt_tokens=40))
        client.receive_until(finishes("a"))
        assert client.call(CoreMethod.STATS).value.kv_blocks_cached == 2
        assert client.call(CoreMethod.RESET_PREFIX_CACHE).value is True
        assert client.call(CoreMethod.STATS).value.kv_blocks_cached == 0


def test_the_pulse_goes_on_in_a_step_and_tells_how_long_it_takes():
    with serving(interval=0.02) as client:
        assert client.receive(Heartbeat).seconds_in_step == 0.0
        client.executor.may_step.clear()
        client.send(request("a"))
        seconds = 0.0
        while seconds < 0.1:
            seconds = client.receive(Heartbeat).seconds_in_step
        client.executor.may_step.set()
        client.receive_until(finishes("a"))
        while client.receive(Heartbeat).seconds_in_step:
            pass


@pytest.mark.parametrize(("error", "refused"), [(InvalidInput("bad file"), True), (OSError("bad disk"), False)])
def test_a_core_that_cannot_be_built_says_why_and_waits_to_be_heard(error, refused):
    def build(start):
        raise error

    with serving(build=build) as client:
        failed = client.receive(EngineFailed)
        assert str(error) in failed.message
        assert failed.is_invalid_input is refused
        assert (failed.message == str(error)) is refused
        time.sleep(0.05)
        assert client.thread.is_alive()
    assert client.ended_well is False


def test_a_scheduler_that_fails_ends_the_engine_with_the_cause():
    with serving() as client:
        client.receive(EngineReady)

        def schedule():
            raise AssertionError("a block is in two places")

        client.scheduler.schedule = schedule
        client.send(request("a"))
        failed = client.receive(EngineFailed)
        assert "a block is in two places" in failed.message
        assert not failed.is_invalid_input
    assert client.ended_well is False
    assert client.executor.is_shut_down


def test_a_message_that_cannot_be_read_ends_the_engine_with_the_cause():
    with serving() as client:
        client.receive(EngineReady)
        client.outbox.send(b"\xc1")
        assert "DecodeError" in client.receive(EngineFailed).message


def test_told_to_stop_before_it_began_a_server_just_ends():
    context = zmq.Context()
    inbox, outbox = bind(context, "inproc://client"), connect(context, "inproc://core")
    outbox.send(msgspec.msgpack.encode(Shutdown()))
    assert CoreServer(context, "inproc://core", "inproc://client").run() is True
    inbox.close()
    outbox.close()
    context.term()


def test_a_turn_names_the_requests_it_has_begun_even_if_the_step_failed():
    with serving() as client:
        client.send(request("a"))
        (turn,) = client.receive_until(lambda turn: turn.first_scheduled)[-1:]
        assert turn.first_scheduled == ["a"]
        client.receive_until(lambda turn: any(out.finish_reason for out in turn.outputs))
        client.executor.fail_with = ValueError("broken")
        client.send(request("b"))
        (turn,) = client.receive_until(lambda turn: turn.failures)[-1:]
        assert turn.first_scheduled == ["b"]
        client.send(AbortRequests(["nobody"]))
        assert client.receive(StepOutputs).first_scheduled == [], "a turn without a step has begun nobody"
