"""Requests of an AsyncLLM that end before their time: left, aborted, failed. Nobody else is harmed, nothing is left."""

import asyncio
import itertools
import random
import threading

import pytest
from async_driver import (
    ENDLESS_OPTIONS,
    GREEDY,
    assert_nothing_held,
    endless,
    eventually,
    last_output,
    long,
    with_llm,
)

from octavo import AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from octavo.engine import core_server
from octavo.engine.assemble import make_core

LEAVE = {
    "waiting": (1, [1] * 20, 0),  # behind a request that takes the only seat
    "prefilling": (8, [1] * 16_000, 0),  # in chunks of 8: 2000 steps, a long time on any machine
    "decoding": (8, [1] * 20, 3),
}


@pytest.mark.parametrize(
    ("phase", "way"),
    # there is nothing to break out of before the first output
    [("decoding", "break"), *itertools.product(LEAVE, ["aclose", "cancel", "abort"])],
)
def test_a_request_that_is_left_frees_its_blocks_by_the_next_step(endless_llama, phase, way):
    max_num_seqs, prompt, num_outputs = LEAVE[phase]

    async def read(llm, seen):
        async for out in llm.generate(prompt, endless(), "left"):
            seen.append(out)
            if way == "break" and len(out.outputs[0].token_ids) >= num_outputs:
                break

    async def use(llm):
        other = asyncio.create_task(last_output(llm, [7], endless(), request_id="other"))
        await eventually(lambda: llm.stats().num_running == 1)
        seen = []
        stream = llm.generate(prompt, endless(), "left")
        if way == "aclose":
            reader = asyncio.create_task(anext(stream))
            if num_outputs:
                await reader
        else:
            reader = asyncio.create_task(read(llm, seen))
        # it may be over between two looks: a reader that breaks out leaves nothing to see here
        await eventually(
            lambda: llm.stats().num_running + llm.stats().num_waiting == 2 or len(seen) > num_outputs or reader.done()
        )
        if num_outputs and way != "aclose":
            await eventually(lambda: len(seen) >= num_outputs or reader.done())
        if way == "abort":
            await llm.abort("left")
            await reader
            assert seen[-1].finished
            assert seen[-1].outputs[0].finish_reason == "abort"
        elif way == "cancel" or (way == "aclose" and not num_outputs):
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        elif way == "aclose":
            await stream.aclose()
        else:
            await reader
            await eventually(lambda: len(llm._hub.streams) == 1)  # the event loop closes it in its next turns
        metrics = await llm.get_metrics()
        assert metrics["num_running"] + metrics["num_waiting"] == 1, "the request that was left is still there"
        await llm.abort("other")
        assert (await other).outputs[0].finish_reason == "abort"

    options = {**ENDLESS_OPTIONS, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8}
    with_llm(endless_llama, use, **options, enable_prefix_caching=False)


def test_abort_ends_every_request_of_an_id_and_no_other(endless_llama):
    async def use(llm):
        tasks = [
            asyncio.create_task(last_output(llm, [1, number], endless(), request_id=name))
            for number, name in enumerate(["same", "other", "same", "third"])
        ]
        await eventually(lambda: llm.stats().num_running == 4)
        await llm.abort("unknown")
        await llm.abort("same")
        ended = [await tasks[0], await tasks[2]]
        assert [(out.request_id, out.outputs[0].finish_reason) for out in ended] == [("same", "abort")] * 2
        assert not tasks[1].done()
        await llm.abort(["other", "third"])
        assert [(await task).outputs[0].finish_reason for task in (tasks[1], tasks[3])] == ["abort"] * 2

    with_llm(endless_llama, use, **ENDLESS_OPTIONS)


def test_an_abort_before_the_request_was_tokenised_still_ends_its_stream(tiny_llama):
    async def use(llm):
        holds = threading.Event()
        llm._tokenizer_thread.submit(holds.wait, 20)
        task = asyncio.create_task(last_output(llm, [1, 2], long(), request_id="early"))
        await eventually(lambda: llm._hub.streams)
        await llm.abort("early")
        holds.set()
        out = await task
        assert (out.finished, out.outputs[0].finish_reason) == (True, "abort")

    with_llm(tiny_llama, use)


