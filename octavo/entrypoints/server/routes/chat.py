"""/v1/chat/completions: the next message of a conversation."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.server.bodies import json_body, read_body
from octavo.entrypoints.server.chat_choices import INLINE_ENTRIES, ChatWriter, num_logprob_entries
from octavo.entrypoints.server.schema.chat import ChatCompletionRequest, unused_template_options
from octavo.entrypoints.server.schema.chat_responses import ChatCompletion
from octavo.entrypoints.server.schema.responses import ERROR_RESPONSES
from octavo.entrypoints.server.serving import Call, Source
from octavo.entrypoints.server.sse import JsonResponse, encode_event, stream_events
from octavo.protocol.outputs import RequestOutput

router = APIRouter(tags=["chat"])


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_model=ChatCompletion,
    response_description="The answer; with `stream` its chunks as server-sent events, ended by `data: [DONE]`.",
    responses=ERROR_RESPONSES,
    openapi_extra=json_body(ChatCompletionRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation, written out by the model's chat template."""
    body = await read_body(request, ChatCompletionRequest)
    call = Call(request, body, id_prefix="chatcmpl-")
    source, options = await call.prepare(lambda: _make_source(call, body))
    writer = ChatWriter(body, call.engine.get_tokenizer())
    if body.stream:
        return await stream_events(request, _stream(call, writer, source, options), call.error)
    async with call:
        (output,) = await call.results([source])
        _warn(call, options)
        if num_logprob_entries(output) > INLINE_ENTRIES:
            return await asyncio.to_thread(_answer, call, writer, output)
        return _answer(call, writer, output)


def _make_source(call: Call, body: ChatCompletionRequest) -> tuple[Source, dict[str, Any]]:
    """The stream of the answer, and the options of the template."""
    tokenizer = call.engine.get_tokenizer()
    params = body.to_sampling_params(call.engine.get_default_sampling_params(), tokenizer.vocab_size)
    options = body.template_options(tokenizer, call.state.args.chat_template)
    source: Source = call.engine.chat(
        body.messages, params, call.id, cache_salt=call.cache_salt(), **options, **call.engine_options()
    )
    return source, options


def _answer(call: Call, writer: ChatWriter, output: RequestOutput) -> Response:
    answer = {
        **_head(call, "chat.completion"),
        "choices": [writer.choice(completion) for completion in output.outputs],
        "usage": call.usage(),
        **writer.prompt_fields(output),
    }
    if call.wants_timings:
        answer["timings"] = call.timings()
    if warnings := call.warnings():
        answer["warnings"] = warnings
    return JsonResponse(answer)


async def _stream(
    call: Call, writer: ChatWriter, source: Source, options: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    wanted = call.body.stream_options
    with_usage = wanted is not None and wanted.include_usage
    is_first = True
    async with call:
        async for _, output in call.stream([source]):
            extra: dict[str, Any] = {}
            if is_first:
                is_first = False
                _warn(call, options)
                if warnings := call.warnings():
                    extra["warnings"] = warnings
            if call.is_finished and call.wants_timings and not with_usage:
                extra["timings"] = call.timings()
            if num_logprob_entries(output) > INLINE_ENTRIES:
                yield await asyncio.to_thread(_encode_chunks, call, writer, output, extra)
            else:
                yield _encode_chunks(call, writer, output, extra)
        if with_usage:
            last = {**_head(call, "chat.completion.chunk"), "choices": [], "usage": call.usage()}
            yield encode_event({**last, "timings": call.timings()} if call.wants_timings else last)


def _encode_chunks(call: Call, writer: ChatWriter, output: RequestOutput, extra: dict[str, Any]) -> bytes:
    """The events of one output. What is said once stands in the first of them."""
    head = _head(call, "chat.completion.chunk")
    wanted = call.body.stream_options
    if wanted is not None and wanted.continuous_usage_stats:
        head["usage"] = call.usage()
    once = {**writer.prompt_fields(output), **extra}
    events = []
    for completion in output.outputs:
        for piece in writer.pieces(completion):
            events.append(encode_event({**head, "choices": [piece], **once}))
            once = {}
    return b"".join(events)


def _warn(call: Call, options: dict[str, Any]) -> None:
    for warning in unused_template_options(options):
        call.add_warning(warning)


def _head(call: Call, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model}
