"""Helpers for tests of AsyncLLM: whole answers from streams, and what a process has left running."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

from octavo import RequestOutput, SamplingParams
from octavo.engine.async_llm import AsyncLLM


async def last_output(llm: AsyncLLM, prompt: object, params: SamplingParams | None = None, **options) -> RequestOutput:
    """Read a stream to its end."""
    last = None
    async for output in llm.generate(prompt, params, **options):
        last = output
    assert last is not None
    return last


async def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until `condition` holds."""
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


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def children() -> set[int]:
    """Processes that this one has started."""
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
        if is_running(int(pid))
    }


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
        "processes": children(),
        "files": {link for link in links if "/proc/" not in link[1]},
        "folders": {path.name for path in Path(gettempdir()).glob("octavo-*")},
    }
