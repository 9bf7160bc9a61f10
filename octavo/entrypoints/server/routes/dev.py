"""For those who develop: /server_info, /reset_prefix_cache, /abort_requests. Served with --dev-endpoints only."""

from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.entrypoints.server.bodies import json_body, read_body
from octavo.entrypoints.server.schema.common import RequestBody
from octavo.entrypoints.server.schema.responses import ERROR_RESPONSES
from octavo.entrypoints.server.sse import JsonResponse
from octavo.entrypoints.server.state import ServerState
from octavo.errors import InvalidInput

router = APIRouter(tags=["development"], responses=ERROR_RESPONSES)

_SECRETS = ("api_key", "api_key_file", "ssl_keyfile_password")


class AbortRequest(RequestBody):
    """What /abort_requests takes."""

    request_ids: list[str]
    """The ids of answers, such as cmpl-...; unknown ones are ignored."""

    def check(self) -> None:
        super().check()
        if not self.request_ids:
            raise InvalidInput("request_ids=[] names no request; give at least one id")


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Options, kernels, statistics and the process id of the engine core, and whether its accounts are right.

    Takes up to one step of the engine.
    """
    state: ServerState = request.app.state.server
    state.require_ready()
    options: dict[str, Any] = {name: value for name, value in asdict(state.args).items() if name not in _SECRETS}
    return JsonResponse(
        {
            "version": __version__,
            "model": state.model,
            "server": options,
            "engine": msgspec.to_builtins(state.engine.config, enc_hook=str),
            "kernels": await state.engine.kernel_report(),
            "core_pid": state.engine.core_pid,
            "stats": await state.engine.get_metrics(),
            "kv_cache_audit": await _audit(state),
        }
    )


async def _audit(state: ServerState) -> str:
    """ "ok", or what is off in the accounts of the KV cache."""
    try:
        await state.engine.audit()
    except AssertionError as error:
        return str(error) or "off"
    return "ok"


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached block; `reset` is false, and nothing changes, while requests hold blocks."""
    state: ServerState = request.app.state.server
    state.require_ready()
    return JsonResponse({"reset": await state.engine.reset_prefix_cache()})


@router.post("/abort_requests", openapi_extra=json_body(AbortRequest))
async def abort_requests(request: Request) -> Response:
    """End requests by the ids of their answers; they end with finish_reason "abort"."""
    state: ServerState = request.app.state.server
    body = await read_body(request, AbortRequest)
    state.require_ready()
    await state.engine.abort(body.request_ids)
    return JsonResponse({"status": "ok", "warnings": body.unknown_field_warnings()})
