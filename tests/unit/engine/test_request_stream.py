"""Streams: what a slow reader finds, and what ends one."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request_stream import RequestStream, merge, wake
from octavo.protocol.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def output(text: str = "a", *, index: int = 0, finish: str | None = None, finished: bool | None = None, **fields):
    token_ids = [ord(char) for char in text]
    completion = CompletionOutput(
        index, text, token_ids, cumulative_logprob=float(len(text)), finish_reason=finish,
        logprobs=[{token_id: Logprob(-1.0)} for token_id in token_ids],
    )  # fmt: skip
    finished = finish is not None if finished is None else finished
    return RequestOutput("0", None, [1], [completion], finished, **fields)


def stream_of(is_delta: bool = False) -> RequestStream:
    stream = RequestStream("0", "user")
    stream.is_delta = is_delta
    return stream


@given(st.lists(st.tuples(st.text("xyz", max_size=3), st.integers(0, 2))), st.lists(st.booleans()))
def test_merged_deltas_add_up_to_the_same_samples_wherever_they_are_merged(pieces, reads):
    expected: dict[int, str] = {}
    got: dict[int, tuple[str, list[int], list]] = {}

    async def run():
        stream = stream_of(is_delta=True)

        async def read():
            for completion in (await stream.next()).outputs:
                text, token_ids, logprobs = got.get(completion.index, ("", [], []))
                got[completion.index] = (
                    text + completion.text, token_ids + completion.token_ids, logprobs + completion.logprobs
                )  # fmt: skip

        for number, (text, index) in enumerate(pieces):
            stream.put(output(text, index=index))
            expected[index] = expected.get(index, "") + text
            if number < len(reads) and reads[number]:
                await read()
        if stream._pending is not None:
            await read()

    asyncio.run(run())
    assert {index: text for index, (text, _, _) in got.items()} == expected
    for text, token_ids, logprobs in got.values():
        assert token_ids == [ord(char) for char in text]
        assert [next(iter(position)) for position in logprobs] == token_ids


def test_of_cumulative_outputs_only_the_newest_waits():
    async def run():
        stream = stream_of()
        for length in range(1, 50):
            stream.put(output("a" * length))
        assert (await stream.next()).outputs[0].text == "a" * 49
        assert stream._pending is None

    asyncio.run(run())


def test_merging_keeps_the_end_of_a_sample_and_the_prompt_logprobs():
    first = output("a", index=1, finish="stop", finished=False, prompt_logprobs=[None])
    merged = merge(first, output("b", index=0, finish="length", finished=True, num_cached_tokens=16), is_delta=True)
    assert [(c.index, c.text, c.finish_reason) for c in merged.outputs] == [(0, "b", "length"), (1, "a", "stop")]
    assert merged.prompt_logprobs == [None]
    assert (merged.finished, merged.num_cached_tokens) == (True, 16)


def test_merging_changes_neither_of_the_two():
    first, second = output("a"), output("b")
    merge(first, second, is_delta=True)
    assert (first.outputs[0].token_ids, second.outputs[0].token_ids) == ([97], [98])


def test_a_failed_stream_raises_at_once_even_if_an_unfinished_output_waits():
    async def run():
        stream = stream_of()
        stream.put(output("a"))
        stream.fail(RuntimeError("first"))
        stream.fail(RuntimeError("second"))
        stream.put(output("b", finish="stop"))
        with pytest.raises(RuntimeError, match="first"):
            await stream.next()

    asyncio.run(run())


def test_a_stream_that_finished_before_the_failure_hands_out_its_end():
    async def run():
        stream = stream_of()
        stream.put(output("a", finish="stop"))
        stream.fail(RuntimeError("too late"))
        assert (await stream.next()).finished

    asyncio.run(run())


def test_a_reader_is_woken_from_another_thread_and_no_output_is_lost():
    async def run():
        stream = stream_of(is_delta=True)

        def write():
            for number in range(300):
                stream.put(output("x", finish="stop" if number == 299 else None))
                assert wake([stream]) == []

        thread = threading.Thread(target=write)
        thread.start()
        text = ""
        while True:
            out = await asyncio.wait_for(stream.next(), 10)
            text += out.outputs[0].text
            if out.finished:
                break
        thread.join()
        assert text == "x" * 300

    asyncio.run(run())


def test_streams_of_a_closed_loop_are_reported_and_the_others_woken():
    async def make():
        return stream_of()

    async def run():
        live = stream_of()
        lost = await asyncio.to_thread(asyncio.run, make())
        waiter = asyncio.ensure_future(live.next())
        await asyncio.sleep(0)
        live.put(output("a"))
        assert wake([lost, live]) == [lost]
        assert (await asyncio.wait_for(waiter, 10)).outputs[0].text == "a"

    asyncio.run(run())


def test_merging_loses_no_time_between_tokens():
    times = [output(metrics=RequestMetrics(between_tokens=[float(number)], prefill_time=number)) for number in range(3)]
    merged = merge(merge(times[0], times[1], is_delta=False), times[2], is_delta=False)
    assert (merged.metrics.between_tokens, merged.metrics.prefill_time) == ([0.0, 1.0, 2.0], 2)
