"""The log line of a request."""

import json
import logging

import pytest

from octavo.metrics.request_log import format_request, log_request
from octavo.metrics.request_record import RequestRecord, hash_tenant


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.INFO, "octavo.requests"):
        yield caplog


def test_a_request_is_one_line_of_json(lines):
    log_request(RequestRecord(
        request_id="cmpl-1", endpoint="/v1/completions", status=200, prompt_tokens=7, cached_tokens=3,
        generation_tokens=5, queue_seconds=0.123456, e2e_seconds=1.0, finish_reasons=["stop", "length", "stop"],
    ))  # fmt: skip
    (logged,) = lines.records
    word, _, text = logged.getMessage().partition(" ")
    assert word == "request"
    assert json.loads(text) == {
        "id": "cmpl-1", "endpoint": "/v1/completions", "status": 200, "prompt_tokens": 7, "cached_tokens": 3,
        "generation_tokens": 5, "queue_s": 0.1235, "e2e_s": 1.0, "finish_reason": "length,stop",
    }  # fmt: skip


def test_who_left_and_what_failed_is_told():
    fields = json.loads(format_request(RequestRecord(
        request_id="a", endpoint="/x", status=499, client_aborted=True, streamed=True, error="Overloaded",
        tenant=hash_tenant("secret key"),
    )))  # fmt: skip
    assert (fields["client_aborted"], fields["stream"], fields["error"], fields["status"]) == (
        True, True, "Overloaded", 499,
    )  # fmt: skip
    assert fields["tenant"] and "secret" not in fields["tenant"]


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "ü\u2028", '"}', "\x1b[31m"])
def test_whatever_a_client_calls_its_request_the_line_stays_one_and_ascii(name):
    line = format_request(RequestRecord(request_id=name, endpoint="/x"))
    assert line.isascii() and line.isprintable()
    assert json.loads(line)["id"] == name


def test_tenants_are_told_apart_and_not_given_away():
    assert hash_tenant(None) is None
    assert hash_tenant("a") == hash_tenant("a") != hash_tenant("b")
    assert len(hash_tenant("\ud800")) == 12


def test_counts_that_are_not_known_are_left_out_and_never_0():
    """Of a client that goes away before the only output came, the engine told nothing."""
    gone = RequestRecord(request_id="a", endpoint="/v1/completions", status=499, client_aborted=True, e2e_seconds=3.0)
    assert "tokens" not in format_request(gone)
    begun = RequestRecord(request_id="a", endpoint="/v1/completions", prompt_tokens=3, queue_seconds=0.0)
    assert '"generation_tokens": 0' in format_request(begun)
