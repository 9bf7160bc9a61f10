"""/tokenize, /detokenize, /apply-template: what the model would read, without asking it.

What holds: the tokens of a conversation are those that /v1/chat/completions gives the model for it. Rendering and
tokenising happen in threads.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.server.bodies import json_body, read_body
from octavo.entrypoints.server.schema.chat import TemplateFields, unused_template_options
from octavo.entrypoints.server.schema.responses import ERROR_RESPONSES
from octavo.entrypoints.server.schema.tokenize import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    Text,
    TokenizeRequest,
    Tokens,
)
from octavo.entrypoints.server.sse import JsonResponse
from octavo.entrypoints.server.state import ServerState
from octavo.tokenization.chat import encode_rendered, render_chat

router = APIRouter(tags=["tokens"])
_ERRORS = {status: response for status, response in ERROR_RESPONSES.items() if status not in (429,)}
AnyBody = TypeVar("AnyBody", TokenizeRequest, ApplyTemplateRequest, DetokenizeRequest)


@router.post(
    "/tokenize",
    summary="Tokens of a text or a conversation",
    response_model=Tokens,
    responses=_ERRORS,
    openapi_extra=json_body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of a conversation in the chat template."""
    return await _answer(request, TokenizeRequest, _tokenize)


@router.post(
    "/detokenize",
    summary="Text of tokens",
    response_model=Text,
    responses=_ERRORS,
    openapi_extra=json_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    """The text of token ids as a whole, special tokens included."""
    return await _answer(request, DetokenizeRequest, _detokenize)


@router.post(
    "/apply-template",
    summary="Text of a conversation",
    response_model=Text,
    responses=_ERRORS,
    openapi_extra=json_body(ApplyTemplateRequest),
)
async def apply_template(request: Request) -> Response:
    """A conversation as the model reads it: written out by the chat template."""
    return await _answer(request, ApplyTemplateRequest, _apply_template)


async def _answer(
    request: Request, kind: type[AnyBody], make: Callable[[ServerState, AnyBody], dict[str, Any]]
) -> Response:
    body = await read_body(request, kind)
    state: ServerState = request.app.state.server
    state.served_name(body.model)
    return await asyncio.to_thread(lambda: JsonResponse(make(state, body)))


def _tokenize(state: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = state.engine.get_tokenizer()
    warnings = body.unknown_field_warnings()
    if body.prompt is None:
        text, notes = _render(state, body, body.messages)
        token_ids = encode_rendered(tokenizer, text)
        warnings += notes
    else:
        token_ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    names = (
        [tokenizer.backend.id_to_token(token_id) or "" for token_id in token_ids] if body.return_token_strs else None
    )
    answer = {
        "count": len(token_ids),
        "max_model_len": state.engine.config.scheduler.max_model_len,
        "tokens": token_ids,
        "token_strs": names if body.return_token_strs else None,
    }
    return _with_warnings(answer, warnings)


def _detokenize(state: ServerState, body: DetokenizeRequest) -> dict[str, Any]:
    tokenizer = state.engine.get_tokenizer()
    text = tokenizer.decode(body.token_ids(tokenizer.vocab_size), skip_special_tokens=False)
    return _with_warnings({"prompt": text}, body.unknown_field_warnings())


def _apply_template(state: ServerState, body: ApplyTemplateRequest) -> dict[str, Any]:
    text, notes = _render(state, body, body.messages)
    return _with_warnings({"prompt": text}, body.unknown_field_warnings() + notes)


def _render(state: ServerState, body: TemplateFields, messages: Any) -> tuple[str, list[str]]:
    """The conversation's text, and what is to be said about it."""
    tokenizer = state.engine.get_tokenizer()
    options = body.template_options(tokenizer, state.args.chat_template)
    return render_chat(tokenizer, messages, **options), list(unused_template_options(options))


def _with_warnings(answer: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    return {**answer, "warnings": warnings} if warnings else answer
