"""From the construction of an AsyncLLM to its shutdown, whatever happens between: nothing is left behind."""

import asyncio
import gc
import threading
import time

import pytest
from async_driver import (
    ENDLESS_OPTIONS,
    GREEDY,
    OPTIONS,
    endless,
    eventually,
    footprint,
    last_output,
    private_temp_dir,
)
from tiny_models import write_model

from octavo import AsyncLLM, EngineDeadError
from octavo.engine import core_server, tokenizer_thread
from octavo.engine.assemble import make_core

BOTH = pytest.mark.parametrize("core", ["thread", pytest.param("process", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True, scope="module")
def own_temp_dir():
    """What other programs of this machine leave behind is not what is looked for here."""
    with private_temp_dir():
        yield


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
        may_load.wait(60)
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


@BOTH
def test_shutdown_does_not_wait_for_a_preparation_that_hangs(tiny_llama, core, monkeypatch):
    monkeypatch.setattr(tokenizer_thread, "CLOSE_SECONDS", 0.2)
    before, hang = footprint(), threading.Event()

    async def run():
        llm = AsyncLLM(tiny_llama, core=core, **OPTIONS)
        await llm.wait_until_ready()
        monkeypatch.setattr(llm._input_processor, "tokenize", lambda *args: hang.wait(60))
        streams = [asyncio.create_task(last_output(llm, [1, 2])) for _ in range(2)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(llm.shutdown(), 40)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(stream, 40)
        hang.set()
        await eventually(lambda: footprint()["threads"] == before["threads"])

    asyncio.run(run())
    assert footprint() == before


@BOTH
def test_shutdown_ends_streams_frees_everything_and_may_be_repeated(endless_llama, core):
    async def run():
        before = footprint()
        llm = AsyncLLM(endless_llama, core=core, **ENDLESS_OPTIONS)
        tasks = [asyncio.create_task(last_output(llm, [1, number], endless())) for number in range(5)]
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
    deadline = time.monotonic() + 60
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
