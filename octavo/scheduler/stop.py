"""When a request ends by its tokens. Stop strings need text and are found in the front end."""

from octavo.protocol.messages import FinishReason
from octavo.scheduler.request import Request


def check_stop(request: Request) -> tuple[FinishReason, int | None] | None:
    """Why the request ends with its last token, as (finish_reason, stop_reason), or None if it goes on.

    An end-of-sequence token goes before a stop token, and both before the length. Neither ends a request before it has
    `min_tokens` output tokens. `stop_reason` is the id out of `stop_token_ids`, if that was it.
    """
    token_id = request.token_ids[-1]
    if request.num_output_tokens >= request.min_tokens:
        if token_id in request.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in request.stop_token_ids:
            return FinishReason.STOP, token_id
    if len(request.token_ids) >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
