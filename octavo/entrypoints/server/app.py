"""make_app: the routes, what comes before them, and what becomes of errors."""

from importlib import import_module
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from octavo import __version__
from octavo.entrypoints.server.docs_page import make_page
from octavo.entrypoints.server.document import make_document
from octavo.entrypoints.server.errors import ApiError, from_status
from octavo.entrypoints.server.middleware import Gate
from octavo.entrypoints.server.options import parse_texts
from octavo.entrypoints.server.state import ServerState
from octavo.errors import describe

ROUTES = ("completions", "chat", "tokens", "models", "health")
"""Modules of `routes`, in the order of the documentation."""

OPENAPI_URL = "/openapi.json"

NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""Newer versions of the framework send OpenTelemetry by themselves, if the environment names a collector. This server
does so only where --otlp-traces-endpoint asks for it. Older versions have no such option and ignore it."""


_PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def make_app(state: ServerState) -> FastAPI:
    """The application over this state; `app.state.server` is the state."""
    app = FastAPI(
        title="Octavo",
        version=__version__,
        redirect_slashes=False,
        openapi_url=OPENAPI_URL,
        docs_url=None,  # the framework's own pages load scripts from elsewhere
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.state.server = state
    for name in (*ROUTES, "dev") if state.args.dev_endpoints else ROUTES:
        app.include_router(import_module(f"octavo.entrypoints.server.routes.{name}").router)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_middleware(Gate, state=state)
    if state.args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=parse_texts("allowed_origins", state.args.allowed_origins),
            allow_methods=parse_texts("allowed_methods", state.args.allowed_methods) or ["*"],
            allow_headers=parse_texts("allowed_headers", state.args.allowed_headers) or ["*"],
            allow_credentials=state.args.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    app.openapi = lambda: _document(app, state)  # type: ignore[method-assign]
    app.add_api_route("/docs", _show_docs, include_in_schema=False)
    return app


def _document(app: FastAPI, state: ServerState) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = make_document(app, needs_key=bool(state.key_digests))
    return app.openapi_schema


async def _show_docs(request: Request) -> Response:
    root_path = request.scope.get("root_path", "")
    return HTMLResponse(make_page(request.app.openapi(), f"{root_path}{OPENAPI_URL}"), headers=_PAGE_HEADERS)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return from_status(error.status_code, error.detail, error.headers).response()


async def _answer_validation(request: Request, error: Exception) -> Response:
    return ApiError(400, describe(error)).response()
