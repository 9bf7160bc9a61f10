"""What a body may do before it is whole, at the gate."""

import asyncio

import pytest

from octavo.entrypoints.server.errors import ApiError
from octavo.entrypoints.server.middleware import _limited


def receiving(*messages):
    """A `receive` that hands these out and then waits for ever."""
    left = list(messages)

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(data: bytes, more: bool) -> dict:
    return {"type": "http.request", "body": data, "more_body": more}


def test_a_body_that_stops_coming_is_given_up():
    async def run():
        receive = _limited(receiving(part(b"{", True)), 100, seconds=0.01)
        await receive()
        with pytest.raises(ApiError) as refusal:
            await receive()
        assert refusal.value.status == 408

    asyncio.run(run())


def test_after_a_whole_body_the_client_may_wait_for_its_answer():
    async def run():
        receive = _limited(receiving(part(b"{}", False)), 100, seconds=0.01)
        await receive()
        with pytest.raises(TimeoutError):  # this test's own
            await asyncio.wait_for(receive(), 0.1)

    asyncio.run(run())


def test_a_body_may_not_grow_beyond_the_limit():
    async def run():
        receive = _limited(receiving(part(b"x" * 60, True), part(b"x" * 60, True)), 100)
        await receive()
        with pytest.raises(ApiError) as refusal:
            await receive()
        assert refusal.value.status == 413

    asyncio.run(run())
