"""Everything that goes wrong around a live server: lost and frozen cores, failing steps, floods, clients that vanish or
do not read, the signal to end. What must hold after each: no request is without an answer, and every block of the KV
cache is free or evictable.
"""

import asyncio
import json
import os
import random
import signal
import socket
import time

import pytest
from fault_clients import Answer, address, ask, ask_all, assert_nothing_is_left, request_bytes, vanish, wait_for
from http_driver import ENDLESS, held_core, stream_chunks

LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "temperature": 1.5, "seed": 1}
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

BREAK_A_STEP = """
import os, sys

if "octavo.engine.core_process" in sys.orig_argv:
    from octavo.executor.uniproc import UniProcExecutor

    execute_model = UniProcExecutor.execute_model

    def break_once(self, step):
        try:
            os.unlink(os.environ["BREAK_A_STEP"])
        except FileNotFoundError:
            return execute_model(self, step)
        raise RuntimeError("broken on purpose")

    UniProcExecutor.execute_model = break_once
"""
"""A sitecustomize module: the step after a file has appeared fails."""


def mixed_requests(count: int) -> list[dict]:
    """Streamed and whole ones, of one sample and of several, with prompts of many lengths."""
    return [
        {**LONG, "prompt": "x" * (1 + 13 * number % 90), "seed": number, "stream": bool(number % 2),
         "n": 1 + number % 3, "max_tokens": 40 + 7 * number % 60}
        for number in range(count)
    ]  # fmt: skip


# Clients


@pytest.mark.slow
def test_200_clients_that_vanish_at_random_moments_leave_nothing(server):
    rng = random.Random(0)
    bodies = [{**body, "max_tokens": 300} for body in mixed_requests(200)]

    async def run() -> None:
        await asyncio.gather(*(vanish(server, body, rng, longest=3.0) for body in bodies))

    asyncio.run(run())
    assert_nothing_is_left(server)
    assert ask_all(server, [{**GREEDY, "prompt": "abc"}])[0].is_complete


def test_readers_that_do_not_read_hold_up_nobody_and_leave_nothing(server):
    body = {**LONG, "stream": True, "n": 4, "logprobs": -1}  # more than the sockets can hold
    connections = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(server))
        connection.sendall(request_bytes(body))
        connections.append(connection)
    assert all(answer.is_complete for answer in ask_all(server, mixed_requests(8)))
    wait_for(lambda: server.client.get("/load").json()["num_running"] == 0, 120, "the engine waits for a reader")
    assert server.client.get("/load").json()["server_load"] > 0
    for connection in connections:
        connection.close()
    assert_nothing_is_left(server)


@pytest.mark.slow
def test_1000_requests_at_once_are_served_or_refused_at_once(start_server):
    server = start_server("--dev-endpoints", "--max-num-seqs", "8", "--max-queued-requests", "64")
    # so long that the queue is still full when the last one comes, however fast the engine
    bodies = [{**LONG, "seed": n, "stream": bool(n % 2)} for n in range(1000)]
    answers = ask_all(server, bodies)
    served = [answer for answer in answers if answer.is_complete]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(served) + len(refused) == 1000
    assert len(served) >= 64
    assert len(refused) >= 100
    for answer in refused:
        assert answer.error["code"] == "queue_full"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert max(answer.seconds for answer in refused) < max(answer.seconds for answer in served)
    assert_nothing_is_left(server)


# The engine


