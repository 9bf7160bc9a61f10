"""/v1/completions: texts that go on where a prompt ends."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.admission import PromptGroup
from octavo.engine.input_processor import Prompt
from octavo.entrypoints.server.bodies import json_body, read_body
from octavo.entrypoints.server.completion_choices import CompletionWriter
from octavo.entrypoints.server.schema.completions import CompletionRequest
from octavo.entrypoints.server.schema.responses import ERROR_RESPONSES, Completion
from octavo.entrypoints.server.serving import Call, Source
from octavo.entrypoints.server.sse import JsonResponse, encode_event, stream_events
from octavo.errors import InvalidInput
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import SamplingParams

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/completions",
    summary="Complete texts",
    response_model=Completion,
    response_description="The answer; with `stream` its chunks as server-sent events, ended by `data: [DONE]`.",
    responses=ERROR_RESPONSES,
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    """Go on where each of the prompts ends."""
    body = await read_body(request, CompletionRequest)
    call = Call(request, body, id_prefix="cmpl-")
    _check_num_prompts(body, call.state.args.max_queued_requests)
    call.hides_output = body.wants_prompt_only
    sources = await call.prepare(lambda: _make_sources(call, body))
    writer = CompletionWriter(body, call.engine.get_tokenizer())
    if body.stream:
        return await stream_events(request, _stream(call, writer, sources), call.error)
    async with call:
        outputs = await call.results(sources)
        if any(writer.is_much(index, output) for index, output in enumerate(outputs)):
            return await asyncio.to_thread(_answer, call, writer, outputs)
        return _answer(call, writer, outputs)


def _check_num_prompts(body: CompletionRequest, most: int | None) -> None:
    """Refuse what would find the queue full whenever it is tried. Raises InvalidInput."""
    if most is not None and body.num_prompts > most:
        raise InvalidInput(
            f"prompt holds {body.num_prompts} prompts, but no more than max_queued_requests={most} can wait here; "
            "send them in several requests"
        )


def _make_sources(call: Call, body: CompletionRequest) -> list[Source]:
    params = body.to_sampling_params(call.engine.get_default_sampling_params())
    group = PromptGroup() if body.num_prompts > 1 else None
    return [_generate(call, prompt, params, group) for prompt in body.prompts]


def _generate(call: Call, prompt: Prompt, params: SamplingParams, group: PromptGroup | None) -> Source:
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    whole: Any = {key: prompt, "cache_salt": call.cache_salt()}
    source: Source = call.engine.generate(whole, params, call.id, group=group, **call.engine_options())
    return source


def _answer(call: Call, writer: CompletionWriter, outputs: list[RequestOutput]) -> Response:
    choices = [choice for index, output in enumerate(outputs) for choice in writer.write(index, output)]
    answer = {**_head(call), "choices": choices, "usage": call.usage()}
    if call.wants_timings:
        answer["timings"] = call.timings()
    if warnings := call.warnings():
        answer["warnings"] = warnings
    return JsonResponse(answer)


async def _stream(call: Call, writer: CompletionWriter, sources: list[Source]) -> AsyncGenerator[bytes, None]:
    options = call.body.stream_options
    with_usage = options is not None and options.include_usage
    is_first = True
    async with call:
        async for index, output in call.stream(sources):
            once: dict[str, Any] = {}
            if is_first and (warnings := call.warnings()):
                once["warnings"] = warnings
            if call.is_finished and call.wants_timings and not with_usage:
                once["timings"] = call.timings()
            is_first = False
            if writer.is_much(index, output):
                yield await asyncio.to_thread(_encode_chunks, call, writer, index, output, once)
            else:
                yield _encode_chunks(call, writer, index, output, once)
        if with_usage:
            last = {**_head(call), "choices": [], "usage": call.usage()}
            yield encode_event({**last, "timings": call.timings()} if call.wants_timings else last)


def _encode_chunks(
    call: Call, writer: CompletionWriter, index: int, output: RequestOutput, once: dict[str, Any]
) -> bytes:
    """The events of one output, a choice each. `once` stands in the first of them."""
    head = _head(call)
    options = call.body.stream_options
    if options is not None and options.continuous_usage_stats:
        head["usage"] = call.usage()
    events = []
    for choice in writer.write(index, output):
        events.append(encode_event({**head, "choices": [choice], **once}))
        once = {}
    return b"".join(events)


def _head(call: Call) -> dict[str, Any]:
    return {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model}
