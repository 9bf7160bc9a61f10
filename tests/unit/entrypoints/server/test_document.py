from types import SimpleNamespace

import pytest

from octavo.entrypoints.server.app import make_app
from octavo.entrypoints.server.document import attribute_docs
from octavo.entrypoints.server.options import ServerArgs
from octavo.protocol.sampling_params import SamplingParams


def document(**keys: bytes) -> dict:
    state = SimpleNamespace(args=ServerArgs(dev_endpoints=True), key_digests=keys)
    return make_app(state).openapi()


@pytest.fixture(scope="module")
def openapi() -> dict:
    return document()


def operations(openapi: dict) -> list[tuple[str, dict]]:
    return [(path, one) for path, methods in openapi["paths"].items() for one in methods.values()]


@pytest.mark.parametrize(
    "name",
    ["ChatCompletionRequest", "CompletionRequest", "TokenizeRequest", "ApplyTemplateRequest", "DetokenizeRequest"],
)
def test_every_field_of_a_body_is_described(openapi, name):
    properties = openapi["components"]["schemas"][name]["properties"]
    assert [field for field, schema in properties.items() if not schema.get("description")] == []


def test_fields_of_sampling_are_described_in_their_own_words_and_with_their_range(openapi):
    field = openapi["components"]["schemas"]["ChatCompletionRequest"]["properties"]["top_p"]
    assert field["description"] == attribute_docs(SamplingParams)["top_p"]
    assert field["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}


def test_every_operation_says_what_it_does_and_how_it_fails(openapi):
    for path, operation in operations(openapi):
        assert operation["summary"], path
        assert operation["description"], path
        assert operation["tags"], path
        assert "422" not in operation["responses"], path
        errors = {status: one for status, one in operation["responses"].items() if not status.startswith("2")}
        assert "default" in errors
        for error in errors.values():
            assert error["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


def test_streams_are_described(openapi):
    for path in ("/v1/completions", "/v1/chat/completions"):
        content = openapi["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
        data = content["text/event-stream"]["itemSchema"]["properties"]["data"]
        reference = data["anyOf"][0]["contentSchema"]["$ref"]
        assert reference.rpartition("/")[2] in openapi["components"]["schemas"]


def test_every_reference_leads_somewhere(openapi):
    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [one for inner in value.values() for one in references(inner)]
        return [one for inner in value for one in references(inner)] if isinstance(value, list) else []

    known = {f"#/components/schemas/{name}" for name in openapi["components"]["schemas"]}
    assert set(references(openapi)) <= known


def test_keys_are_asked_for_only_where_they_are_needed(openapi):
    assert "securitySchemes" not in openapi["components"]
    for path, operation in operations(document(digest=b"key")):
        assert ("security" in operation) != path.startswith("/health"), path
        assert ("401" in operation["responses"]) != path.startswith("/health"), path
