"""What `AsyncLLM` promises: the answers of `LLM` as streams, and requests that end when they are left."""

import asyncio
import gc
import itertools
import random
import threading
import time

import pytest
import torch
from async_driver import assert_nothing_held, eventually, footprint, last_output, private_temp_dir
from tiny_models import write_model

from octavo import AsyncLLM, EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from octavo.engine import core_server, tokenizer_thread
from octavo.engine.assemble import make_core
from octavo.errors import InvalidInput

OPTIONS = {"dtype": "float32", "num_kv_blocks": 64, "disable_log_stats": True}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BOTH = pytest.mark.parametrize("core", ["thread", pytest.param("process", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True, scope="module")
def own_temp_dir():
    """What other programs of this machine leave behind is not what is looked for here."""
    with private_temp_dir():
        yield


def long(max_tokens: int = 400, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def with_llm(tiny_llama, use, **options):
    """Run `use(llm)` in an event loop of its own; the engine must be clean after it."""

    async def run():
        async with AsyncLLM(tiny_llama, **{"core": "thread", **OPTIONS, **options}) as llm:
            await use(llm)
            await assert_nothing_held(llm)

    asyncio.run(run())


def assert_close(logprobs: list, expected: list) -> None:
    """Equal up to the arithmetic of another batch."""
    assert len(logprobs) == len(expected)
    for one, other in zip(logprobs, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(one[i].logprob == pytest.approx(other[i].logprob, abs=1e-4) for i in one)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0, 0.7, 1.5]), max_tokens=rng.randint(1, 30), seed=rng.choice([None, 5]),
        stop=rng.choice([None, ["a"], ["xy", "q"]]), logprobs=rng.choice([None, 0, 3]), top_k=rng.choice([0, 20]),
        n=rng.choice([1, 1, 2, 5]), repetition_penalty=rng.choice([1.0, 1.3]),
        output_kind=rng.choice(list(RequestOutputKind)),
    )  # fmt: skip


async def collect(llm: AsyncLLM, prompt: object, params: SamplingParams) -> tuple[RequestOutput, dict]:
    """The last output of a stream, and of each sample its text, token ids and log-probabilities put together."""
    last, samples = None, {}
    async for last in llm.generate(prompt, params):
        for new in last.outputs:
            text, token_ids, logprobs = new.text, new.token_ids, new.logprobs or []
            if params.output_kind is RequestOutputKind.DELTA and new.index in samples:
                earlier = samples[new.index]
                text, token_ids, logprobs = earlier[0] + text, earlier[1] + token_ids, earlier[2] + logprobs
            samples[new.index] = (text, token_ids, logprobs, new.finish_reason, new.stop_reason)
    return last, samples


@BOTH
def test_many_streams_at_once_equal_the_answers_of_llm(tiny_llama, make_llm, core):
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 70))] for _ in range(40)]
    embeds = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    prompts += ["Hello, world", {"prompt": "ďábelské 👋 日本", "cache_salt": "s"}, {"prompt_embeds": embeds}]
    params = [random_params(rng) for _ in prompts]
    expected = make_llm().generate(prompts, params)

    async def use(llm):
        answers = await asyncio.gather(*map(collect, [llm] * len(prompts), prompts, params))
        for (last, samples), wanted in zip(answers, expected, strict=True):
            assert sorted(samples) == [completion.index for completion in wanted.outputs]
            for completion in wanted.outputs:
                text, token_ids, logprobs, finish_reason, stop_reason = samples[completion.index]
                assert (text, token_ids) == (completion.text, completion.token_ids)
                assert (finish_reason, stop_reason) == (completion.finish_reason, completion.stop_reason)
                assert_close(logprobs, completion.logprobs or [])
            assert (last.finished, last.prompt) == (True, wanted.prompt)
            assert last.prompt_token_ids == wanted.prompt_token_ids
            assert last.metrics.clamps == wanted.metrics.clamps

    with_llm(tiny_llama, use, core=core)


