"""Requests made from the served OpenAPI document, valid and not: nothing a client sends is a 5xx."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/apply-template"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/abort_requests"),
)
MOST_TOKENS = 8
"""Of one answer: longer ones would only take time here."""
CHECKS = (not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance)


@pytest.fixture(scope="module")
def schema(server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_tried(schema):
    found = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert found == set(OPERATIONS)


def modes() -> list[Any]:
    """Each operation with what is valid and, where it takes anything, with what is not."""
    takes_something = {("POST", path) for _, path in OPERATIONS if path != "/reset_prefix_cache"}
    return [
        pytest.param(method, path, mode, id=f"{path}-{mode.value}")
        for method, path in OPERATIONS
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or (method, path) in takes_something
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), modes())
def test_every_answer_is_as_documented_and_none_is_a_5xx(schema, method, path, mode):
    operation = schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=15 if method == "POST" else 3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.body = _make_cheap(case.body)
        case.call_and_validate(checks=CHECKS, timeout=30)

    check()


def _make_cheap(body: Any) -> Any:
    """The same request with fewer samples and tokens, where it would be served at all."""
    if not isinstance(body, dict):
        return body
    limits = {"n": 2, "best_of": 2, "max_tokens": MOST_TOKENS, "max_completion_tokens": MOST_TOKENS}
    cheap = {name: min(value, limits[name]) if type(value) is int and name in limits else value
             for name, value in body.items()}  # fmt: skip
    if "messages" in body and not any(type(body.get(name)) is int for name in ("max_tokens", "max_completion_tokens")):
        cheap.setdefault("max_tokens", MOST_TOKENS)
    return cheap