def test_a_step_that_fails_ends_its_streams_with_an_error_event_and_no_others(start_endless_server, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BREAK_A_STEP)
    trigger = tmp_path / "now"
    env = {"PYTHONPATH": str(tmp_path), "BREAK_A_STEP": str(trigger)}
    server = start_endless_server("--dev-endpoints", "--max-num-seqs", "2", env=env)

    async def run() -> list[Answer]:
        begun = [asyncio.Event() for _ in range(2)]
        computed = [asyncio.create_task(ask(server, {**ENDLESS, "stream": True}, event)) for event in begun]
        for event in begun:
            await event.wait()
        queued = [asyncio.create_task(ask(server, {**LONG, "max_tokens": 5, "stream": n == 1})) for n in range(2)]
        while (await asyncio.to_thread(server.client.get, "/load")).json()["num_queued"] < 2:
            await asyncio.sleep(0.01)
        trigger.touch()
        return await asyncio.gather(*computed, *queued)

    *computed, whole, streamed = asyncio.run(run())
    for answer in computed:
        assert answer.status == 200
        assert len(answer.events) > 1
        assert answer.error["message"] == "the request failed inside the server, whose log says why"
        assert set(answer.error) == {"message", "type", "param", "code"}
    assert "broken on purpose" in server.log()
    assert whole.is_complete
    assert streamed.is_complete
    assert_nothing_is_left(server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_core_leaves_nobody_without_an_answer_and_the_new_one_is_empty(start_endless_server, number):
    server = start_endless_server(
        "--dev-endpoints", "--restart-core", "--max-num-seqs", "4", "--heartbeat-timeout", "3"
    )  # fmt: skip
    body = {**GREEDY, "prompt": "abc"}
    before = json.loads(ask_all(server, [body])[0].text)["choices"]
    core = server.client.get("/server_info").json()["core_pid"]

    async def run() -> list[Answer]:
        begun = asyncio.Event()
        tasks = [asyncio.create_task(ask(server, {**ENDLESS, "stream": True}, begun))]
        await begun.wait()
        tasks += [asyncio.create_task(ask(server, body)) for body in mixed_requests(30)]
        await asyncio.sleep(0.2)
        os.kill(core, number)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    failed = [answer for answer in answers if not answer.is_complete]
    assert answers[0] in failed
    assert {answer.error["code"] for answer in failed} <= {"engine_dead", "loading"}
    assert all(answer.status in (200, 500, 503) for answer in failed)
    wait_for(lambda: server.log().count("ready: ") == 2, 120, "no new core")
    assert server.client.get("/health/ready").status_code == 200
    assert server.client.get("/server_info").json()["core_pid"] != core
    assert_nothing_is_left(server)
    assert json.loads(ask_all(server, [body])[0].text)["choices"] == before


# The signal to end


def test_at_the_signal_to_end_whatever_was_admitted_is_answered_in_full(start_endless_server):
    flags = ("--dev-endpoints", "--heartbeat-timeout", "600", "--drain-timeout", "600", "--max-num-seqs", "4")
    server = start_endless_server(*flags)

    async def run() -> list[Answer]:
        begun = asyncio.Event()
        tasks = [asyncio.create_task(ask(server, {**LONG, "max_tokens": 2000, "stream": True}, begun))]
        await begun.wait()
        with held_core(server):  # nobody has left when the last one is in
            tasks += [asyncio.create_task(ask(server, body)) for body in mixed_requests(16)]
            while (await asyncio.to_thread(server.client.get, "/load")).json()["server_load"] < 17:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert all(answer.is_complete for answer in answers)
    assert server.wait() == 0
    assert "Traceback" not in server.log()


def test_a_reader_that_does_not_read_cannot_hold_up_the_end(start_server):
    server = start_server("--dev-endpoints", "--drain-timeout", "1")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(server))
        connection.sendall(request_bytes({**LONG, "stream": True, "n": 4, "logprobs": -1}))
        wait_for(lambda: server.client.get("/load").json()["server_load"] == 1, 60, "not begun")
        started = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started < 40


# Exactness


@pytest.mark.parametrize("kind", PATHS)
def test_greedy_logprobs_are_the_same_bits_cold_and_warm_alone_and_among_samples_whole_and_streamed(server, kind):
    if not server.is_exact:
        pytest.skip("the platform of this machine does not promise equal bits")
    text = f"{kind}: a prompt that is longer than two blocks of the cache"
    body = {**GREEDY, "prompt": text, "logprobs": 3}
    if kind == "chat":
        body = {**GREEDY, "messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 3}
    assert server.client.post("/reset_prefix_cache").json()["reset"]
    cold = server.post(PATHS[kind], body).json()
    warm = server.post(PATHS[kind], body).json()
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    expected = cold["choices"][0]
    assert len(expected["token_ids"]) == GREEDY["max_tokens"]
    whole = [warm["choices"][0], *server.post(PATHS[kind], {**body, "n": 2}).json()["choices"]]
    assert [choice["token_ids"] for choice in whole] == [expected["token_ids"]] * 3
    assert [choice["logprobs"] for choice in whole] == [expected["logprobs"]] * 3
    for n in (1, 2):
        chunks = stream_chunks(server.client, PATHS[kind], {**body, "n": n})
        for index in range(n):
            assert joined_logprobs(chunks, index) == expected["logprobs"]


def joined_logprobs(chunks: list[dict], index: int) -> dict:
    """The log-probabilities of one choice, out of the pieces of a stream."""
    joined: dict = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index and choice["logprobs"] is not None:
                for name, values in choice["logprobs"].items():
                    joined[name] = values if values is None else [*joined.get(name, []), *values]
    return joined


# The start


def test_the_start_says_the_sum_of_the_memory(server):
    (line,) = [line for line in server.log().splitlines() if "memory: weights" in line]
    assert all(part in line for part in ("KV cache", "workspace", " = "))