def test_a_conversation_is_answered_as_by_llm(tmp_path, make_llm):
    template = "{{ '<s>' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if think %}?{% endif %}"
    (write_model(tmp_path) / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "Hello"}]
    (wanted,) = make_llm(tmp_path).chat(messages, GREEDY, chat_template_kwargs={"think": True})

    async def use(llm):
        stream = llm.chat(messages, GREEDY, "mine", chat_template_kwargs={"think": True}, cache_salt="s")
        *_, last = [out async for out in stream]
        assert last.outputs == wanted.outputs
        assert (last.prompt, last.prompt_token_ids) == ("<s><user>Hello?", wanted.prompt_token_ids)
        assert last.request_id == "mine"
        with pytest.raises(ValueError, match="messages"):
            await anext(llm.chat("Hello"))
        with pytest.raises(TypeError, match="tool_box"):
            await anext(llm.chat(messages, tool_box=[]))

    with_llm(str(tmp_path), use)


def test_outputs_are_cumulative_by_default_and_the_last_is_finished(tiny_llama):
    async def use(llm):
        seen = [out async for out in llm.generate("Hello", GREEDY, "mine")]
        assert [out.request_id for out in seen] == ["mine"] * len(seen)
        for earlier, later in itertools.pairwise(seen):
            assert later.outputs[0].token_ids[: len(earlier.outputs[0].token_ids)] == earlier.outputs[0].token_ids
            assert not earlier.finished
        assert len(seen[-1].outputs[0].token_ids) == 6

    with_llm(tiny_llama, use)


def test_final_only_yields_once(tiny_llama):
    async def use(llm):
        params = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True)
        assert [len(out.outputs[0].token_ids) async for out in llm.generate([1, 2], params)] == [20]

    with_llm(tiny_llama, use)


def test_without_parameters_the_models_own_defaults_are_used(tmp_path, make_llm):
    model = str(write_model(tmp_path, generation_config={"temperature": 0.25, "top_k": 7}))

    async def use(llm):
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=7)
        assert (await last_output(llm, [1, 2])).outputs == make_llm(model).generate([1, 2])[0].outputs
        assert llm.get_tokenizer().encode("ab") == make_llm(model).get_tokenizer().encode("ab")

    with_llm(model, use)


@pytest.mark.parametrize(
    ("prompt", "options", "params"),
    [
        ("", {}, None), ([1, 2, 999], {}, None), (None, {}, None), ("a", {"priority": "high"}, None),
        ("a", {"request_id": ""}, None), ("a", {"request_id": 3}, None), ("a", {"request_id": "\ud800"}, None),
        ([1] * 600, {}, None), ("a", {}, {"temperature": 0}), ("a", {}, SamplingParams(stop_token_ids=[999])),
    ],
)  # fmt: skip
def test_what_is_refused_raises_from_generate_and_nothing_is_queued(tiny_llama, prompt, options, params):
    async def use(llm):
        with pytest.raises(ValueError):
            await last_output(llm, prompt, params, **options)
        assert (await llm.get_metrics())["num_steps"] == 0
        assert llm._hub.streams == {}
        assert len((await last_output(llm, "a", GREEDY)).outputs[0].token_ids) == 6

    with_llm(tiny_llama, use)


def test_a_refused_request_does_not_shift_the_random_streams_of_later_ones(tiny_llama, make_llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = make_llm().generate([[1, 2], [3, 4]], params)

    async def use(llm):
        first = await last_output(llm, [1, 2], params)
        with pytest.raises(ValueError):
            await last_output(llm, [], params)
        second = await last_output(llm, [3, 4], params)
        assert [first.outputs, second.outputs] == [out.outputs for out in expected]

    with_llm(tiny_llama, use)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("core", "fork"), ("heartbeat_timeout", 0), ("heartbeat_timeout", float("nan")), ("step_timeout", "long"),
        ("heartbeat_timeout", True), ("dtype", "int3"), ("block_size", 7),
    ],
)  # fmt: skip
def test_a_bad_option_is_a_value_error_that_names_it_and_leaves_nothing_behind(tiny_llama, option, value):
    before = footprint()
    with pytest.raises(ValueError, match=option):
        AsyncLLM(tiny_llama, **{**OPTIONS, option: value})
    with pytest.raises(TypeError, match="max_num_seq"):
        AsyncLLM(tiny_llama, max_num_seq=3)
    assert footprint() == before


