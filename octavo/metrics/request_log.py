"""One structured log line a request. It has counts, times and reasons, never a prompt, an answer or a key."""

import json

from octavo.logging import get_logger
from octavo.metrics.request_record import RequestRecord

logger = get_logger("octavo.requests")

_SECONDS_DIGITS = 4


def log_request(record: RequestRecord) -> None:
    """Log the record at INFO as the word "request" and one JSON object on one line, ASCII only."""
    logger.info("request %s", format_request(record))


def format_request(record: RequestRecord) -> str:
    """The record as JSON on one line; what is not known or does not apply is left out."""
    # before the first output came, or when only the last one was waited for and it did not, nothing is known of these
    is_known = record.queue_seconds is not None
    fields = {
        "id": record.request_id,
        "endpoint": record.endpoint,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens if is_known else None,
        "cached_tokens": record.cached_tokens if is_known else None,
        "generation_tokens": record.generation_tokens if is_known else None,
        "queue_s": _seconds(record.queue_seconds),
        "prefill_s": _seconds(record.prefill_seconds),
        "decode_s": _seconds(record.decode_seconds),
        "ttft_s": _seconds(record.time_to_first_token),
        "e2e_s": _seconds(record.e2e_seconds),
        "finish_reason": ",".join(sorted(set(record.finish_reasons))) or None,
        "stream": record.streamed or None,
        "client_aborted": record.client_aborted or None,
        "tenant": record.tenant,
        "error": record.error,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, _SECONDS_DIGITS)
