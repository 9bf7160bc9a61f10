"""What a step's result means for its requests: the prompt's log-probabilities are kept, an output is made."""

from octavo.protocol.messages import EngineCoreOutput, FinishReason, TokenLogprobs
from octavo.protocol.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.request import Request


def collect_prompt_logprobs(requests: list[Request], output: SchedulerOutput, result: ModelRunnerOutput) -> None:
    """Keep those that the step came to."""
    for request, start in zip(requests, output.num_computed_tokens, strict=True):
        entries = result.prompt_logprobs.get(request.request_id)
        if entries and request.prompt_logprobs is not None:
            request.collect_prompt_logprobs(start + 1, entries)


def make_output(
    request: Request,
    new_token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
) -> EngineCoreOutput:
    """What the step added to a request, with its state now."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        timings=request.timings(),
    )
