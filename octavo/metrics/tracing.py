"""Optional OpenTelemetry spans, one a request, made when it has ended. Off unless asked for and installed.

A span holds what a `RequestRecord` does: counts, times and reasons, never a prompt, an answer or a key. Nothing here
touches OpenTelemetry's globals, and the package is imported only when tracing is asked for.
"""

from typing import Any, Protocol

from octavo.errors import InvalidInput, printable, short_repr
from octavo.metrics.request_record import RequestRecord

_SPAN_NAME = "llm_request"
_NANOSECONDS = 10**9


class RequestTracer(Protocol):
    """Where finished requests are reported."""

    def record(self, record: RequestRecord) -> None:
        """Export one request. Returns at once and never raises."""

    def shutdown(self) -> None:
        """Send what is left."""


def make_tracer(endpoint: str | None, model_name: str) -> RequestTracer | None:
    """A tracer that sends spans to an OTLP collector over HTTP; None without an endpoint.

    Raises:
        InvalidInput: OpenTelemetry is not installed, or the endpoint is no address.
    """
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidInput(
            f"otlp_traces_endpoint={short_repr(endpoint)} must be a URL such as http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidInput(
            f"otlp_traces_endpoint={short_repr(endpoint)} needs OpenTelemetry, which is not installed "
            f"({printable(str(error))}); pip install 'octavo[otel]', or leave the option out"
        ) from error
    return SpanTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model_name)


class SpanTracer:
    """Makes a span of each record, below the client's own span if the request came with one.

    Args:
        processor: an `opentelemetry.sdk.trace.SpanProcessor` that takes the spans.
        model_name: an attribute of every span.
    """

    def __init__(self, processor: Any, model_name: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({SERVICE_NAME: "octavo"})  # OTEL_SERVICE_NAME goes before it
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def record(self, record: RequestRecord) -> None:
        """Make and end the span of a request whose `start_time_ns` is known; of any other none is made."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if record.start_time_ns is None:
            return
        span = self._tracer.start_span(
            _SPAN_NAME,
            context=self._propagator.extract(record.trace_headers),
            kind=SpanKind.SERVER,
            start_time=record.start_time_ns,
            attributes=_attributes(record, self._model_name),
        )
        if record.error is not None or record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(record.start_time_ns + round(record.e2e_seconds * _NANOSECONDS))

    def shutdown(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(record: RequestRecord, model_name: str) -> dict[str, Any]:
    """Named as OpenTelemetry's conventions for generative AI do, and as vLLM does where these have no name."""
    attributes = {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": printable(record.request_id),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.latency.time_in_queue": record.queue_seconds,
        "gen_ai.latency.time_to_first_token": record.time_to_first_token,
        "gen_ai.latency.time_in_model_prefill": record.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": record.decode_seconds,
        "gen_ai.latency.e2e": record.e2e_seconds,
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "octavo.client_aborted": record.client_aborted,
    }
    return {name: value for name, value in attributes.items() if value is not None}
