"""An AsyncLLM under load: the queue is bounded, long prompts hold up nobody, readers and heartbeats keep up."""

import asyncio
import threading
import time

import pytest
from async_driver import ENDLESS_OPTIONS, GREEDY, endless, eventually, last_output, long, with_llm

from octavo import RequestOutputKind, SamplingParams
from octavo.engine import core_server
from octavo.engine.assemble import make_core
from octavo.errors import InvalidInput, Overloaded

BOTH = pytest.mark.parametrize("core", ["thread", pytest.param("process", marks=pytest.mark.slow)])


async def hold_the_engine(llm) -> asyncio.Task:
    """A request of the endless llama that takes the only seat until it is aborted as "holder"."""
    task = asyncio.create_task(last_output(llm, [1], endless(), request_id="holder"))
    await eventually(lambda: llm.load() == (1, 0, 0))
    return task


async def let_go(llm, *tasks: asyncio.Task) -> None:
    await llm.abort("holder")
    await asyncio.gather(*tasks)


@BOTH
def test_the_queue_is_bounded_in_requests_and_places_are_given_back(endless_llama, core):
    async def use(llm):
        holder = await hold_the_engine(llm)
        queued = [asyncio.create_task(last_output(llm, [1, 2, 3], GREEDY, request_id=str(i))) for i in range(4)]
        await eventually(lambda: llm.load() == (1, 4, 12))
        # the holder never ends: who waited for a place would wait for ever
        with pytest.raises(Overloaded, match=r"4 requests wait.*max_queued_requests=4.*try again in") as refusal:
            await asyncio.wait_for(last_output(llm, [1], GREEDY), 10)
        assert 1 <= refusal.value.retry_after <= 60
        queued.pop().cancel()  # a place is free at once
        await asyncio.sleep(0)
        queued.append(asyncio.create_task(last_output(llm, [1, 2], GREEDY)))
        await eventually(lambda: llm.load() == (1, 4, 11))
        await llm.abort("0")
        assert (await queued[0]).outputs[0].finish_reason == "abort"
        assert llm.load().num_queued == 3
        await let_go(llm, holder, *queued)

    with_llm(endless_llama, use, core=core, max_num_seqs=1, max_queued_requests=4, **ENDLESS_OPTIONS)


def test_the_queue_is_bounded_in_tokens_and_nobody_else_is_harmed(endless_llama):
    async def use(llm):
        holder = await hold_the_engine(llm)
        first = asyncio.create_task(last_output(llm, [1] * 500, GREEDY))  # more than the bound, but nobody waits
        await eventually(lambda: llm.load() == (1, 1, 500))
        with pytest.raises(Overloaded, match=r"500 prompt tokens wait.*max_queued_tokens=100"):
            await last_output(llm, [1], GREEDY)
        await let_go(llm, holder, first)

        holder = await hold_the_engine(llm)
        queued = [asyncio.create_task(last_output(llm, [1] * 40, GREEDY)) for _ in range(2)]
        await eventually(lambda: llm.load() == (1, 2, 80))
        with pytest.raises(Overloaded, match="a prompt of 21 tokens would exceed"):
            await last_output(llm, [1] * 21, GREEDY)
        queued.append(asyncio.create_task(last_output(llm, [1] * 20, GREEDY)))
        await eventually(lambda: llm.load() == (1, 3, 100))
        await let_go(llm, holder, *queued)

    with_llm(endless_llama, use, max_num_seqs=1, max_queued_tokens=100, **ENDLESS_OPTIONS)


def test_a_refused_request_and_one_that_fails_leave_the_queue(tiny_llama):
    async def use(llm):
        for prompt, error in (
            (None, InvalidInput),
            ([], InvalidInput),
            ([1] * 5000, InvalidInput),
            ([999], ValueError),
        ):
            with pytest.raises(error):
                await last_output(llm, prompt, GREEDY)
            assert llm.load() == (0, 0, 0)
        with pytest.raises(InvalidInput, match="tenant"):
            await last_output(llm, [1], GREEDY, tenant=7)
        assert len((await last_output(llm, [1], GREEDY, tenant="x")).outputs[0].token_ids) == 6

    with_llm(tiny_llama, use, max_queued_requests=1)


def test_a_request_waits_until_the_core_has_begun_it_however_long_its_prompt_is(tiny_llama, monkeypatch):
    cores, may_step = [], threading.Event()
    monkeypatch.setattr(core_server, "make_core", lambda *args: cores.append(make_core(*args)) or cores[-1])

    async def use(llm):
        executor, step_done, seen = cores[0].executor, llm._hub.step_done, []
        execute = executor.execute_model
        executor.execute_model = lambda step: may_step.wait(60) and execute(step)

        def look(step):
            step_done(step)
            seen.append(llm.load())

        llm._hub.step_done = look  # after every turn of the core: some last no longer than a look from here takes
        tasks = [asyncio.create_task(last_output(llm, [1] * 400, SamplingParams(max_tokens=1, n=3))) for _ in range(3)]
        await eventually(lambda: llm.load() == (0, 3, 1200))
        may_step.set()
        await asyncio.gather(*tasks)
        assert seen[0] == (1, 2, 800), "the first is begun, and has no token yet; requests count, not samples"
        assert max(load.num_running + load.num_queued for load in seen) == 3

    with_llm(tiny_llama, use, max_num_batched_tokens=16, enable_prefix_caching=False)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
