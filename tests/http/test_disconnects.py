"""Clients that go away or do not read: nothing of theirs stays in the engine, and nobody else notices."""

import json
import socket
import time

import httpx
import pytest
from http_driver import ENDLESS, RunningServer, read_events

LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "temperature": 1.5, "seed": 1}


@pytest.fixture(scope="module")
def small_server(endless_chat_model):
    """Eight samples at a time, prompts in pieces of 16 tokens: so that a request can be met in every state."""
    flags = ("--num-kv-blocks", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "16")
    server = RunningServer(endless_chat_model, *flags, "--no-enable-prefix-caching")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


def metric(server: RunningServer, name: str) -> float:
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith(f"octavo_{name}{{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(name)


def wait_for(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_empty(server: RunningServer) -> bool:
    running, waiting, usage = (
        metric(server, name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )
    load = server.client.get("/load").json()
    return (running, waiting, usage) == (0, 0, 0) and set(load.values()) == {0}


def send(server: RunningServer, body: dict, receive_buffer: int | None = None) -> socket.socket:
    """Send a request over a connection of its own, and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\nconnection: close\r\n\r\n" + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_goes_away_in_decode_frees_its_blocks(small_server, stream, n):
    connection = send(small_server, {**ENDLESS, "stream": stream, "n": n})
    wait_for(lambda: metric(small_server, "num_requests_running") == n, "not begun")
    connection.close()
    wait_for(lambda: is_empty(small_server), "its blocks are not free")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_in_prefill_frees_its_blocks(small_server, stream):
    before = metric(small_server, "generation_tokens_total")
    connection = send(small_server, {**ENDLESS, "prompt": ["x" * 16_000] * 4, "max_tokens": 1, "stream": stream})
    wait_for(lambda: metric(small_server, "kv_cache_usage_perc") > 0, "not begun")
    connection.close()
    wait_for(lambda: is_empty(small_server), "its blocks are not free")
    assert metric(small_server, "generation_tokens_total") - before < 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_queued_leaves_the_queue(small_server, stream):
    first = send(small_server, {**ENDLESS, "n": 8})
    wait_for(lambda: metric(small_server, "num_requests_running") == 8, "not begun")
    queued = send(small_server, {**ENDLESS, "stream": stream})
    wait_for(lambda: small_server.client.get("/load").json()["server_load"] == 2, "not queued")
    queued.close()
    wait_for(lambda: small_server.client.get("/load").json()["server_load"] == 1, "still queued")
    first.close()
    wait_for(lambda: is_empty(small_server), "its blocks are not free")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_gets_its_answer(small_server, stream):
    body = {**LONG, "max_tokens": 100, "stream": stream, "request_id": f"half-closed-{stream}"}
    connection = send(small_server, body)
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(60)
    answer = connection.makefile("rb").read()
    connection.close()
    assert answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b'"finish_reason":"length"' in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    wait_for(lambda: is_empty(small_server), "its blocks are not free")
    wait_for(lambda: f'"cmpl-half-closed-{stream}"' in small_server.log(), "no line")  # it comes after the answer
    (line,) = [line for line in small_server.log().splitlines() if f'"cmpl-half-closed-{stream}"' in line]
    assert "client_aborted" not in line


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_and_then_goes_away_frees_its_blocks(small_server, stream):
    connection = send(small_server, {**ENDLESS, "stream": stream, "n": 4})
    wait_for(lambda: metric(small_server, "num_requests_running") == 4, "not begun")
    connection.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    assert metric(small_server, "num_requests_running") == 4
    connection.close()
    wait_for(lambda: is_empty(small_server), "its blocks are not free")


def test_a_half_closed_connection_between_requests_is_closed(small_server):
    host, port = small_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'"ready"}'):  # head and body may come apart
            answer += connection.recv(65536)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65536) == b""


def test_each_of_them_leaves_one_line_in_the_log(small_server):
    send(small_server, {**ENDLESS, "request_id": "vanishing", "stream": True}).close()
    wait_for(lambda: '"cmpl-vanishing"' in small_server.log(), "no line")
    wait_for(lambda: is_empty(small_server), "its blocks are not free")
    (line,) = [line for line in small_server.log().splitlines() if '"cmpl-vanishing"' in line]
    assert json.loads(line.split("request ", 1)[1])["client_aborted"] is True


def test_half_a_request_is_no_request(small_server):
    host, port = small_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b'content-length: 100\r\n\r\n{"prompt": ')
    assert small_server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_slow_reader_gets_merged_deltas_and_misses_nothing(server):
    body = {**LONG, "n": 4, "logprobs": -1, "return_token_ids": True}  # more than the sockets can hold
    whole = server.client.post("/v1/completions", json=body, timeout=120).json()
    before = metric(server, "generation_tokens_total")
    with send(server, {**body, "stream": True}, receive_buffer=4096) as connection:
        wait_for(
            lambda: metric(server, "generation_tokens_total") == before + 4 * LONG["max_tokens"],
            "held back by the reader",
            120,
        )
        assert metric(server, "num_requests_running") == 0
        assert server.client.get("/load").json()["server_load"] == 1
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        answer = connection.makefile("rb").read()
    chunks = _dechunk(answer.split(b"\r\n\r\n", 1)[1]).decode()
    events = read_events(chunks)
    assert events[-1] == ("", "[DONE]")
    choices = [json.loads(data)["choices"][0] for _, data in events[:-1]]
    for entry in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == entry["index"]]
        assert [token for choice in mine for token in choice["token_ids"]] == entry["token_ids"]
        assert "".join(choice["text"] for choice in mine) == entry["text"]
    assert max(len(choice["token_ids"]) for choice in choices) > 50


def _dechunk(data: bytes) -> bytes:
    pieces = []
    while True:
        size, _, data = data.partition(b"\r\n")
        if not (length := int(size, 16)):
            return b"".join(pieces)
        pieces.append(data[:length])
        data = data[length + 2 :]


@pytest.mark.slow
def test_two_hundred_clients_that_vanish_leave_nothing(server):
    connections = [send(server, {**LONG, "stream": bool(number % 2), "n": 1 + number % 2}) for number in range(200)]
    time.sleep(0.5)
    for connection in connections:
        connection.close()
    wait_for(lambda: is_empty(server), "blocks are lost", 120)
    assert httpx.get(f"{server.url}/health").status_code == 200