def test_a_process_that_cannot_be_started_is_refused_and_leaves_nothing_behind(tiny_llama, monkeypatch):
    before = footprint()
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(ValueError, match="thread"):
        AsyncLLM(tiny_llama, core="process", **OPTIONS)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        AsyncLLM(tiny_llama, core="process", **OPTIONS)
    assert footprint() == before


def test_requests_wait_for_a_model_that_is_still_loading(tiny_llama, monkeypatch):
    may_load = threading.Event()

    def slow(config, vocab_size):
        may_load.wait(20)
        return make_core(config, vocab_size)

    monkeypatch.setattr(core_server, "make_core", slow)

    async def run():
        llm = AsyncLLM(tiny_llama, core="thread", **OPTIONS)
        waiting = asyncio.create_task(last_output(llm, [1, 2], GREEDY))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.wait_until_ready(), 0.05)  # who gives up must not spoil it for the others
        ready = asyncio.create_task(llm.wait_until_ready())
        await asyncio.sleep(0.2)
        assert llm.is_running
        assert not (waiting.done() or ready.done())
        may_load.set()
        assert len((await waiting).outputs[0].token_ids) == 6
        await ready
        await llm.shutdown()

    asyncio.run(run())


LEAVE = {
    "waiting": (1, [1] * 20, 0),  # behind a request that takes the only seat
    "prefilling": (8, [1] * 500, 0),  # 500 tokens in chunks of 8
    "decoding": (8, [1] * 20, 3),
}


@pytest.mark.parametrize(
    ("phase", "way"),
    # there is nothing to break out of before the first output
    [("decoding", "break"), *itertools.product(LEAVE, ["aclose", "cancel", "abort"])],
)
def test_a_request_that_is_left_frees_its_blocks_by_the_next_step(tiny_llama, phase, way):
    max_num_seqs, prompt, num_outputs = LEAVE[phase]

    async def read(llm, seen):
        async for out in llm.generate(prompt, long(max_tokens=None), "left"):
            seen.append(out)
            if way == "break" and len(out.outputs[0].token_ids) >= num_outputs:
                break

    async def use(llm):
        other = asyncio.create_task(last_output(llm, [7], long(), request_id="other"))
        await eventually(lambda: llm.stats().num_running == 1)
        seen = []
        stream = llm.generate(prompt, long(max_tokens=None), "left")
        if way == "aclose":
            reader = asyncio.create_task(anext(stream))
            if num_outputs:
                await reader
        else:
            reader = asyncio.create_task(read(llm, seen))
        await eventually(lambda: llm.stats().num_running + llm.stats().num_waiting == 2 or len(seen) > num_outputs)
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
            await eventually(
                lambda: len(llm._hub.streams) == 1, 1
            )  # the event loop closes the stream in its next turns
        metrics = await llm.get_metrics()
        assert metrics["num_running"] + metrics["num_waiting"] == 1, "the request that was left is still there"
        await llm.abort("other")
        assert (await other).outputs[0].finish_reason == "abort"

    with_llm(tiny_llama, use, max_num_seqs=max_num_seqs, max_num_batched_tokens=8, enable_prefix_caching=False)


