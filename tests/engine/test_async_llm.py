"""What `AsyncLLM` promises: the answers of `LLM` as streams."""

import asyncio
import itertools
import random
import threading
import time

import pytest
import torch
from async_driver import (
    ENDLESS_OPTIONS,
    GREEDY,
    OPTIONS,
    assert_nothing_held,
    endless,
    eventually,
    last_output,
    long,
    with_llm,
)
from tiny_models import write_model

from octavo import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from octavo.errors import InvalidInput

BOTH = pytest.mark.parametrize("core", ["thread", pytest.param("process", marks=pytest.mark.slow)])


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


def test_a_long_prompt_does_not_hold_up_the_event_loop(tiny_llama):
    async def use(llm):
        llm._input_processor.min_tokens = lambda prompt: 0  # or it would be refused for its length alone
        text = "word " * 300_000

        async def longest_pause() -> tuple[float, float]:
            """Of the event loop while the prompt is refused, and how long it takes to tokenise it."""
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
            return longest, alone

        # a prompt that holds it up does so every time; other programs of the machine do not
        for _ in range(3):
            longest, alone = await longest_pause()
            if longest < max(0.15, alone / 2):
                return
        pytest.fail(f"it was held up for {longest:.2f} s; to tokenise the prompt takes {alone:.2f} s")

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
            if not out.finished:  # held until the end itself waits in the stream, not only until the core has made it
                (held,) = llm._hub.streams.values()
                await eventually(lambda held=held: held._pending is not None and held._pending.finished)
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


def test_metrics_show_all_that_was_asked_before_and_stats_do_not_wait(endless_llama):
    async def use(llm):
        assert llm.stats().kv_blocks_total == ENDLESS_OPTIONS["num_kv_blocks"]
        out = await last_output(llm, list(range(40)), GREEDY)
        metrics = await llm.get_metrics()
        assert (metrics["prompt_tokens"], metrics["generation_tokens"]) == (40, 6)
        assert metrics["kv_blocks_cached"] == 2
        assert await llm.reset_prefix_cache() is True
        assert (await llm.get_metrics())["kv_blocks_cached"] == 0
        assert out.metrics.prefill_time > 0
        task = asyncio.create_task(last_output(llm, [1], endless(), request_id="a"))
        await eventually(lambda: llm.stats().num_running)
        assert await llm.reset_prefix_cache() is False
        await llm.abort("a")
        await task
        assert set(await llm.kernel_report()) >= {"linear", "attention"}

    with_llm(endless_llama, use, **ENDLESS_OPTIONS)
