"""/docs: the OpenAPI document as one HTML page, for people. It has no scripts and loads nothing from anywhere.

What holds: whatever is in the document, names that an operator chose included, is shown as text.
"""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid #8886; }
summary { cursor: pointer; padding: .4rem 0; }
code { font: .95em/1.5 ui-monospace, monospace; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #8883; }
:root { color-scheme: light dark; }
"""
_LONGEST_TYPE = 80


def make_page(document: Mapping[str, Any], openapi_url: str) -> str:
    """The page.

    Args:
        document: the OpenAPI document.
        openapi_url: where a program gets it.
    """
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n",
            f"<p>{escape(info.get('description', ''))}</p>\n",
            f'<p>For programs: <a href="{escape(openapi_url)}">{escape(openapi_url)}</a></p>\n',
            *_sections(document),
            "</body>\n</html>\n",
        )
    )


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    for tag in document.get("tags", ()):
        found = [
            _operation(document, method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if tag["name"] in operation.get("tags", ())
        ]
        if found:
            yield f"<h2>{escape(tag['name'])}</h2>\n<p>{escape(tag.get('description', ''))}</p>\n"
            yield from found


def _operation(document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [
        f"<details>\n<summary><code>{escape(method.upper())} {escape(path)}</code> "
        f"{escape(operation.get('summary', ''))}</summary>\n<p>{escape(operation.get('description', ''))}</p>\n"
    ]
    content = operation.get("requestBody", {}).get("content", {})
    for schema in (one["schema"] for one in content.values()):
        parts.append(_table(("field", "", ""), _fields(document, schema)))
    answers = [(status, escape(answer.get("description", "")), "") for status, answer in operation["responses"].items()]
    parts.append(_table(("answer", "", ""), answers))
    return "".join((*parts, "</details>\n"))


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    whole = _resolved(document, schema)
    required = whole.get("required", ())
    for name, field in whole.get("properties", {}).items():
        kind = _kind(document, field) + (", required" if name in required else "")
        yield name, kind, escape(_resolved(document, field).get("description", field.get("description", "")))


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return {**found, **schema}


def _kind(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The types that a value may have, in a few words."""
    kinds = [_one_kind(document, branch) for branch in schema.get("anyOf", (schema,))]
    text = " or ".join(dict.fromkeys(kind for kind in kinds if kind not in ("", "null")))
    return escape(text if len(text) <= _LONGEST_TYPE else f"{text[:_LONGEST_TYPE]}...")


def _one_kind(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    kind = str(_resolved(document, schema).get("type", ""))
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"array of {_kind(document, schema['items']) or 'values'}"
    return kind


def _table(head: tuple[str, str, str], rows: Any) -> str:
    lines = [
        f"<tr><td><code>{escape(name)}</code></td><td>{second}</td><td>{third}</td></tr>\n"
        for name, second, third in rows
    ]
    if not lines:
        return ""
    names = "".join(f"<th>{escape(one)}</th>" for one in head)
    return f"<table>\n<tr>{names}</tr>\n{''.join(lines)}</table>\n"