def test_abort_ends_every_request_of_an_id_and_no_other(tiny_llama):
    async def use(llm):
        tasks = [
            asyncio.create_task(last_output(llm, [1, number], long(), request_id=name))
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

    with_llm(tiny_llama, use)


def test_two_live_requests_of_one_id_get_their_own_outputs(tiny_llama, make_llm):
    expected = make_llm().generate([[1, 2], [3, 4]], GREEDY)

    async def use(llm):
        answers = await asyncio.gather(*(last_output(llm, p, GREEDY, request_id="x") for p in ([1, 2], [3, 4])))
        assert [out.outputs for out in answers] == [out.outputs for out in expected]
        assert [out.request_id for out in answers] == ["x", "x"]

    with_llm(tiny_llama, use)


def test_parameters_may_be_changed_once_generate_has_been_called(tiny_llama):
    async def use(llm):
        params = long(4, stop_token_ids=[], logit_bias={5: 1.0})
        stream = llm.generate([1, 2], params)
        params.max_tokens = 9
        params.logit_bias[10**9] = 1.0
        outputs = [output async for output in stream]
        assert len(outputs[-1].outputs[0].token_ids) == 4
        params.n = "many"  # now they are refused: by the stream, as everything is
        with pytest.raises(InvalidInput, match="n="):
            await anext(llm.generate([1, 2], params))

    with_llm(tiny_llama, use)


@BOTH
def test_shutdown_does_not_wait_for_a_preparation_that_hangs(tiny_llama, core, monkeypatch):
    monkeypatch.setattr(tokenizer_thread, "CLOSE_SECONDS", 0.2)
    before, hang = footprint(), threading.Event()

    async def run():
        llm = AsyncLLM(tiny_llama, core=core, **OPTIONS)
        await llm.wait_until_ready()
        monkeypatch.setattr(llm._input_processor, "process", lambda *args: hang.wait(60))
        streams = [asyncio.create_task(last_output(llm, [1, 2])) for _ in range(2)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(llm.shutdown(), 20)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(stream, 5)
        hang.set()
        await eventually(lambda: footprint()["threads"] == before["threads"])

    asyncio.run(run())
    assert footprint() == before


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


def test_a_long_prompt_does_not_hold_up_the_event_loop(tiny_llama):
    async def use(llm):
        text = "word " * 300_000
        started = time.monotonic()
        llm.get_tokenizer().encode(text)
        alone = time.monotonic() - started
        task = asyncio.create_task(last_output(llm, text, GREEDY))
        longest, last = 0.0, time.monotonic()
        while not task.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        with pytest.raises(ValueError, match="max_model_len"):
            await task
        assert longest < max(0.15, alone / 2)

    with_llm(tiny_llama, use)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_a_slow_reader_misses_nothing_and_little_waits_for_it(tiny_llama, make_llm, kind):
    expected = make_llm().generate([5, 6], long())[0].outputs[0]

    async def use(llm):
        num_outputs, token_ids, text = 0, [], ""
        stream = llm.generate([5, 6], long(output_kind=kind))
        async for out in stream:
            num_outputs += 1
            if kind is RequestOutputKind.DELTA:
                token_ids, text = token_ids + out.outputs[0].token_ids, text + out.outputs[0].text
            else:
                token_ids, text = out.outputs[0].token_ids, out.outputs[0].text
            await eventually(lambda: llm.stats().num_running == 0)
        assert (token_ids, text) == (expected.token_ids, expected.text)
        assert num_outputs == 2, "the first, and all that came while it was held"

    with_llm(tiny_llama, use)


def test_one_engine_serves_several_event_loops_after_each_other_and_at_once(tiny_llama, make_llm):
    expected = make_llm().generate([1, 2], GREEDY)[0].outputs
    llm = AsyncLLM(tiny_llama, core="thread", **OPTIONS)
    for _ in range(2):
        assert asyncio.run(last_output(llm, [1, 2], GREEDY)).outputs == expected
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(asyncio.run(last_output(llm, [1, 2], GREEDY)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out.outputs for out in got] == [expected] * 4
    asyncio.run(assert_nothing_held(llm))
    asyncio.run(llm.shutdown())


def test_a_stream_whose_event_loop_was_closed_under_it_is_aborted(tiny_llama):
    llm = AsyncLLM(tiny_llama, core="thread", heartbeat_timeout=2.0, **OPTIONS)
    loop = asyncio.new_event_loop()
    streams = [
        llm.generate([1], SamplingParams(max_tokens=400, ignore_eos=True, output_kind=kind))
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


def test_metrics_show_all_that_was_asked_before_and_stats_do_not_wait(tiny_llama):
    async def use(llm):
        assert llm.stats().kv_blocks_total == 64
        out = await last_output(llm, list(range(40)), GREEDY)
        metrics = await llm.get_metrics()
        assert (metrics["prompt_tokens"], metrics["generation_tokens"]) == (40, 6)
        assert metrics["kv_blocks_cached"] == 2
        assert await llm.reset_prefix_cache() is True
        assert (await llm.get_metrics())["kv_blocks_cached"] == 0
        assert out.metrics.prefill_time > 0
        task = asyncio.create_task(last_output(llm, [1], long(), request_id="a"))
        await eventually(lambda: llm.stats().num_running)
        assert await llm.reset_prefix_cache() is False
        await llm.abort("a")
        await task
        assert set(await llm.kernel_report()) >= {"linear", "attention"}

    with_llm(tiny_llama, use)


def test_a_step_that_fails_ends_its_streams_with_the_cause_and_the_engine_lives_on(tiny_llama, monkeypatch, make_llm):
    cores = []
    monkeypatch.setattr(core_server, "make_core", lambda *args: cores.append(make_core(*args)) or cores[-1])
    expected = make_llm().generate([1, 2], GREEDY)[0].outputs

    async def use(llm):
        executor = cores[0].executor
        tasks = [asyncio.create_task(last_output(llm, [1, number], long())) for number in range(3)]
        await eventually(lambda: llm.stats().num_running == 3)
        works, executor.sample_tokens = executor.sample_tokens, lambda: 1 / 0
        for task in tasks:
            with pytest.raises(RuntimeError, match="division by zero") as failure:
                await asyncio.wait_for(task, 10)
            assert not isinstance(failure.value, EngineDeadError)
        executor.sample_tokens = works
        assert (await last_output(llm, [1, 2], GREEDY)).outputs == expected
        await llm.check_health()

    with_llm(tiny_llama, use)


@BOTH
def test_shutdown_ends_streams_frees_everything_and_may_be_repeated(tiny_llama, core):
    async def run():
        before = footprint()
        llm = AsyncLLM(tiny_llama, core=core, **OPTIONS)
        tasks = [asyncio.create_task(last_output(llm, [1, number], long())) for number in range(5)]
        await eventually(lambda: llm.stats().num_running == 5)
        await asyncio.gather(llm.shutdown(), llm.shutdown())
        for task in tasks:
            with pytest.raises(EngineDeadError, match="closed"):
                await task
        await llm.shutdown()
        llm.close()
        assert (llm.is_running, llm.errored, llm.dead_error) == (False, False, None)
        for call in (
            llm.get_metrics(), llm.abort("a"), llm.reset_prefix_cache(), llm.audit(), llm.check_health(),
            llm.wait_until_ready(), last_output(llm, [1]),
        ):  # fmt: skip
            with pytest.raises(EngineDeadError, match="closed"):
                await call
        with pytest.raises(EngineDeadError, match="closed"):
            llm.stats()
        assert footprint() == before
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@BOTH
def test_shutdown_while_the_model_is_loading_leaves_nothing(tiny_llama, core):
    before = footprint()
    llm = AsyncLLM(tiny_llama, core=core, **OPTIONS)
    asyncio.run(llm.shutdown())
    assert footprint() == before


@BOTH
def test_an_engine_that_is_forgotten_frees_itself(tiny_llama, core):
    before = footprint()

    async def run():
        llm = AsyncLLM(tiny_llama, core=core, **OPTIONS)
        await last_output(llm, [1], GREEDY)

    asyncio.run(run())
    gc.collect()
    deadline = time.monotonic() + 10
    while footprint() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert footprint() == before


def test_a_thread_core_whose_files_do_not_hold_the_model_raises_invalid_input_everywhere(tmp_path):
    model = write_model(tmp_path)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-5000])
    before = footprint()

    async def run():
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            async with AsyncLLM(str(model), core="thread", **OPTIONS):
                pass

    asyncio.run(run())
    assert footprint() == before
