"""/v1/models: what is served here."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.server.errors import ApiError
from octavo.entrypoints.server.schema.responses import ErrorBody, ModelCard, ModelList
from octavo.entrypoints.server.sse import JsonResponse
from octavo.entrypoints.server.state import ServerState
from octavo.errors import short_repr

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    """The names of the model that is served."""
    state: ServerState = request.app.state.server
    return JsonResponse({"object": "list", "data": [_card(state, name) for name in state.served_names]})


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses={404: {"model": ErrorBody}})
async def retrieve_model(request: Request, name: str) -> Response:
    """One of those names."""
    state: ServerState = request.app.state.server
    if name not in state.served_names:
        names = ", ".join(state.served_names)
        raise ApiError(
            404, f"model {short_repr(name, 200)} is not served here; use {names}", "model", "model_not_found"
        )
    return JsonResponse(_card(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "octavo",
        "root": state.model,
        "parent": None,
        "max_model_len": state.engine.config.scheduler.max_model_len,
    }
