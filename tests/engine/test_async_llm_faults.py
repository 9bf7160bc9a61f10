"""The engine core dies, freezes or cannot start; its parent dies. Nobody waits for it, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from async_driver import (
    ENDLESS_OPTIONS,
    OPTIONS,
    endless,
    eventually,
    footprint,
    is_running,
    last_output,
    private_temp_dir,
)
from tiny_models import LLAMA, random_weights, write_model

import octavo
from octavo import LLM, AsyncLLM, EngineDeadError, SamplingParams
from octavo.engine import core_server
from octavo.engine.assemble import make_core
from octavo.engine.core_launcher import CoreProcess
from octavo.errors import InvalidInput

pytestmark = pytest.mark.slow
LONG = endless()


@pytest.fixture(autouse=True, scope="module")
def own_temp_dir():
    """What other programs of this machine leave behind is not what is looked for here."""
    with private_temp_dir():
        yield


def pid_of(llm: AsyncLLM) -> int:
    return llm._client.launcher.pid


async def open_streams(llm: AsyncLLM, count: int) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(last_output(llm, [1, number], LONG)) for number in range(count)]
    await eventually(lambda: llm.stats().num_running == count)
    return tasks


async def seconds_until_dead(llm: AsyncLLM, tasks: list[asyncio.Task], limit: float) -> float:
    """Until every stream has raised EngineDeadError."""
    started = time.monotonic()
    for task in tasks:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, limit)
    seconds = time.monotonic() - started
    with pytest.raises(EngineDeadError):
        await llm.get_metrics()
    with pytest.raises(EngineDeadError):
        await last_output(llm, [1])
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    assert (llm.is_running, llm.errored) == (False, True)
    return seconds


async def seconds_this_process_stood_still() -> float:
    """Until it is cancelled: the time in which this process did not get its turn, which is not the core's silence."""
    lost, pause = 0.0, 0.01
    last = time.monotonic()
    try:
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            lost, last = lost + max(0.0, now - last - 2 * pause), now
    except asyncio.CancelledError:
        return lost


def test_a_killed_core_ends_every_stream_at_once(endless_llama):
    before = footprint()

    async def run():
        # a limit so long that only the death itself can have been noticed
        llm = AsyncLLM(endless_llama, heartbeat_timeout=600, max_num_batched_tokens=8, **ENDLESS_OPTIONS)
        tasks = await open_streams(llm, 6)
        os.kill(pid_of(llm), signal.SIGKILL)
        assert await seconds_until_dead(llm, tasks, 20) < 5.0
        assert "SIGKILL" in str(llm.dead_error)
        await llm.shutdown()

    asyncio.run(run())
    assert footprint() == before


def test_a_core_killed_while_idle_is_noticed_too(tiny_llama):
    async def run():
        async with AsyncLLM(tiny_llama, heartbeat_timeout=600, **OPTIONS) as llm:
            os.kill(pid_of(llm), signal.SIGKILL)
            await eventually(lambda: llm.errored, 20)
            await seconds_until_dead(llm, [], 20)

    asyncio.run(run())


def test_a_core_killed_while_loading_fails_the_requests_that_wait_for_it(endless_llama):
    async def run():
        llm = AsyncLLM(endless_llama, **ENDLESS_OPTIONS)
        task = asyncio.create_task(last_output(llm, [1], LONG))
        await asyncio.sleep(0.2)
        os.kill(pid_of(llm), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 20)
        with pytest.raises(EngineDeadError):
            await llm.wait_until_ready()
        await llm.shutdown()

    asyncio.run(run())


def test_a_frozen_core_is_taken_for_dead_within_the_limit_and_killed(endless_llama):
    before = footprint()

    async def run():
        llm = AsyncLLM(endless_llama, heartbeat_timeout=3.0, **ENDLESS_OPTIONS)
        tasks = await open_streams(llm, 3)
        pid = pid_of(llm)
        os.kill(pid, signal.SIGSTOP)
        stood_still = asyncio.create_task(seconds_this_process_stood_still())
        seconds = await seconds_until_dead(llm, tasks, 30)
        stood_still.cancel()
        assert 1.0 < seconds < 3.5 + await stood_still
        await eventually(lambda: not is_running(pid))
        await llm.shutdown()

    asyncio.run(run())
    assert footprint() == before


def test_a_busy_core_is_not_taken_for_dead(tiny_llama):
    """Many steps, none of them long, with a heartbeat limit shorter than the whole."""

    async def run():
        async with AsyncLLM(tiny_llama, heartbeat_timeout=3.0, **OPTIONS) as llm:
            started = time.monotonic()
            while time.monotonic() - started < 5:
                await last_output(llm, [1, 2], LONG)

    asyncio.run(run())


@pytest.mark.parametrize("core", ["thread"])
def test_a_step_longer_than_its_limit_ends_the_engine(tiny_llama, monkeypatch, core):
    cores, holds = [], threading.Event()
    monkeypatch.setattr(core_server, "make_core", lambda *args: cores.append(make_core(*args)) or cores[-1])

    async def run():
        llm = AsyncLLM(tiny_llama, core=core, heartbeat_timeout=5.0, step_timeout=0.5, **OPTIONS)
        await llm.wait_until_ready()
        original = cores[0].executor.execute_model

        def slow(step):
            holds.wait(60)  # the step goes on until the streams have ended
            return original(step)

        cores[0].executor.execute_model = slow
        task = asyncio.create_task(last_output(llm, [1], LONG))
        with pytest.raises(EngineDeadError, match="step_timeout"):
            await asyncio.wait_for(task, 30)
        holds.set()
        await llm.shutdown()

    asyncio.run(run())


