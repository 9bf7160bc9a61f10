"""The OpenAPI document: what FastAPI knows of the routes, and what the routes read and write themselves.

What holds: fields of SamplingParams are described in its own words, and every answer that is an error has the one body.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from octavo.entrypoints.server.bodies import body_schemas
from octavo.entrypoints.server.middleware import OPEN_PATHS
from octavo.entrypoints.server.schema.chat_responses import ChatCompletionChunk
from octavo.entrypoints.server.schema.responses import Completion
from octavo.protocol.sampling_params import MAX_N, SamplingParams

_REFERENCE = "#/components/schemas/{model}"
_DESCRIPTION = (
    "Texts from a large language model, with the names of OpenAI's API and, beyond it, vLLM's. In a body null means "
    "absent. A field that is not known, or has no effect, is named in the answer's `warnings`; one that is out of "
    "range, or whose feature is not built yet, is refused (400) by its name. A stream is a series of server-sent "
    "events, each a chunk; `data: [DONE]` ends it, or an event `error` does, whose data is the body of an error."
)
_TAGS = {
    "completions": "Texts that go on where a prompt ends.",
    "chat": "The next message of a conversation.",
    "tokens": "What the model would read.",
    "models": "What is served.",
    "health": "How the server is.",
    "development": "Not for everyone's eyes; see --dev-endpoints.",
}
_CHUNKS = {"/v1/completions": Completion, "/v1/chat/completions": ChatCompletionChunk}
"""By path of a route that streams: one event."""
_RANGES: dict[str, dict[str, float]] = {
    "n": {"minimum": 1, "maximum": MAX_N},
    "best_of": {"minimum": 1, "maximum": MAX_N},
    "temperature": {"minimum": 0},
    "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "logprobs": {"minimum": -1},
    "top_logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
}
_OWN_RANGES = {"CompletionRequest": {"max_tokens": {"minimum": 0}}}
"""Where a body differs."""


def make_document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """The document of an application.

    Args:
        needs_key: the routes are closed to those without a key.
    """
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary="A serving engine for large language models.",
        description=_DESCRIPTION,
        routes=app.routes,
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
    )
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # the framework's own form, which is never answered
        schemas.pop(name, None)
    schemas.update(body_schemas())
    for name, schema in schemas.items():
        _describe_sampling(schema, {**_RANGES, **_OWN_RANGES.get(name, {})})
    for path, chunk in _CHUNKS.items():
        _add_stream(document, path, chunk)
    document["paths"]["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    for path, operation in _operations(document):
        _complete_errors(operation, needs_key=needs_key and path not in OPEN_PATHS)
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def _complete_errors(operation: dict[str, Any], *, needs_key: bool) -> None:
    """Say of every error that it has the one body."""
    responses = operation["responses"]
    responses.pop("422", None)
    body = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="ErrorBody")}}}
    if needs_key:
        operation["security"] = [{"key": []}]
        responses.setdefault("401", {"description": "No valid API key.", "content": body})
    else:
        responses.pop("401", None)
    responses["default"] = {"description": "Any other error.", "content": body}


def _add_stream(document: dict[str, Any], path: str, chunk: Any) -> None:
    """Describe one event of a streamed answer."""
    schemas = document["components"]["schemas"]
    schema = TypeAdapter(chunk).json_schema(ref_template=_REFERENCE)
    for name, inner in schema.pop("$defs", {}).items():
        schemas.setdefault(name, inner)
    schemas.setdefault(chunk.__name__, schema)
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    written = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REFERENCE.format(model=chunk.__name__)},
    }
    data = {
        "description": "A chunk; of an event `error` the body of an error; [DONE] at the end.",
        "anyOf": [written, {"const": "[DONE]"}],
    }
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
    content["text/event-stream"] = {"itemSchema": event}


def _describe_sampling(schema: dict[str, Any], ranges: Mapping[str, Mapping[str, float]]) -> None:
    """Add what SamplingParams says of the fields that are its own, and their ranges."""
    properties = schema.get("properties", {})
    if "temperature" not in properties:
        return
    texts = attribute_docs(SamplingParams)
    for name, field in properties.items():
        if name in texts:
            field.setdefault("description", texts[name])
        for branch in field.get("anyOf", ()):
            if branch.get("type") in ("integer", "number"):
                branch.update(ranges.get(name, {}))


def attribute_docs(kind: type) -> dict[str, str]:
    """The texts below the attributes of a class, by name; none if its source cannot be had."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[node.target.id] = " ".join(below.value.value.split())
    return docs
