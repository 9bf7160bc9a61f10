"""Start, the loss of the engine, and the end: what clients see and what the exit status is."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress

import httpx
import pytest
from http_driver import ENDLESS, RunningServer, held_core, read_events

PATIENT = ("--dev-endpoints", "--heartbeat-timeout", "600")


class Stream(threading.Thread):
    """Reads a stream to its end in a thread."""

    def __init__(self, server: RunningServer, body: dict, path: str = "/v1/completions") -> None:
        super().__init__(daemon=True)
        self._request = (f"{server.url}{path}", {**body, "stream": True})
        self.text = ""
        self.status = 0
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(60), server.log()

    def run(self) -> None:
        url, body = self._request
        with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece
                self.begun.set()

    def events(self) -> list[tuple[str, str]]:
        self.join(60)
        assert not self.is_alive(), "the stream has no end"
        return read_events(self.text)


def core_pid(server: RunningServer) -> int:
    return server.client.get("/server_info").json()["core_pid"]


def wait_for(condition, seconds: float, what: str) -> float:
    """Seconds until the condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds, what
        time.sleep(0.02)
    return time.monotonic() - started


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Start


def test_a_taken_port_is_refused_in_one_sentence_before_anything_is_loaded(start_server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start_server("--port", str(taken.getsockname()[1]), wait=False, model="/nowhere/at/all")
        assert server.wait() == 2
    lines = server.log().strip().splitlines()
    assert len(lines) == 1
    assert "cannot listen at 127.0.0.1 port" in lines[0]


def test_a_model_that_cannot_be_had_is_refused(start_server):
    server = start_server(wait=False, model="/nowhere/at/all")
    assert server.wait() == 2
    assert "Traceback" not in server.log()


def test_a_unix_socket_serves_and_is_removed(start_server, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    server = start_server("--uds", str(path))
    assert server.url == str(path)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://octavo") as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    second = start_server("--uds", str(path), wait=False)
    assert second.wait() == 2
    assert server.terminate() == 0
    assert not path.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_https_is_spoken_with_a_certificate(start_server, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    server = start_server("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), wait=False)
    server.wait_until_ready(verify=ssl.create_default_context(cafile=str(certificate)))
    assert server.url.startswith("https://127.0.0.1")
    assert server.client.get("/health").status_code == 200


# The signal to end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_work_the_end_comes_at_once_and_is_one_line(start_server, number):
    server = start_server("--dev-endpoints")
    core, written = core_pid(server), len(server.log())
    started = time.monotonic()
    server.process.send_signal(number)
    assert server.wait() == 0
    assert time.monotonic() - started < 10
    assert not is_running(core)
    (line,) = server.log()[written:].splitlines()
    assert line.endswith(": shutting down")


def test_running_work_drains_and_new_work_is_refused(start_endless_server):
    server = start_endless_server(*PATIENT, "--drain-timeout", "600")
    stream = Stream(server, {**ENDLESS, "max_tokens": 2000})
    fresh = httpx.Client(base_url=server.url, timeout=30)
    with held_core(server):  # the server must not end before it has been asked
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: fresh.get("/health/ready").status_code == 503, 30, "not draining")
        assert fresh.get("/health/live").status_code == 200
        refused = fresh.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
    events = stream.events()
    assert events[-1] == ("", "[DONE]")
    assert json.loads(events[-2][1])["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0


def test_work_that_does_not_end_in_time_gets_an_error_event(start_endless_server):
    server = start_endless_server("--drain-timeout", "0.2")
    stream = Stream(server, {**ENDLESS, "n": 8})
    server.process.send_signal(signal.SIGTERM)
    name, data = stream.events()[-1]
    assert server.wait() == 0
    assert name == "error"
    assert json.loads(data)["error"]["code"] == "shutting_down"


def test_a_second_signal_ends_it_at_once(start_endless_server):
    server = start_endless_server("--dev-endpoints", "--drain-timeout", "600")
    core = core_pid(server)
    streams = [Stream(server, {**ENDLESS, "n": 4}) for _ in range(4)]
    server.process.send_signal(signal.SIGINT)
    wait_for(lambda: "shutting down" in server.log(), 30, "the first signal is not heard")  # two at once would be one
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    status = server.wait()
    assert time.monotonic() - started < 10
    assert status == 130
    wait_for(lambda: not is_running(core), 30, "the core is left behind")
    for stream in streams:
        with suppress(httpx.HTTPError):
            stream.join(20)


# The loss of the engine


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_core_fails_readiness_ends_streams_and_the_server(start_endless_server, number):
    server = start_endless_server("--dev-endpoints")
    core = core_pid(server)
    watcher = httpx.Client(base_url=server.url, timeout=30)
    streams = [Stream(server, {**ENDLESS, "n": 2}) for _ in range(3)]
    lost = time.monotonic()
    os.kill(core, number)
    statuses = []
    while time.monotonic() < lost + 6 and server.process.poll() is None:
        with suppress(httpx.HTTPError):
            statuses.append((time.monotonic() - lost, watcher.get("/health/ready").status_code))
            if statuses[-1][1] == 503:
                assert watcher.get("/health/live").status_code == 200
                break
        time.sleep(0.02)
    for stream in streams:
        name, data = stream.events()[-1]
        assert name == "error", stream.text[-300:]
        assert json.loads(data)["error"]["code"] == "engine_dead"
    assert time.monotonic() - lost < 8
    assert server.wait() == 1
    assert not is_running(core)
    assert all(after < 5.0 or status == 503 for after, status in statuses)


def test_a_lost_core_is_started_anew_once_if_told_to(start_endless_server):
    server = start_endless_server("--dev-endpoints", "--restart-core")
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 5}
    before = server.post("/v1/completions", body).json()["choices"]
    first = core_pid(server)
    stream = Stream(server, {**ENDLESS, "n": 2})
    os.kill(first, signal.SIGKILL)
    assert stream.events()[-1][0] == "error"
    # it is not ready for a while, which may be over between two looks: what tells of the new core is what it says
    wait_for(lambda: server.log().count("ready: ") == 2, 120, "no new core")
    assert server.client.get("/health/ready").status_code == 200
    second = core_pid(server)
    assert second != first
    assert server.post("/v1/completions", body).json()["choices"] == before
    os.kill(second, signal.SIGKILL)
    assert server.wait() == 1


def test_nothing_is_left_behind_of_a_server_that_is_killed(start_server):
    server = start_server("--dev-endpoints")
    core = core_pid(server)
    server.process.kill()
    server.wait()
    wait_for(lambda: not is_running(core), 30, "the core outlives the server")
