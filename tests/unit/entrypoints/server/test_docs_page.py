import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from octavo.entrypoints.server.app import make_app
from octavo.entrypoints.server.docs_page import make_page
from octavo.entrypoints.server.options import ServerArgs


@pytest.fixture(scope="module")
def document() -> dict:
    state = SimpleNamespace(args=ServerArgs(dev_endpoints=True), key_digests={})
    return make_app(state).openapi()


class Nesting(HTMLParser):
    """Fails where an element is closed that is not the open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_operation_and_every_field_is_on_the_page(document):
    page = make_page(document, "/openapi.json")
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page
    for field in document["components"]["schemas"]["CompletionRequest"]["properties"]:
        assert f"<code>{field}</code>" in page
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []


def test_the_page_loads_nothing_and_runs_nothing(document):
    page = make_page(document, "/openapi.json")
    assert "<script" not in page
    assert "src=" not in page
    assert re.findall(r'href="([^"]*)"', page) == ["/openapi.json"]


def test_what_the_document_says_is_shown_as_text(document):
    evil = "<script>alert(1)</script>"
    page = make_page({**document, "info": {**document["info"], "description": evil, "title": evil}}, f'/"{evil}')
    assert "<script" not in page
