"""The routes that tell how the server is doing."""

from __future__ import annotations

import dataclasses
import secrets
from importlib.resources import files

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, JSONResponse, Response

from h2okv.server.service import Service

_PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# A recorded page is one file with its scripts inside, and asks for nothing.
_VIEW_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def status_routes(service: Service) -> APIRouter:
    """Makes the routes.

    Args:
        service: What they work with.

    Returns:
        The router.
    """
    router = APIRouter()
    page = (files("h2okv.server") / "page" / "index.html").read_text(encoding="utf-8")

    @router.get("/health")
    async def health() -> Response:
        is_healthy = service.engine.is_healthy
        state = {"status": "ok" if is_healthy else "stopped"}
        return JSONResponse(state, 200 if is_healthy else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/stats")
    async def stats() -> Response:
        engine = service.engine
        numbers = dataclasses.asdict(engine.stats())
        more = {
            "model": service.settings.model_name,
            "tokens_per_second": service.metrics.speed.per_second(),
            "row_budget": engine.row_budget,
            "max_context": engine.max_context,
            "max_prompt_tokens": engine.max_prompt_tokens,
        }
        return JSONResponse({**more, **numbers}, headers={"Cache-Control": "no-store"})

    @router.get("/")
    async def index() -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}';"
            " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}
        text = page.replace("@NONCE@", nonce)
        if service.settings.view_page is None:
            text = text.replace('id="view"', 'id="view" hidden')
        return HTMLResponse(text, headers=headers)

    if service.settings.view_page is not None:

        @router.get("/view")
        async def view() -> Response:
            headers = {**_PAGE_HEADERS, "Content-Security-Policy": _VIEW_POLICY}
            return HTMLResponse(service.settings.view_page, headers=headers)

    return router
