"""The application put together."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from h2okv.server.api_error import ApiError
from h2okv.server.guard import Guard
from h2okv.server.openai_routes import openai_routes
from h2okv.server.served_engine import ServedEngine
from h2okv.server.service import Service
from h2okv.server.settings import ServerSettings
from h2okv.server.status_routes import status_routes


def make_app(engine: ServedEngine, settings: ServerSettings) -> FastAPI:
    """Makes the application.

    Args:
        engine: Generates. The application does not close it.
        settings: The key and the limits.

    Returns:
        An ASGI application.
    """
    service = Service(engine, settings)
    # No pages of FastAPI's own: they load scripts from elsewhere.
    app = FastAPI(title="h2okv", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(openai_routes(service))
    app.include_router(status_routes(service))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Guard, settings=settings)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    told = ApiError(
        error.status_code,
        f"{request.method} {request.url.path}: {error.detail}; there are /v1/chat/completions,"
        " /v1/completions, /v1/models, /health, /stats, /metrics and /.",
        code="not_found" if error.status_code == 404 else None,
    )
    response = told.response()
    response.headers.update(error.headers or {})
    return response
