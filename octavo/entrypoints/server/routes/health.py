"""How the server is: for load balancers, supervisors and whoever watches. Nothing here waits for the engine.

/health/live says that this process answers, /health/ready and /health that it takes work.
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.entrypoints.server.schema.responses import ErrorBody
from octavo.entrypoints.server.sse import JsonResponse
from octavo.entrypoints.server.state import ServerState

router = APIRouter(tags=["health"])
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorBody, "description": "No work is taken now; see Retry-After."}
}


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live")
async def live() -> Response:
    """Whether this process answers."""
    return JsonResponse({"status": "live"})


@router.head("/health", include_in_schema=False)
@router.head("/health/ready", include_in_schema=False)
@router.get("/health", responses=_NOT_READY)
@router.get("/health/ready", responses=_NOT_READY)
async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    state: ServerState = request.app.state.server
    refusal = state.why_not_ready()
    return JsonResponse({"status": "ready"}) if refusal is None else refusal.response()


@router.get("/load")
async def load(request: Request) -> Response:
    """How many requests are in progress here."""
    state: ServerState = request.app.state.server
    running, queued, tokens = state.engine.load()
    return JsonResponse(
        {"server_load": len(state.calls), "num_running": running, "num_queued": queued, "queued_tokens": tokens}
    )


@router.get("/version")
async def version() -> Response:
    """The version of Octavo."""
    return JsonResponse({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in the Prometheus text format."""
    state: ServerState = request.app.state.server
    data, content_type = state.metrics.render(state.stats())
    return Response(data, headers={"content-type": content_type})