def test_files_that_do_not_hold_the_model_are_refused_with_the_text_that_llm_gives(tmp_path):
    weights = random_weights(LLAMA)
    del weights["model.layers.1.mlp.up_proj.weight"]
    model = str(write_model(tmp_path / "model", weights=weights))
    before = footprint()
    with pytest.raises(InvalidInput) as refusal:
        LLM(model, **OPTIONS)
    with pytest.raises(InvalidInput) as failure:
        AsyncLLM(model, **OPTIONS)
    assert str(failure.value) == str(refusal.value)
    assert footprint() == before


def test_what_only_shows_while_loading_is_raised_by_every_call(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model")
    weights = model / "model.safetensors"
    start, before = CoreProcess.start, footprint()

    def spoil_and_start(*args):
        os.truncate(weights, weights.stat().st_size - 5000)  # checked already, and read by a process yet to start
        start(*args)

    monkeypatch.setattr(CoreProcess, "start", spoil_and_start)

    async def run():
        llm = AsyncLLM(str(model), **OPTIONS)
        for call in (llm.wait_until_ready(), last_output(llm, [1]), llm.get_metrics()):
            with pytest.raises(InvalidInput, match=r"model\.safetensors"):
                await asyncio.wait_for(call, 120)
        assert llm.errored
        await llm.shutdown()

    asyncio.run(run())
    assert footprint() == before


SCRIPT = """
import asyncio, os, sys
from octavo import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(sys.argv[1], dtype="float32", num_kv_blocks=64, disable_log_stats=True, heartbeat_timeout=2.0)
    stream = llm.generate([1, 2], SamplingParams(max_tokens=None, ignore_eos=True))
    async for output in stream:
        print(llm._client.launcher.pid, llm._client.launcher._socket_dir, flush=True)
        {then}

asyncio.run(main())
"""


def start_script(model: str, then: str, tmp_path: Path, **options: object) -> subprocess.Popen:
    """A program without a __main__ guard that prints its core's process id and socket folder, then does `then`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(then=then))
    env = {**os.environ, "PYTHONPATH": str(Path(octavo.__file__).parents[1])}
    command = [sys.executable, str(script), model]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, **options)


def read_core(script: subprocess.Popen) -> tuple[int, Path]:
    pid, folder = script.stdout.readline().split()
    return int(pid), Path(folder)


def wait_until_gone(pid: int, folder: Path) -> None:
    deadline = time.monotonic() + 30
    while is_running(pid) or folder.exists():
        assert time.monotonic() < deadline, f"process {pid} or {folder} outlived its parent"
        time.sleep(0.02)


def test_the_core_ends_when_its_parent_is_killed(tiny_llama, tmp_path):
    script = start_script(tiny_llama, "await asyncio.sleep(60)", tmp_path)
    pid, folder = read_core(script)
    assert is_running(pid)
    script.kill()
    script.wait(60)
    wait_until_gone(pid, folder)


def test_a_program_that_was_itself_frozen_does_not_take_its_core_for_dead(tiny_llama, tmp_path):
    then = """
        await asyncio.sleep(1)
        for _ in range(10):
            await asyncio.sleep(0.1)
            await llm.check_health()
        print("healthy", (await llm.get_metrics())["num_steps"] > 1, flush=True)
        await llm.shutdown()
        break"""
    script = start_script(tiny_llama, then, tmp_path)
    core = read_core(script)
    script.send_signal(signal.SIGSTOP)
    time.sleep(4)  # its heartbeat_timeout is 2
    script.send_signal(signal.SIGCONT)
    assert script.stdout.readline() == "healthy True\n"
    assert script.wait(60) == 0
    wait_until_gone(*core)


def test_a_class_of_the_main_program_is_refused_with_the_way_out(tiny_llama):
    async def run():
        async with AsyncLLM(tiny_llama, **OPTIONS) as llm:
            with pytest.raises(ValueError, match=r"main program.*thread"):
                await last_output(llm, [1], SamplingParams(logits_processors=["__main__:Mine"]))

    asyncio.run(run())


def test_a_program_that_never_shuts_down_ends_and_takes_the_core_along(tiny_llama, tmp_path):
    script = start_script(tiny_llama, "break", tmp_path)
    core = read_core(script)
    assert script.wait(60) == 0
    wait_until_gone(*core)


def test_ctrl_c_reaches_the_program_and_not_its_core(tiny_llama, tmp_path):
    then = """
        try:
            await asyncio.sleep(60)
        finally:
            print("core lives", (await llm.get_metrics())["num_running"], flush=True)
            os._exit(3)"""
    script = start_script(tiny_llama, then, tmp_path, start_new_session=True)
    pid, folder = read_core(script)
    os.killpg(script.pid, signal.SIGINT)  # what a terminal does
    assert script.stdout.readline().startswith("core lives")
    assert script.wait(60) == 3
    wait_until_gone(pid, folder)


def test_a_fork_of_the_program_cannot_use_or_end_the_engine(tiny_llama):
    async def run():
        async with AsyncLLM(tiny_llama, **OPTIONS) as llm:
            child = os.fork()
            if child == 0:
                try:
                    llm.stats()
                except EngineDeadError:
                    llm.close()
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert (await last_output(llm, [1], SamplingParams(max_tokens=2, ignore_eos=True))).finished

    asyncio.run(run())
