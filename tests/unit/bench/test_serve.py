"""Requests to a server: against one that answers as each test says, and what counts as an error."""

import asyncio
import contextlib
import json
import threading

import pytest

from octavo.bench.http_client import Answer, make_target
from octavo.bench.serve import results, run
from octavo.entrypoints.cli.main import main
from octavo.errors import InvalidInput

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(content):
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def chunked(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def tokens(count, usage=True):
    pieces = [event({"choices": [{"text": "ab"}]}) for _ in range(count)]
    if usage:
        pieces.append(
            event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count + 1,
                                            "prompt_tokens_details": {"cached_tokens": 2}}})
        )  # fmt: skip
    return pieces


GOOD = OK + chunked(*tokens(3), event(b"[DONE]")) + b"0\r\n\r\n"
SPLIT = OK + chunked(*(bytes([byte]) for byte in b"".join((*tokens(2), event(b"[DONE]"))))) + b"0\r\n\r\n"


class Scripted:
    """A server that gives its answers in turn, and keeps what it was asked and how many were there at once.

    It answers nobody before so many are there at once as `crowd` says, or 10 s have passed.
    """

    def __init__(self, answers, delay=0.0, crowd=0):
        self.answers, self.delay, self.crowd = list(answers), delay, crowd
        self.bodies, self.heads, self.now, self.most = [], [], 0, 0
        self.is_crowded = asyncio.Event()

    async def serve(self, reader, writer):
        self.now += 1
        self.most = max(self.most, self.now)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length")))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        answer = self.answers[(len(self.bodies) - 1) % len(self.answers)]
        self.heads.append(head)
        if self.now >= self.crowd:
            self.is_crowded.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.is_crowded.wait(), 10)
        await asyncio.sleep(self.delay)
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        self.now -= 1
        writer.close()


@pytest.fixture
def serve():
    """Starts a Scripted in a thread: `serve(answers)` gives (it, its URL)."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def start(answers, **options):
        scripted = Scripted(answers, **options)
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(scripted.serve, "127.0.0.1", 0), loop)
        port = listening.result(10).sockets[0].getsockname()[1]
        return scripted, f"http://127.0.0.1:{port}"

    yield start
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def measure(tmp_path, url, *flags, count=4):
    path = tmp_path / "serve.json"
    argv = ["--base-url", url, "--model", "m", "--num-prompts", str(count), "--output-json", str(path), *flags]
    return run(argv), json.loads(path.read_text())


def test_usage_counts_tokens_and_every_piece_has_its_time(serve, tmp_path):
    scripted, url = serve([GOOD, SPLIT])
    status, found = measure(tmp_path, url, "--input-len", "7")
    assert (status, found["completed"], found["failed"]) == (0, 4, 0)
    assert (found["total_input_tokens"], found["total_cached_tokens"], found["total_output_tokens"]) == (20, 8, 14)
    assert len(found["ttfts"]) == 4 and len(found["itls"]) == 2 * (2 + 1)
    assert found["p99_ttft_ms"] >= found["median_ttft_ms"] > 0
    body = scripted.bodies[0]
    assert body["stream"] and body["max_tokens"] == 128 and "ignore_eos" not in body
    assert len(body["prompt"].split()) == 7


def test_a_server_without_usage_is_counted_by_its_pieces(serve, tmp_path):
    _, url = serve([OK + chunked(*tokens(3, usage=False), event(b"[DONE]")) + b"0\r\n\r\n"])
    assert measure(tmp_path, url)[1]["total_output_tokens"] == 12


REFUSAL = b'{"error": {"message": "too many"}}'


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL), "HTTP 429: too many"),
        (OK + chunked(*tokens(1)) + b"0\r\n\r\n", "before its"),
        (OK + chunked(*tokens(1)), "before its"),
        (OK + chunked(event({"error": {"message": "gone"}}), event(b"[DONE]")) + b"0\r\n\r\n", "gone"),
        (OK + chunked(event(b"[DONE]")) + b"0\r\n\r\n", "empty"),
        (OK + chunked(event(b"{nope"), event(b"[DONE]")) + b"0\r\n\r\n", "not JSON"),
        (b"nonsense\r\n\r\n", "Parser"),
        (b"", "before its"),
    ],
)
def test_errors_are_counted_and_the_rest_is_measured(serve, tmp_path, answer, what):
    _, url = serve([answer, GOOD])
    status, found = measure(tmp_path, url)
    assert (status, found["completed"], found["failed"]) == (1, 2, 2)
    ((error, count),) = found["errors"].items()
    assert what in error and count == 2
    assert found["total_output_tokens"] == 8


def test_a_server_that_is_slow_counts_as_failed_after_the_timeout(serve, tmp_path):
    _, url = serve([GOOD], delay=5.0)
    status, found = measure(tmp_path, url, "--timeout", "0.2", count=1)
    assert status == 1 and found["errors"] == {"no end after 0.2 s": 1}


def test_a_closed_loop_has_so_many_requests_at_once_and_no_more(serve, tmp_path):
    scripted, url = serve([GOOD], delay=0.02, crowd=3)
    measure(tmp_path, url, "--max-concurrency", "3", count=12)
    assert scripted.most == 3 and len(scripted.bodies) == 12


def test_an_open_loop_does_not_wait_for_answers(serve, tmp_path):
    scripted, url = serve([GOOD], delay=0.5, crowd=4)
    _, found = measure(tmp_path, url, "--request-rate", "100", count=12)
    assert scripted.most > 3 and found["duration"] < 12 * 0.5


def test_chats_send_messages_and_the_key_is_sent_and_not_written(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    scripted, url = serve([OK + chunked(event({"choices": [{"delta": {"content": "a"}}]}), event(b"[DONE]"))])
    _, found = measure(tmp_path, url, "--endpoint", "/v1/chat/completions", count=1)
    assert scripted.bodies[0]["messages"][0]["role"] == "user"
    assert b"authorization: Bearer sk-hidden" in scripted.heads[0] and "sk-hidden" not in json.dumps(found)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a", "http://", "http://a:99999", "http://u:p@a", "http://a/?x=1", "http://[a"]
)
def test_what_is_no_url_is_refused_and_no_password_shown(url):
    with pytest.raises(InvalidInput, match="base_url") as refusal:
        make_target(url, None, 1.0)
    assert "u:p" not in str(refusal.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--request-rate", "1", "--max-concurrency", "1"],
        ["--request-rate", "0"],
        ["--max-concurrency", "0"],
        ["--recorded-arrivals"],
        ["--timeout", "nan"],
        ["--base-url", "http://127.0.0.1:9"],
    ],
)
def test_what_cannot_be_done_is_one_paragraph_and_status_2(flags, capsys):
    assert main(["bench", "serve", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_that_failed_is_in_the_times():
    found = results([Answer(ttft=0.1, latency=1.0, error="x")], 1.0)
    assert found["p99_ttft_ms"] is None and found["completed"] == 0
