"""What watches the server: health, load, version, models, metrics, and the endpoints of developers."""

import socket
import time

import pytest
from http_driver import ENDLESS, stream_chunks


def test_health_is_answered_in_three_forms(server):
    assert server.client.get("/health/live").json() == {"status": "live"}
    assert server.client.get("/health/ready").json() == {"status": "ready"}
    assert server.client.get("/health").status_code == 200


def test_models_lists_every_served_name(server):
    answer = server.client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["tiny", "tiny-too"]
    assert all(card["max_model_len"] == 512 for card in answer["data"])
    assert server.client.get("/v1/models/tiny-too").json()["id"] == "tiny-too"
    missing = server.client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_version_and_load_are_plain_numbers(server):
    import octavo

    assert server.client.get("/version").json() == {"version": octavo.__version__}
    assert server.client.get("/load").json() == {
        "server_load": 0, "num_running": 0, "num_queued": 0, "queued_tokens": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("PUT", "/v1/models", 405),
     ("GET", "/v1/models/", 404), ("GET", "//", 404), ("GET", "/%ff", 404)],
)  # fmt: skip
def test_what_is_not_there_has_the_body_of_all_errors(server, method, path, status):
    response = server.client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"])
def test_what_is_no_http_has_the_body_of_all_errors_too(server, data):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'{"error":{"message":' in answer


def test_a_body_that_is_too_long_is_refused_before_it_is_parsed(start_server):
    server = start_server("--max-request-bytes", "1000")
    fits = server.post("/v1/completions", {"prompt": "a" * 100, "max_tokens": 1})
    assert fits.status_code == 200
    announced = server.client.post("/v1/completions", content=b"{" * 1001, headers={"content-type": "application/json"})
    pieces = server.client.post(
        "/v1/completions", content=(b"{" * 100 for _ in range(20)), headers={"content-type": "application/json"}
    )
    for response in (announced, pieces):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert "1000" in response.json()["error"]["message"]


def test_metrics_count_what_was_done(server):
    def value(name: str) -> float:
        for line in server.client.get("/metrics").text.splitlines():
            if line.startswith(name):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    before = {
        name: value(name) for name in ("octavo_generation_tokens_total", "octavo_e2e_request_latency_seconds_count")
    }
    server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    stream_chunks(server.client, "/v1/completions", {"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    assert value("octavo_generation_tokens_total") == before["octavo_generation_tokens_total"] + 10
    answered = before["octavo_e2e_request_latency_seconds_count"] + 2
    end = time.monotonic() + 30
    while value("octavo_e2e_request_latency_seconds_count") < answered and time.monotonic() < end:
        time.sleep(0.02)  # a request is put on record after its answer has gone out
    assert value("octavo_e2e_request_latency_seconds_count") == answered
    assert value("octavo_num_requests_running") == 0


def test_server_info_says_how_it_runs_and_no_secrets(server):
    info = server.client.get("/server_info").json()
    assert info["engine"]["scheduler"]["max_model_len"] == 512
    assert info["core_pid"] > 1
    assert "api_key" not in info["server"]
    assert info["kernels"]


def test_the_prefix_cache_can_be_forgotten(server):
    body = {"prompt": "q" * 64, "max_tokens": 1}
    server.post("/v1/completions", body)
    assert server.client.post("/reset_prefix_cache").json() == {"reset": True}
    usage = server.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_requests_can_be_aborted_by_their_ids(start_endless_server):
    server = start_endless_server("--dev-endpoints")
    body = {**ENDLESS, "stream": True, "request_id": "to-abort"}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.client.post("/abort_requests", json={"request_ids": ["cmpl-to-abort", "x"]}).status_code == 200
        rest = "\n".join(lines)
    assert '"finish_reason":"abort"' in rest
    assert rest.rstrip().endswith("data: [DONE]")
    assert server.client.post("/abort_requests", json={"request_ids": []}).status_code == 400


def test_the_endpoints_of_developers_are_closed_unless_asked_for(start_server):
    server = start_server()
    assert server.client.get("/server_info").status_code == 404
    assert server.client.post("/reset_prefix_cache").status_code == 404
    assert server.client.post("/abort_requests", json={"request_ids": ["a"]}).status_code == 404


def test_other_origins_are_answered_only_where_allowed(server, start_server):
    origin = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.client.get("/health", headers=origin).headers
    assert server.client.options("/v1/completions", headers=origin).status_code == 405
    open_one = start_server("--allowed-origins", '["https://example.org"]', "--api-key", "k")
    preflight = open_one.client.options("/v1/completions", headers=origin)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://example.org"
    refused = open_one.client.get("/v1/models", headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://example.org")


@pytest.mark.parametrize("root", ["/llm", "/v1/", "/my%20app/%C3%A9"])
def test_a_root_path_may_be_there_or_not_and_the_same_doors_are_closed(start_server, root):
    server = start_server("--root-path", root, "--api-key", "k")
    key = {"Authorization": "Bearer k"}
    body = {"prompt": "a", "max_tokens": 1}
    for prefix in ("", root.rstrip("/")):
        for path in ("/health", "/health/live", "/health/ready"):
            assert server.client.get(prefix + path).status_code == 200
        for path in ("/v1/models", "/openapi.json", "/docs", "/metrics", "/nowhere", "/health/nowhere"):
            assert server.client.get(prefix + path).status_code == 401, prefix + path
        assert server.client.get(f"{prefix}/v1/models", headers=key).json()["object"] == "list"
        assert server.post(f"{prefix}/v1/completions", body).status_code == 401
        assert server.post(f"{prefix}/v1/completions", body, headers=key).status_code == 200
        assert server.client.get(f"{prefix}/nowhere", headers=key).status_code == 404
        document = server.client.get(f"{prefix}/openapi.json", headers=key).json()
        assert document["servers"] == [{"url": root.rstrip("/")}]
        assert f'href="{root.rstrip("/")}/openapi.json"' in server.client.get(f"{prefix}/docs", headers=key).text
    for path in (root, root.rstrip("/") * 2, f"{root.rstrip('/')}x/health"):
        assert server.client.get(path).status_code == 401
        assert server.client.get(path, headers=key).status_code == 404


def test_the_page_of_the_documentation_comes_without_the_network(server):
    answer = server.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "POST /v1/chat/completions" in answer.text
    assert "http" not in answer.text.replace("HTTP", "").replace("http://localhost", "")
    assert server.client.get("/redoc").status_code == 404


def test_head_is_answered_as_get_is(server):
    for path in ("/health", "/health/live", "/health/ready"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