def test_a_request_cancelled_before_it_was_tokenised_never_reaches_the_core(tiny_llama):
    async def use(llm):
        holds = threading.Event()
        llm._tokenizer_thread.submit(holds.wait, 20)
        task = asyncio.create_task(last_output(llm, [1, 2], long()))
        await eventually(lambda: llm._hub.streams)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        holds.set()
        await last_output(llm, [3], GREEDY)
        assert (await llm.get_metrics())["prompt_tokens"] == 1

    with_llm(tiny_llama, use)


def test_a_stream_whose_event_loop_was_closed_under_it_is_aborted(endless_llama):
    llm = AsyncLLM(endless_llama, core="thread", heartbeat_timeout=5.0, **ENDLESS_OPTIONS)
    loop = asyncio.new_event_loop()
    streams = [
        llm.generate([1], endless(output_kind=kind))
        for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE)
    ]
    readers = [loop.create_task(anext(stream)) for stream in streams]
    loop.run_until_complete(eventually(lambda: llm.stats().num_running == 2))
    loop.close()

    async def check():
        await eventually(lambda: not llm._hub.streams)
        await assert_nothing_held(llm)
        await llm.shutdown()

    asyncio.run(check())
    for reader in readers:
        reader._log_destroy_pending = False


@pytest.mark.slow
@pytest.mark.parametrize("core", ["thread", "process"])
def test_a_storm_of_requests_with_random_disconnects_leaves_nothing_and_harms_nobody(tiny_llama, make_llm, core):
    rng = random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(rng.choice([1, 5, 17, 40, 100]))] for _ in range(500)]
    params = [long(rng.randint(1, 24), stop=rng.choice([None, "a"])) for _ in prompts]
    params = [SamplingParams(**{**dict_of(p), "temperature": rng.choice([0, 1]), "seed": 3}) for p in params]
    fates = [rng.choice(["read", "read", "break", "cancel", "abort"]) for _ in prompts]
    expected = make_llm().generate(prompts, params)

    async def one(llm, index):
        await asyncio.sleep(random.Random(index).random() * 1.5)
        limit, last = random.Random(index).randint(0, 6), None
        async for last in llm.generate(prompts[index], params[index], str(index % 50)):
            if fates[index] == "break" and len(last.outputs[0].token_ids) >= limit:
                return None
        return last

    async def use(llm):
        tasks = [asyncio.create_task(one(llm, index)) for index in range(len(prompts))]

        async def disturb():
            for index in rng.sample(range(len(prompts)), len(prompts)):
                await asyncio.sleep(0.002)
                if fates[index] == "cancel":
                    tasks[index].cancel()
                elif fates[index] == "abort" and not rng.randrange(8):
                    await llm.abort(str(index % 50))

        _, *answers = await asyncio.gather(disturb(), *tasks, return_exceptions=True)
        finished = 0
        for index, answer in enumerate(answers):
            if isinstance(answer, asyncio.CancelledError) or answer is None:
                continue
            assert not isinstance(answer, BaseException), answer
            wanted = expected[index].outputs[0]
            completion = answer.outputs[0]
            assert completion.token_ids == wanted.token_ids[: len(completion.token_ids)]
            if completion.finish_reason != "abort":
                finished += 1
                assert completion == wanted
        assert finished > 100
        assert llm._hub.streams == {}
        await eventually(lambda: not llm._hub._output_processor.has_unfinished_requests())

    with_llm(tiny_llama, use, core=core, num_kv_blocks=40, max_num_seqs=32)


def dict_of(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in ("max_tokens", "stop", "ignore_eos")}


def test_a_step_that_fails_ends_its_streams_with_the_cause_and_the_engine_lives_on(
    endless_llama, monkeypatch, make_llm
):
    cores = []
    monkeypatch.setattr(core_server, "make_core", lambda *args: cores.append(make_core(*args)) or cores[-1])
    expected = make_llm(endless_llama).generate([1, 2], GREEDY)[0].outputs

    async def use(llm):
        executor = cores[0].executor
        tasks = [asyncio.create_task(last_output(llm, [1, number], endless())) for number in range(3)]
        await eventually(lambda: llm.stats().num_running == 3)
        works, executor.sample_tokens = executor.sample_tokens, lambda: 1 / 0
        for task in tasks:
            with pytest.raises(RuntimeError, match="division by zero") as failure:
                await asyncio.wait_for(task, 60)
            assert not isinstance(failure.value, EngineDeadError)
        executor.sample_tokens = works
        assert (await last_output(llm, [1, 2], GREEDY)).outputs == expected
        await llm.check_health()

    with_llm(endless_llama, use, **ENDLESS_OPTIONS)
