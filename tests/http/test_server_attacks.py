"""Hostile clients and wrong options: bytes raw over a socket, expressions without end, options with no effect."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvicorn
from fault_clients import Answer, address, ask, assert_nothing_is_left
from http_driver import ROOT, held_core

from octavo.entrypoints.server import http_protocol

SECONDS = 30.0
COMPLETION = {"prompt": "hello", "max_tokens": 8, "temperature": 0}


def send_raw(server, data: bytes) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection(address(server), timeout=SECONDS) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(65536):
                answer += piece
        except (BrokenPipeError, ConnectionResetError):
            pass  # it closed while there was more to send
        return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 20_000_000,
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: a\r\n" * 1_000_000,
        b"GET /" + b"a" * 20_000_000,
    ],
    ids=["one long header", "many headers", "long path"],
)
def test_a_head_without_end_is_cut_off_and_holds_up_nobody(server, data):
    sender = threading.Thread(target=send_raw, args=(server, data))
    sender.start()
    slowest = 0.0
    while sender.is_alive():
        started = time.monotonic()
        assert server.client.get("/health/live").status_code == 200
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 5.0


def test_a_long_head_gets_an_answer(server):
    answer = send_raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in answer


def test_trailers_without_end_are_cut_off(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    data = head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: " + b"a" * 20_000_000
    started = time.monotonic()
    send_raw(server, data)
    assert time.monotonic() - started < SECONDS


def test_an_offer_of_another_protocol_is_passed_over(server):
    body = b'{"prompt":"a","max_tokens":1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += (
        b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    )
    answer = send_raw(server, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_more_prompts_than_can_ever_wait_are_not_told_to_try_again(start_server):
    server = start_server("--max-queued-requests", "8")
    response = server.post("/v1/completions", {"prompt": ["a"] * 9, "max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert server.post("/v1/completions", {"prompt": ["a"] * 8, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("prompts", [["a" * 60] * 4, [[65] * 60] * 4], ids=["texts", "ids"])
def test_prompts_longer_together_than_can_ever_wait_are_not_told_to_try_again(start_server, prompts):
    server = start_server("--max-queued-tokens", "200", "--dev-endpoints")
    response = server.post("/v1/completions", {"prompt": prompts, "max_tokens": 1})
    assert response.status_code == 400
    assert "retry-after" not in response.headers
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert "max_queued_tokens=200" in error["message"]
    assert server.post("/v1/completions", {"prompt": prompts[:3], "max_tokens": 1}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "a" * 300, "max_tokens": 1}).status_code == 200
    assert_nothing_is_left(server)


def test_an_answer_of_the_whole_vocabulary_at_every_token_is_bounded(start_server):
    # 259 for each token
    server = start_server("--max-wide-logprobs", "20000", "--dev-endpoints", "--heartbeat-timeout", "600")
    wide = {"prompt": "a", "logprobs": -1, "ignore_eos": True}
    for body, named in (
        ({**wide, "max_tokens": 100}, "25900"),
        ({**wide, "max_tokens": 40, "n": 2}, "20720"),
        ({"prompt": "a" * 90, "prompt_logprobs": -1, "max_tokens": 1}, "23310"),
        ({**wide, "prompt": ["a", "b", "c"], "max_tokens": 30}, "23310"),
    ):
        response = server.post("/v1/completions", body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "logprobs"
        assert named in response.json()["error"]["message"]
        assert "max_wide_logprobs=20000" in response.json()["error"]["message"]
    assert_nothing_is_left(server)
    assert server.post("/v1/completions", {**wide, "max_tokens": 70}).status_code == 200
    narrow = {"prompt": "a", "logprobs": 64, "max_tokens": 400, "ignore_eos": True}
    assert server.post("/v1/completions", narrow).status_code == 200

    async def ask_at_once() -> list[Answer]:
        bodies = [{**wide, "max_tokens": 70, "seed": n} for n in range(6)]
        with held_core(server):  # the first has not been answered when the last one comes
            tasks = [asyncio.create_task(ask(server, body)) for body in bodies]
            async with asyncio.timeout(60):
                while sum(task.done() for task in tasks) < 5:
                    await asyncio.sleep(0.01)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(ask_at_once())
    assert sorted(answer.status for answer in answers) == [200, 429, 429, 429, 429, 429]
    assert all(answer.error["code"] == "queue_full" for answer in answers if answer.status == 429)
    assert_nothing_is_left(server)


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"content-encoding": "gzip"}, "content-encoding gzip is not taken"),
        ({"content-type": "application/json; charset=utf-16"}, "charset utf-16 is not taken"),
        ({"content-type": 'application/json; charset="latin-1"'}, "charset latin-1 is not taken"),
    ],
)
def test_a_body_in_another_form_is_refused_instead_of_misread(server, headers, said):
    headers = {"content-type": "application/json", **headers}
    response = server.client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 415
    assert said in response.json()["error"]["message"]


def test_usual_forms_of_a_body_are_taken(server):
    for headers in (
        {"content-type": "application/json; charset=UTF-8"},
        {"content-type": "application/json", "content-encoding": "identity"},
    ):
        data = b'{"prompt":"a","max_tokens":1}'
        assert server.client.post("/v1/completions", content=data, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"transfer-encoding: chunked\r\n\r\n-1\r\n",
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"transfer-encoding: chunked\r\n\r\n1\r\n{x\r\n",
    ],
)
def test_a_body_that_is_no_http_gets_an_answer(server, rest):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    answer = send_raw(server, head + rest)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"code":"invalid_http"' in answer


@pytest.mark.parametrize(
    "request_id",
    [b"has a space", b"tab\there", b"\xc3\xa9", b"x" * 129, b"", b"esc\x1b[31mred", b"del\x7f"],
)
def test_a_request_id_that_is_no_plain_word_is_replaced_and_never_logged(server, request_id):
    before = len(server.log())
    body = b'{"prompt":"a","max_tokens":1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    head += b"content-length: %d\r\nx-request-id: %s\r\n\r\n" % (len(body), request_id)
    answer = send_raw(server, head + body)
    status, *lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    if b"\x1b" in request_id or b"\x7f" in request_id:  # no header may hold these, and no more is read then
        assert status.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200"))
    else:
        assert status.startswith(b"HTTP/1.1 200")
    if status.startswith(b"HTTP/1.1 200"):
        (echoed,) = [line for line in lines if line.lower().startswith(b"x-request-id: ")]
        assert re.fullmatch(rb"[0-9a-f]{32}", echoed.split(b": ")[1])
    assert "\x1b" not in server.log()
    if request_id:
        assert request_id.decode("latin-1") not in server.log()[before:]


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_connection_without_a_request_does_not_stay_open(begun, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    assert asyncio.run(_answer_to_the_begun(begun)).startswith(b"HTTP/1.1 408 ")


async def _answer_to_the_begun(begun: bytes) -> bytes:
    """What a connection gets that sends no more than this, until it is closed."""
    config = uvicorn.Config(lambda *_: None, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: http_protocol.HttpProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(begun)
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
    return answer


@pytest.mark.parametrize(
    "pattern", ["a" * 10_000, "((a{1000}){1000}){1000}", "(?R)", "b|(?<=[^b])(?R)", "(?P<n>a)(?&n)", "a{100}{100}"]
)
def test_an_expression_without_end_is_refused_at_once(server, pattern):
    started = time.monotonic()
    response = server.post("/v1/completions", {**COMPLETION, "stop_regex": pattern})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop_regex"
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    "pattern", [r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", r"\(?1-800", "a" * 256, r"(?i)\bend\b"]
)
def test_an_honest_expression_is_taken(server, pattern):
    assert server.post("/v1/completions", {**COMPLETION, "stop_regex": pattern}).status_code == 200


def test_names_from_requests_cannot_forge_lines_of_the_log(server):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    server.post("/v1/chat/completions", {**body, "chat_template_kwargs": {"x\nforged line\x1b[31m": 1}})
    assert "\nforged line" not in server.log()
    assert "\x1b" not in server.log()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--root-path", "/é"), "root_path"),
        (("--root-path", "/a b"), "root_path"),
        (("--root-path", "/a%2"), "root_path"),
        (("--chat-template", "/nowhere/x.jinja"), "chat_template='/nowhere/x.jinja'"),
        (("--chat-template", "no-such-name"), "chat_template='no-such-name'"),
        (("--chat-template", "{% if %}"), "the chat template has a syntax error"),
        (("--chat-template", "/dev/null"), "chat_template='/dev/null' is empty"),
        (("--enforce-eager",), "enforce_eager=True is not built yet"),
        (("--port", "x"), "port='x' must be an integer"),
        (("--drain-timeout", "1e300"), "drain_timeout=1e+300"),
        (("--allowed-origins", "[1]"), "allowed_origins"),
        (("--allowed-origins", ""), "allowed_origins"),
        (("--allowed-methods", "GET"), "allowed_origins"),
        (("--allow-credentials",), "allowed_origins"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_model_is_loaded(tiny_chat_model, flags, named):
    command = [sys.executable, "-m", "octavo.entrypoints.server", "--model", tiny_chat_model, "--port", "0", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if "WARNING" not in line]
    assert named in line
    assert "KV cache" not in ended.stderr


def test_sigterm_while_the_model_loads_leaves_nothing_behind(start_server, tmp_path):
    server = start_server(wait=False, env={"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + SECONDS * 4
    while not any(tmp_path.glob("octavo-*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() in (0, 143)
    assert not any(tmp_path.glob("octavo-*"))
