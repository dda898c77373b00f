"""The routes."""

from __future__ import annotations

import secrets
import time
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from h2okv.server.config import ServerSettings
from h2okv.server.errors import ApiError
from h2okv.server.handlers import Handlers
from h2okv.server.middleware import RequestGuard

if TYPE_CHECKING:
    from h2okv.engine.llm import AsyncLLM

_PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_POLICY = (
    "default-src 'none'; script-src {inline}; style-src {inline}; {more}; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


def make_app(engine: AsyncLLM, settings: ServerSettings, *, is_guarded: bool = True) -> FastAPI:
    """Makes the application; without its guard where another process has checked who asks."""
    handlers = Handlers(engine, settings)
    # No pages of FastAPI's own: they load scripts from elsewhere.
    app = FastAPI(title="h2okv", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.handlers = handlers
    app.include_router(_openai_routes(handlers))
    app.include_router(_status_routes(handlers))
    app.include_router(_page_routes(settings.view_page))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    if is_guarded:
        app.add_middleware(RequestGuard, settings=settings)
    return app


def _openai_routes(handlers: Handlers) -> APIRouter:
    router = APIRouter(prefix="/v1")
    router.add_api_route("/completions", handlers.completion, methods=["POST"])
    router.add_api_route("/chat/completions", handlers.chat, methods=["POST"])
    settings, created = handlers.settings, int(time.time())
    served = Model(id=settings.model_name, created=created, object="model", owned_by="h2okv")
    # The length is not OpenAI's, but what clients of other servers look for.
    described = served.model_dump(exclude_unset=True)
    described["max_model_len"] = handlers.engine.max_context

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        handlers.check_model(name)
        return JSONResponse(described)

    return router


def _status_routes(handlers: Handlers) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        if handlers.engine.is_healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped"}, 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(handlers.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/stats")
    async def stats() -> Response:
        return JSONResponse(handlers.stats(), headers={"Cache-Control": "no-store"})

    return router


def _page_routes(view_page: str | None) -> APIRouter:
    router = APIRouter()
    page = (files("h2okv.server") / "page" / "index.html").read_text(encoding="utf-8")
    if view_page is None:
        page = page.replace('id="view"', 'id="view" hidden')

    @router.get("/")
    async def index() -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = _POLICY.format(inline=f"'nonce-{nonce}'", more="connect-src 'self'")
        headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}
        return HTMLResponse(page.replace("@NONCE@", nonce), headers=headers)

    if view_page is not None:
        # A recorded page is one file with its scripts inside, and asks for nothing.
        policy = _POLICY.format(inline="'unsafe-inline'", more="img-src data:")

        @router.get("/view")
        async def view() -> Response:
            headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}
            return HTMLResponse(view_page, headers=headers)

    return router


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
    return told.response(**(error.headers or {}))
