"""Spans of requests, against the exporter that OpenTelemetry has for tests."""

import sys

import pytest

from octavo.errors import InvalidInput
from octavo.metrics.request_record import RequestRecord
from octavo.metrics.tracing import SpanTracer, make_tracer

URL = "http://localhost:4318/v1/traces"


@pytest.fixture
def spans():
    """A tracer, and what it has exported."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = SpanTracer(SimpleSpanProcessor(exporter), "tiny")
    yield tracer, exporter.get_finished_spans
    tracer.shutdown()


def record(**fields) -> RequestRecord:
    return RequestRecord(**{
        "request_id": "cmpl-1", "endpoint": "/v1/completions", "start_time_ns": 10**18, "e2e_seconds": 1.5,
        "prompt_tokens": 7, "cached_tokens": 3, "generation_tokens": 5, "finish_reasons": ["stop"], **fields,
    })  # fmt: skip


def test_a_request_is_one_span_with_its_counts_and_times(spans):
    tracer, finished = spans
    tracer.record(record(queue_seconds=0.25, time_to_first_token=0.5))
    (span,) = finished()
    assert (span.start_time, span.end_time) == (10**18, 10**18 + 1_500_000_000)
    attributes = span.attributes
    assert attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert attributes["gen_ai.latency.time_in_queue"] == 0.25
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "gen_ai.latency.time_in_model_decode" not in attributes, "a phase that was not reached has no time"
    assert span.status.is_unset


def test_a_span_is_below_that_of_the_client(spans):
    tracer, finished = spans
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    tracer.record(record(trace_headers={"traceparent": f"00-{trace}-{parent}-01"}))
    tracer.record(record(trace_headers={"traceparent": "nonsense"}))
    below, alone = finished()
    assert f"{below.context.trace_id:032x}" == trace
    assert f"{below.parent.span_id:016x}" == parent
    assert alone.parent is None


def test_a_failed_request_is_a_span_with_an_error(spans):
    tracer, finished = spans
    tracer.record(record(status=500, error="EngineDeadError", request_id="bad\ud800"))
    (span,) = finished()
    assert not span.status.is_ok and span.status.description == "EngineDeadError"


def test_nothing_is_traced_unless_asked_for():
    assert make_tracer(None, "tiny") is None


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(InvalidInput, match="otlp_traces_endpoint='collector'"):
        make_tracer("collector", "tiny")


def test_asked_for_and_not_installed_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidInput, match=r"not installed.*octavo\[otel\]"):
        make_tracer(URL, "tiny")
