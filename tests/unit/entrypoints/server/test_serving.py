"""What becomes of a request whatever the engine and the client do; the engine is a fake one."""

import asyncio
import json

import pytest
from fake_engine import Client, output

from octavo.errors import EngineDeadError, InvalidInput, Overloaded


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def saying(*items):
    """A script that yields outputs and raises errors."""

    async def script():
        for item in items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield item

    return script


def waiting(*items):
    """A script that yields outputs and then waits for ever."""

    async def script():
        for item in items:
            yield item
        await asyncio.Event().wait()

    return script


def raising_first(error):
    async def script():
        raise error
        yield

    return script


FAILURES = [
    (InvalidInput("top_p=9 must be between 0 and 1"), 400, None, "top_p"),
    (Overloaded("the queue is full", 3.2), 429, "queue_full", None),
    (EngineDeadError("the core was killed"), 503, "engine_dead", None),
    (RuntimeError("the step failed"), 500, "internal_error", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code", "param"), FAILURES)
def test_a_failure_before_the_first_token_is_a_status(error, status, code, param, stream):
    client = Client(raising_first(error))
    response = run(client.complete(stream=stream))
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["code"], body["param"]) == (code, param)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert (client.engine.num_open, client.state.calls) == (0, set())


@pytest.mark.parametrize(("error", "status", "code", "param"), FAILURES)
def test_a_failure_in_mid_stream_is_an_error_event_and_the_end(error, status, code, param):
    client = Client(saying(*(output(char) for char in "abcd"), error))
    response = run(client.complete(stream=True))
    assert response.status_code == 200
    *chunks, last = response.text.removesuffix("\n\n").split("\n\n")
    assert len(chunks) == 4
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.removeprefix("event: error\ndata: "))["error"]["code"] == code
    assert "[DONE]" not in response.text
    assert (client.engine.num_open, client.state.calls) == (0, set())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_one_prompt_ends_the_others(stream):
    scripts = iter([waiting(output("a")), saying(output("b"), RuntimeError("no")), waiting(output("c"))])
    client = Client(lambda: next(scripts)())
    response = run(client.complete(prompt=["x", "y", "z"], stream=stream))
    assert response.status_code == (200 if stream else 500)
    if stream:
        assert "event: error" in response.text
    assert client.engine.num_started == 3
    assert client.engine.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("begun", [(), (output("a"),), (output("a"), output("b"))])
def test_a_client_that_goes_away_ends_its_requests_and_leaves_one_log_line(monkeypatch, stream, prompts, begun):
    async def vanish_soon():
        client, vanish = Client(waiting(*begun)), asyncio.Event()
        task = asyncio.create_task(client.complete_and_vanish(vanish, prompt=["p"] * prompts, stream=stream))
        while client.engine.num_started < prompts:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert client.engine.num_open == prompts
        vanish.set()
        await task
        return client

    records = []
    monkeypatch.setattr("octavo.entrypoints.server.middleware.log_request", records.append)
    client = run(vanish_soon())
    assert (client.engine.num_open, client.state.calls) == (0, set())
    (record,) = records
    assert record.client_aborted
    assert record.finish_reasons == ["abort"]


def test_a_slow_reader_holds_the_stream_back():
    """Nothing is asked of the engine while what came before has not been taken."""
    produced = []

    async def script():
        for number in range(1000):
            produced.append(number)
            yield output("x")

    async def read_slowly():
        client = Client(script)
        may_send = asyncio.Semaphore(3)
        app = client.app

        async def slow_app(scope, receive, send):
            async def slow_send(message):
                await may_send.acquire()
                await send(message)

            await app(scope, receive, slow_send)

        client.app = slow_app
        task = asyncio.create_task(client.complete_and_vanish(vanish := asyncio.Event(), stream=True))
        for _ in range(200):
            await asyncio.sleep(0)
        num_produced = len(produced)
        vanish.set()
        may_send.release()
        await task
        assert client.engine.num_open == 0
        return num_produced

    assert run(read_slowly()) <= 5