@pytest.mark.parametrize("option", ["max_queued_requests", "max_queued_tokens"])
def test_a_bound_that_is_none_is_refused(tiny_llama, option, value):
    with pytest.raises(InvalidInput, match=f"{option}=.*integer >= 1"):
        with_llm(tiny_llama, None, **{option: value})


def test_a_thousand_huge_prompts_at_once_are_answered_at_once(tiny_llama):
    """One is taken to be tokenised, in a thread of its own; the others find the queue full or are hopelessly long."""

    async def use(llm):
        text = "word " * 1_000_000
        started = time.monotonic()
        answers = await asyncio.gather(*(last_output(llm, text, GREEDY) for _ in range(1000)), return_exceptions=True)
        seconds = time.monotonic() - started
        assert all(isinstance(answer, (Overloaded, InvalidInput)) for answer in answers)
        assert sum(isinstance(answer, InvalidInput) for answer in answers) == 8
        assert all("at least 1000000 tokens" in str(a) for a in answers if isinstance(a, InvalidInput))
        assert seconds < 5

    with_llm(tiny_llama, use, max_queued_requests=8)


def test_short_prompts_do_not_wait_for_a_long_one_to_be_tokenised(tiny_llama):
    async def use(llm):
        holds, tokenize = threading.Event(), llm._input_processor.tokenize
        llm._input_processor.min_tokens = lambda prompt: 0
        llm._input_processor.tokenize = lambda prompt: holds.wait(60) and None if prompt.text else tokenize(prompt)
        slow = [
            asyncio.create_task(last_output(llm, prompt, GREEDY))
            for prompt in ("word " * 20_000, {"prompt": "word " * 20_000})
        ]
        slow.append(asyncio.create_task(anext(llm.chat([{"role": "user", "content": "word " * 20_000}], GREEDY))))
        await asyncio.sleep(0.05)
        out = await asyncio.wait_for(last_output(llm, [1, 2], GREEDY), 30)
        assert len(out.outputs[0].token_ids) == 6
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        holds.set()
        await asyncio.gather(*slow, return_exceptions=True)

    with_llm(tiny_llama, use)


def test_a_request_that_is_aborted_while_its_reader_is_slow_is_told_so(endless_llama):
    async def use(llm):
        stream = llm.generate([1, 2], endless(output_kind=RequestOutputKind.DELTA), "slow")
        first = await anext(stream)
        await eventually(lambda: llm.stats().generation_tokens > 20)
        await llm.abort("slow")
        (held,) = llm._hub.streams.values()
        await eventually(lambda: held._pending is not None and held._pending.finished)
        assert llm.load() == (0, 0, 0), "it runs no more, though its reader has not heard of it yet"
        last = await anext(stream)
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        assert len(first.outputs[0].token_ids) + len(last.outputs[0].token_ids) > 20
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with_llm(endless_llama, use, **ENDLESS_OPTIONS)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_time_of_every_token_is_told_once_even_to_a_slow_reader(tiny_llama, kind):
    async def use(llm):
        before, between, count, first = time.monotonic(), [], 0, None
        async for out in llm.generate([1, 2], long(30, output_kind=kind)):
            between += out.metrics.between_tokens
            first, count = out.metrics.time_to_first_token, count + 1
            await asyncio.sleep(0.02)
        elapsed = time.monotonic() - before
        assert len(between) == 29
        assert first > 0 and first + sum(between) <= elapsed
        assert out.metrics.queue_time + out.metrics.prefill_time == pytest.approx(first)
        assert out.metrics.decode_time == pytest.approx(sum(between))

    with_llm(tiny_llama, use)


def test_the_time_a_request_waits_to_be_tokenised_counts_as_queued(tiny_llama):
    async def use(llm):
        holds = threading.Event()
        llm._tokenizer_thread.submit(holds.wait, 60)
        task = asyncio.create_task(last_output(llm, [1, 2], GREEDY))
        await eventually(lambda: llm._hub.streams)
        await asyncio.sleep(0.2)
        holds.set()
        assert (await task).metrics.queue_time > 0.15

    with_llm(tiny_llama, use)


def test_a_flood_of_one_tenant_does_not_hold_up_another(tiny_llama):
    async def use(llm):
        # long ones: of the first comers none ends before the test has seen them run, or all that are before it is "b"
        flood = [
            asyncio.create_task(last_output(llm, [1, i], long(300), request_id=str(i), tenant="a")) for i in range(60)
        ]
        await eventually(lambda: llm.load().num_queued > 40 and llm.load().num_running)
        out = await last_output(llm, [7, 8], GREEDY, tenant="b")
        assert len(out.outputs[0].token_ids) == 6
        assert sum(task.done() for task in flood) < 20
        await llm.abort([str(i) for i in range(60)])
        await asyncio.gather(*flood)

    with_llm(tiny_llama, use, max_num_seqs=4, fair_share=True)


@pytest.mark.slow
def test_a_short_heartbeat_timeout_raises_no_false_alarm_on_a_busy_machine(tiny_llama):
    """More threads than cores hold the interpreter and the processors, on both ends."""

    async def use(llm):
        assert llm.core_pid is not None
        stop = threading.Event()

        def burn():
            while not stop.is_set():
                sum(i * i for i in range(10_000))

        threads = [threading.Thread(target=burn) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            await asyncio.gather(*(last_output(llm, [1, i], long(200)) for i in range(64)))
        finally:
            stop.set()
        for thread in threads:
            thread.join()

    with_llm(tiny_llama, use, core="process", heartbeat_timeout=5.0, num_kv_blocks=1024)
