"""Keys: what they open, what stays open without, and that what one key asked stays hidden from another."""

import time

import pytest
from http_driver import running_server

BODY = {"prompt": "a" * 64, "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def closed_server(tiny_chat_model, tmp_path_factory):
    """Keys one, two and three, the last from a file; cache isolation by key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# a comment\n\n  three  \n")
    flags = ("--num-kv-blocks", "128", "--api-key", "one", "--api-key", "two", "--api-key-file", str(file))
    with running_server(tiny_chat_model, *flags, "--cache-isolation", "key", "--dev-endpoints") as server:
        yield server


def test_every_route_but_health_is_closed(closed_server):
    document = closed_server.client.get("/openapi.json", headers=bearer("one")).json()
    paths = [path for path in document["paths"] if not path.startswith("/health")]
    assert len(paths) > 8
    for path in (*paths, "/openapi.json", "/docs", "/nowhere", "/metrics", "/health/x", "/healthy", "/v1/models/"):
        for method in ("GET", "POST", "HEAD"):
            response = closed_server.client.request(method, path)
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/health/live", "/health/ready"):
        assert closed_server.client.get(path).status_code == 200


@pytest.mark.parametrize("key", ["one", "two", "three"])
def test_each_key_opens(closed_server, key):
    assert closed_server.post("/v1/completions", BODY, headers=bearer(key)).status_code == 200
    assert closed_server.client.get("/metrics", headers={"Authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer on", "Bearer one1", "Bearer ONE", "Basic one", "one", "Bearer one two",
     "Bearer # a comment", "Bearer \xff", "Bearer " + "x" * 5000],
)  # fmt: skip
def test_nothing_else_does(closed_server, authorization):
    headers = {"Authorization": authorization.encode("latin-1")}
    assert closed_server.client.get("/v1/models", headers=headers).status_code == 401


def test_one_key_s_prompts_are_not_found_by_another(closed_server):
    def cached(key: str, **fields) -> int:
        answer = closed_server.post("/v1/completions", {**BODY, **fields}, headers=bearer(key)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    closed_server.client.post("/reset_prefix_cache", headers=bearer("one"))
    assert [cached("one"), cached("one"), cached("two"), cached("two")] == [0, 48, 0, 48]
    assert [cached("one", cache_salt="s"), cached("two", cache_salt="s"), cached("one", cache_salt="s")] == [0, 0, 48]


def test_keys_are_neither_shown_nor_logged(closed_server):
    closed_server.post("/v1/completions", BODY, headers=bearer("two"))
    info = closed_server.client.get("/server_info", headers=bearer("one")).text
    for secret in ('"two"', "Bearer", "aaaa"):
        assert secret not in closed_server.log()
        assert secret not in info
    end = time.monotonic() + 30
    while '"tenant"' not in closed_server.log():  # the line comes after the answer
        assert time.monotonic() < end
        time.sleep(0.02)