def test_prompts_are_asked_for_more_only_when_their_output_was_taken():
    async def count():
        client = Client(saying(*(output("x") for _ in range(50)), output("", "length")))
        response = await client.complete(prompt=["a", "b", "c"], stream=True)
        events = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
        for index in range(3):
            pieces = [choice for event in events for choice in event["choices"] if choice["index"] == index]
            assert "".join(piece["text"] for piece in pieces) == "x" * 50
            assert [piece["finish_reason"] for piece in pieces][-1] == "length"

    run(count())


def test_while_it_loads_or_ends_no_work_is_taken_and_readiness_says_why():
    client = Client(saying(output("a", "stop")))

    async def statuses():
        return [(await client.request("GET", path)).status_code for path in ("/health/ready", "/health/live", "/load")]

    client.state.is_loaded = False
    assert run(statuses()) == [503, 200, 200]
    assert run(client.complete()).json()["error"]["code"] == "loading"
    client.state.is_loaded = True
    assert run(statuses()) == [200, 200, 200]
    assert run(client.complete()).status_code == 200
    client.state.is_draining = True
    assert run(statuses()) == [503, 200, 200]
    refused = run(client.complete())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    client.state.is_draining = False
    client.engine.errored, client.engine.dead_error = True, EngineDeadError("killed")
    assert run(statuses()) == [503, 200, 200]
    assert run(client.complete()).json()["error"]["code"] == "engine_dead"


def test_a_sample_that_cannot_go_on_is_an_error():
    ended = output("ab", "abort")
    ended.outputs[0].stop_reason = "stop_regex takes too long"
    response = run(Client(saying(ended)).complete())
    assert response.status_code == 400
    assert "takes too long" in response.json()["error"]["message"]
    streamed = run(Client(saying(output("a"), ended)).complete(stream=True))
    assert "event: error" in streamed.text
    aborted = run(Client(saying(output("ab", "abort"))).complete())
    assert aborted.json()["choices"][0]["finish_reason"] == "abort"


def test_a_lone_surrogate_in_a_message_is_no_5xx():
    response = run(Client(raising_first(InvalidInput("stop='\ud800' is bad"))).complete())
    assert response.status_code == 400


def test_salts_and_tenants_are_bound_to_the_key():
    client = Client(saying(output("a", "stop")), api_key=("k1", "k2"), cache_isolation="key")

    async def ask(key, **fields):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "p", **fields}
        assert (await client.request("POST", "/v1/completions", json=body, headers=headers)).status_code == 200
        call = client.engine.calls[-1]
        return call["prompt"]["cache_salt"], call["tenant"]

    async def ask_all():
        return [
            await ask("k1"), await ask("k1"), await ask("k2"), await ask("k1", cache_salt="s"),
            await ask("k2", cache_salt="s"), await ask("k1", user="k2"),
        ]  # fmt: skip

    answers = run(ask_all())
    salts = [salt for salt, _ in answers[:5]]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert all("k1" not in salt for salt in salts)
    tenants = [tenant for _, tenant in answers]
    assert tenants == ["k1", "k1", "k2", "k1", "k2", "k1"]


def test_without_keys_a_salt_is_taken_as_it_is():
    client = Client(saying(output("a", "stop")))
    run(client.complete(cache_salt="s"))
    assert client.engine.calls[0]["prompt"]["cache_salt"] == "s"
    assert client.engine.calls[0]["tenant"] is None
    run(client.complete(user="u"))
    assert client.engine.calls[1]["tenant"] == "u"


def test_what_is_wrong_with_the_engine_s_priority_is_said():
    client = Client(saying(output("a", "stop")))
    assert "priority" in run(client.complete(priority=2)).json()["warnings"][0]
    assert client.engine.calls[0]["priority"] == 2
    client.engine.config.scheduler.policy = "priority"
    assert "warnings" not in run(client.complete(priority=2)).json()
