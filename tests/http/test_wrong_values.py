"""Every field of every body with values of every wrong kind: an answer, or a 400 in the words of clients."""

import codecs
import json
import re

import pytest
from http_driver import RunningServer

from octavo.entrypoints.server.routes.dev import AbortRequest
from octavo.entrypoints.server.schema.chat import ChatCompletionRequest
from octavo.entrypoints.server.schema.common import StreamOptions
from octavo.entrypoints.server.schema.completions import CompletionRequest
from octavo.entrypoints.server.schema.tokenize import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest

CHAT = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": CHAT, "max_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
    "/apply-template": (ApplyTemplateRequest, {"messages": CHAT}),
    "/abort_requests": (AbortRequest, {"request_ids": ["x"]}),
}
WRONG = (
    True, -5, 1.5, 1e308, 10**30, "", "\u0000", "\ud800", [], [[]], [None], [1, "a"], ["a", 1], [1.5], [{}], [10**9],
    [[-1]], {}, {"a": 1}, [{"role": "user"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "assistant", "content": "x", "tool_calls": [5]}],
)  # fmt: skip
PYTHON = re.compile(
    r"torch|[Tt]ensor|\bdicts?\b|dictionary|instance|NoneType|\ba str\b|\ba int\b|\ba float\b|\ba bool\b|\w+Error\b"
    r"|\bTrue\b|\bFalse\b|\bNone\b|\bLLM\b|<class|object at|Python|tuple|unhashable"
)
QUOTED = re.compile(r"'[^']*'")


def fields() -> list[tuple[str, str]]:
    return [(path, field) for path, (kind, _) in BODIES.items() for field in kind.model_fields]


def check_refusal(response, field: str) -> None:
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert PYTHON.search(QUOTED.sub("", error["message"])) is None, error["message"]
    assert error["message"].isprintable()
    if error["code"] != "invalid_json":
        assert error["param"] is not None, error["message"]
        assert field in error["message"] or error["message"].startswith("the body must have exactly one of")


@pytest.mark.parametrize(("path", "field"), fields())
def test_a_wrong_value_is_refused_in_the_words_of_json_or_has_an_answer(server: RunningServer, path, field):
    for value in WRONG:
        data = json.dumps({**BODIES[path][1], field: value}).encode()
        response = server.client.post(path, content=data, headers={"content-type": "application/json"})
        if response.status_code != 200:
            check_refusal(response, field)


@pytest.mark.parametrize("field", StreamOptions.model_fields)
def test_so_are_the_values_of_objects_inside(server: RunningServer, field):
    for value in (5, "x", [], {}):
        body = {"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": {field: value}}
        response = server.post("/v1/completions", body)
        check_refusal(response, field)
        assert f"stream_options.{field}=" in response.json()["error"]["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_some_clients_write_for_no_number_is_refused_by_name(server: RunningServer, value):
    for field in ("top_p", "temperature", "max_tokens"):
        data = f'{{"prompt": "a", "{field}" : {value}}}'.encode()
        response = server.client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert f"{field}={value} is no number" in response.json()["error"]["message"]
    data = b'{"prompt": "{\\"top_p\\": NaN}", "max_tokens": 1}'
    response = server.client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_byte_order_mark_is_passed_over(server: RunningServer, mark):
    data = mark + b'{"prompt": "a", "max_tokens": 1}'
    response = server.client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        ('{"prompt": "a"}'.encode("utf-16"), "it is not in UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "it is not in UTF-8"),
        (b'{"prompt": "\xff"}', "it is not in UTF-8"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (codecs.BOM_UTF8 * 2 + b'{"prompt": "a"}', "invalid character"),
        (b'{"prompt": "a"', "truncated"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_said_why(server: RunningServer, data, said):
    response = server.client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert said in response.json()["error"]["message"]
