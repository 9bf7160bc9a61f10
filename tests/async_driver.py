"""Helpers for tests of AsyncLLM: whole answers from streams, and what a process has left running."""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo import AsyncLLM, RequestOutput, SamplingParams

OPTIONS = {"dtype": "float32", "num_kv_blocks": 64, "disable_log_stats": True}
ENDLESS_OPTIONS = {**OPTIONS, "num_kv_blocks": 4096}
"""For the endless llama: room for several such requests, so that none is preempted while a test looks."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def long(max_tokens: int | None = 400, **fields) -> SamplingParams:
    """Parameters of a request of many steps, which ends by itself."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def endless(**fields) -> SamplingParams:
    """Parameters of a request that still runs whenever a test looks, if its model is the endless llama."""
    return long(max_tokens=None, **fields)


def with_llm(model: str, use: Callable[[AsyncLLM], Awaitable[None]], **options: object) -> None:
    """Run `use(llm)` in an event loop of its own; the engine must be clean after it."""

    async def run() -> None:
        async with AsyncLLM(model, **{"core": "thread", **OPTIONS, **options}) as llm:
            await use(llm)
            await assert_nothing_held(llm)
            assert llm.load() == (0, 0, 0)

    asyncio.run(run())


async def last_output(llm: AsyncLLM, prompt: object, params: SamplingParams | None = None, **options) -> RequestOutput:
    """Read a stream to its end."""
    last = None
    async for output in llm.generate(prompt, params, **options):
        last = output
    assert last is not None
    return last


async def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition` holds. It is looked at now and then: once true it must stay true, or it may be missed."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.005)


async def assert_nothing_held(llm: AsyncLLM) -> None:
    """No request is left, no block is held, and the accounts are right."""
    metrics = await llm.get_metrics()
    assert (metrics["num_running"], metrics["num_waiting"], metrics["kv_blocks_in_use"]) == (0, 0, 0)
    assert metrics["kv_blocks_free"] + metrics["kv_blocks_cached"] == metrics["kv_blocks_total"]
    await llm.audit()


def _state_and_parent(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; X if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0], int(fields[1])


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return _state_and_parent(pid)[0] not in "ZX"


def _children() -> set[int]:
    """Processes that this one has started, zombies too."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return {pid for pid in pids if _state_and_parent(pid)[1] == os.getpid()}


@contextmanager
def private_temp_dir() -> Iterator[None]:
    """A folder for temporary files of this process and those it starts, under a path that is short enough."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="test-", dir="/tmp") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before[0]
            del os.environ["TMPDIR"]
            if before[1] is not None:
                os.environ["TMPDIR"] = before[1]


def footprint() -> dict[str, set]:
    """What an engine could leave behind: threads, child processes, open files, folders for sockets."""
    links = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.add((fd.name, os.readlink(fd)))
        except FileNotFoundError:
            continue  # the one that lists them
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "processes": _children(),
        "files": {link for link in links if "/proc/" not in link[1]},
        "folders": {path.name for path in Path(tempfile.gettempdir()).glob("octavo-*")},
    }
